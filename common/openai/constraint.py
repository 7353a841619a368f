"""Structured output: every spelling of a request's constraint becomes one frozen value, and that one grammar.

``response_format``, ``structured_outputs`` and the older ``guided_*`` fields are read here, by shape alone. Whether the
grammar can be compiled is ``common.grammar``'s to say. The grammar is one of llguidance: JSON text of its top level, or
Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import orjson
from llguidance import StructTag, regex_to_lark

from common.errors import InvalidRequestError
from common.openai.json_schema import without_annotations
from common.wire.fields import Fields, invalid, is_empty, shown
from common.wire.json_text import JsonBounds, parse_json

__all__ = ["MAX_GRAMMAR_CHARS", "Constraint", "ConstraintKind", "read_constraint"]

MAX_GRAMMAR_CHARS = 131_072
"""Characters of a schema, an expression or a grammar. What compiles in a second is shorter by far."""
MAX_CHOICES = 4096
MAX_TAGS = 256
"""Structures of one structural tag."""
WHITESPACE = r"[ \n\r\t]{1,32}"
"""What JSON has between its parts where nothing else is asked for. Bounded: a model that has nothing to say must not
fill an answer with blanks."""

RESPONSE_FORMAT = "response_format"
STRUCTURED_OUTPUTS = "structured_outputs"
# Spellings of ``structured_outputs``, and of the same with the prefix ``guided_``.
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern", "disable_fallback")
_GUIDED_IGNORED = ("guided_decoding_backend",)
"""Which library compiles: there is one here."""
# As llguidance tells Lark from GBNF, but in a time that grows as the text does.
_LARK = re.compile(r"(?m)^[^\S\n]*+(%llguidance\b|start\s*+:)")


class ConstraintKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer's text must be. Equal constraints have equal grammars.

    Attributes:
        kind: what ``text`` is.
        text: a JSON schema (JSON text, properties in the client's order: answers keep it), a regular expression, a JSON
            list of choices, Lark or GBNF, or a structural tag's Lark.
        param: the request's field, for errors.
        is_compact: JSON without blanks between its parts.
        whitespace: a regular expression for these blanks; None: ``WHITESPACE``.
    """

    kind: ConstraintKind
    text: str
    param: str
    is_compact: bool = False
    whitespace: str | None = None

    @property
    def is_json(self) -> bool:
        return self.kind in (ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA)

    def schema(self) -> dict[str, Any]:
        """The JSON schema, with what llguidance is to know of blanks; for grammars that have it as a part (``%json``).
        Of a JSON constraint only."""
        assert self.is_json
        given = orjson.loads(self.text)
        schema = without_annotations(given if isinstance(given, dict) else {"allOf": [given]})
        if self.is_compact:
            return {**schema, "x-guidance": {"whitespace_flexible": False}}
        return {**schema, "x-guidance": {"whitespace_pattern": self.whitespace or WHITESPACE}}

    async def in_lark(self, lark_of: Callable[[str, str], Awaitable[str]]) -> Constraint:
        """The constraint without GBNF, llama.cpp's notation. ``lark_of``: Lark of a text in it and the text's field."""
        if self.kind is not ConstraintKind.GRAMMAR or _LARK.search(self.text):
            return self
        return replace(self, text=await lark_of(self.text, self.param))

    def grammar(self) -> str:
        """The constraint, which is ``in_lark``, as llguidance's top level: ``SamplingParams.grammar``."""
        if self.is_json:
            return _top_level({"json_schema": self.schema()})
        if self.kind is ConstraintKind.CHOICE:
            # One lexeme: as a rule each choice would be an item of the parser.
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in orjson.loads(self.text))
            return _top_level({"lark_grammar": f"start: CHOICE\nCHOICE: {choices}"})
        if self.kind is ConstraintKind.REGEX:
            # Digits and letters as in JSON Schema: ASCII.
            return _top_level({"lark_grammar": f"start: /{regex_to_lark(self.text, use_ascii='dw')}/"})
        return _top_level({"lark_grammar": self.text})


def read_constraint(body: Mapping[str, Any]) -> Constraint | None:
    """The constraint of a request's body; None without one.

    Raises:
        InvalidRequestError: naming the field; two fields that constrain, an unknown kind, a value of another type.
    """
    found = [
        constraint
        for constraint in (_response_format(body), _structured_outputs(body), _guided(body))
        if constraint is not None
    ]
    if len(found) > 1:
        raise InvalidRequestError(
            f"{found[1].param} cannot be given beside {found[0].param}: one of them may say what the answer is",
            param=found[1].param,
        )
    if not found:
        return None
    [constraint] = found
    if len(constraint.text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{constraint.param} must have at most {MAX_GRAMMAR_CHARS} characters, got {len(constraint.text)}",
            param=constraint.param,
        )
    return constraint


def _response_format(body: Mapping[str, Any]) -> Constraint | None:
    value = body.get(RESPONSE_FORMAT)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        invalid(RESPONSE_FORMAT, value, "an object with a type")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        # With a schema as llama.cpp, Fireworks and Together spell json_schema.
        schema = value.get("schema")
        return _json(f"{RESPONSE_FORMAT}.schema", schema) if schema not in (None, {}) else _json_object(RESPONSE_FORMAT)
    if kind == "json_schema":
        return _response_schema(value.get("json_schema"))
    if kind != "structural_tag":
        raise InvalidRequestError(
            f"{RESPONSE_FORMAT}.type must be text, json_object, json_schema or structural_tag, got {shown(kind)}",
            param=RESPONSE_FORMAT,
        )
    return _structural_tag(RESPONSE_FORMAT, value)


def _response_schema(value: object) -> Constraint:
    name = f"{RESPONSE_FORMAT}.json_schema"
    if not isinstance(value, Mapping):
        invalid(name, value, "an object with a schema")
    fields = Fields(value, prefix=name + ".")
    fields.string("name")
    fields.string("description")
    fields.boolean("strict")  # what is not strict elsewhere is a wish; here it is kept as well
    if value.get("schema") is None:
        raise InvalidRequestError(f"{name}.schema is required", param=f"{name}.schema")
    return _json(f"{name}.schema", value["schema"])


def _structured_outputs(body: Mapping[str, Any]) -> Constraint | None:
    value = body.get(STRUCTURED_OUTPUTS)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        invalid(STRUCTURED_OUTPUTS, value, "an object")
    unknown = sorted(key for key in value if key not in (*_KINDS, *_OPTIONS) and not is_empty(value[key]))
    if unknown:
        name = f"{STRUCTURED_OUTPUTS}.{unknown[0]}"
        raise InvalidRequestError(
            f"{name} {shown(value[unknown[0]])} is not supported, only {', '.join((*_KINDS, *_OPTIONS))}",
            param=name,
            code="unsupported_parameter",
        )
    constraint = _one_of(value, prefix=f"{STRUCTURED_OUTPUTS}.")
    if constraint is None and any(value.values()):
        raise InvalidRequestError(
            f"{STRUCTURED_OUTPUTS} must have one of {', '.join(_KINDS)}", param=STRUCTURED_OUTPUTS
        )
    return constraint


def _guided(body: Mapping[str, Any]) -> Constraint | None:
    given = {
        key.removeprefix("guided_"): item
        for key, item in body.items()
        if key.startswith("guided_") and key not in _GUIDED_IGNORED and item is not None
    }
    if not given:
        return None
    unknown = sorted(key for key in given if key not in (*_KINDS, *_OPTIONS) and not is_empty(given[key]))
    if unknown:
        name = f"guided_{unknown[0]}"
        raise InvalidRequestError(
            f"{name} {shown(given[unknown[0]])} is not supported", param=name, code="unsupported_parameter"
        )
    return _one_of(given, prefix="guided_")


def _one_of(value: Mapping[str, Any], *, prefix: str) -> Constraint | None:
    """The constraint of an object that has one of ``_KINDS``; None: it has none."""
    fields = Fields(value, prefix=prefix)
    kinds = [kind for kind in _KINDS if value.get(kind) is not None and not (kind == "json_object" and not value[kind])]
    is_compact = fields.boolean("disable_any_whitespace")
    whitespace = fields.string("whitespace_pattern", min_chars=1, max_chars=256)
    if not kinds:
        return None
    if len(kinds) > 1:
        raise InvalidRequestError(
            f"{prefix}{kinds[1]} cannot be given beside {prefix}{kinds[0]}", param=prefix + kinds[1]
        )
    [kind] = kinds
    name, item = prefix + kind, value[kind]
    if kind == "json":
        return _json(name, item, is_compact=is_compact, whitespace=whitespace)
    if kind == "json_object":
        fields.boolean(kind)
        return _json_object(name, is_compact=is_compact, whitespace=whitespace)
    if kind == "choice":
        return _choice(name, item)
    if kind == "structural_tag":
        return _structural_tag(name, _parsed(name, item))
    if not isinstance(item, str) or not item:
        invalid(name, item, "a text that is not empty")
    if kind == "regex":
        return Constraint(ConstraintKind.REGEX, item, name)
    return Constraint(ConstraintKind.GRAMMAR, item, name)


def _json_object(name: str, *, is_compact: bool = False, whitespace: str | None = None) -> Constraint:
    return Constraint(ConstraintKind.JSON_OBJECT, '{"type":"object"}', name, is_compact, whitespace)


def _json(name: str, value: object, *, is_compact: bool = False, whitespace: str | None = None) -> Constraint:
    schema = _parsed(name, value)
    if not isinstance(schema, dict | bool):
        invalid(name, value, "a JSON schema: an object, or its JSON text")
    return Constraint(ConstraintKind.JSON_SCHEMA, _as_text(name, schema), name, is_compact, whitespace)


def _as_text(name: str, schema: object) -> str:
    try:
        return orjson.dumps(schema).decode()
    except orjson.JSONEncodeError as exc:
        raise InvalidRequestError(
            f"{name} must hold whole numbers of 64 bits at most, got a longer one", param=name
        ) from exc


def _parsed(name: str, value: object) -> object:
    """What stands in the JSON text ``value``, or ``value`` when it is none."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{name} must have at most {MAX_GRAMMAR_CHARS} characters, got {len(value)}", param=name
        )
    try:
        return parse_json(value.encode(), JsonBounds(), name)
    except InvalidRequestError as exc:
        raise InvalidRequestError(exc.message, param=name) from exc


def _choice(name: str, value: object) -> Constraint:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        invalid(name, value, "a list of texts that is not empty")
    if len(value) > MAX_CHOICES:
        raise InvalidRequestError(f"{name} must hold at most {MAX_CHOICES} choices, got {len(value)}", param=name)
    for item in value:
        if not isinstance(item, str) or not item:
            invalid(name, item, "texts that are not empty")
    return Constraint(ConstraintKind.CHOICE, orjson.dumps(list(value)).decode(), name)


def _structural_tag(name: str, value: object) -> Constraint:
    """``structures`` [{begin, schema, end}] in free text, each where one of ``triggers`` was written."""
    if not isinstance(value, Mapping):
        invalid(name, value, "an object with structures and triggers")
    if value.get("format") is not None:
        raise InvalidRequestError(
            f"{name}.format is not supported, only structures and triggers",
            param=f"{name}.format",
            code="unsupported_parameter",
        )
    triggers, structures = value.get("triggers"), value.get("structures")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(each, str) and each for each in triggers):
        invalid(f"{name}.triggers", triggers, "a list of texts that is not empty")
    if not isinstance(structures, list) or not structures:
        invalid(f"{name}.structures", structures, "a list of objects that is not empty")
    if len(structures) > MAX_TAGS or len(triggers) > MAX_TAGS:
        raise InvalidRequestError(
            f"{name} must have at most {MAX_TAGS} structures and triggers, got {len(structures)} and {len(triggers)}",
            param=name,
        )
    tags = [_tag(f"{name}.structures[{index}]", each, triggers) for index, each in enumerate(structures)]
    return Constraint(ConstraintKind.STRUCTURAL_TAG, StructTag.to_grammar(tags, assume_special=False), name)


def _tag(name: str, value: object, triggers: Sequence[str]) -> StructTag:
    if not isinstance(value, Mapping):
        invalid(name, value, "an object with begin, schema and end")
    fields = Fields(value, prefix=name + ".")
    begin, end = fields.string("begin", min_chars=1), fields.string("end")
    if begin is None or end is None:
        raise InvalidRequestError(f"{name} must have begin and end", param=name)
    trigger = next((each for each in triggers if begin.startswith(each)), None)
    if trigger is None:
        raise InvalidRequestError(f"{name}.begin {shown(begin)} must start with one of the triggers", param=name)
    schema = _json(f"{name}.schema", value.get("schema", {}))
    return StructTag(trigger=trigger, begin=begin, grammar=schema.schema(), end=end)


def _top_level(grammar: Mapping[str, Any]) -> str:
    return orjson.dumps({"grammars": [grammar]}).decode()
