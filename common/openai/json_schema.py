"""JSON schemas as clients send them, made ready for a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher

GRAMMAR_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Values of ``format`` that llguidance holds a text to."""
TYPES = {
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("float", "double"), "number"),
    "bool": "boolean",
    "str": "string",
    "dict": "object",
    "list": "array",
    "tuple": "array",
}
"""What tools call the types of JSON that are named otherwise in their language."""
MAX_PATTERN_CHARS = 65_536
"""Of all patterns of one request that are tried, at up to 2 us each; a pattern costs as much as ``PATTERN_CHARS``
beside its own."""
PATTERN_CHARS = 16
_JSON_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
_DATA = frozenset({"const", "enum", "default", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_NOTES = frozenset({"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"})


def _allows_all(schema: object, kind: str = "") -> bool:
    """All values, or all of the type ``kind``."""
    if not isinstance(schema, Mapping):
        return schema is True
    held = {key: value for key, value in schema.items() if key not in _NOTES}
    return not held or held == {"type": kind}


_SAYS_NOTHING: Mapping[str, Callable[[Any], bool]] = {
    # Draft 2020-12 calls one that no grammar knows an annotation, which forbids no text.
    "format": lambda value: isinstance(value, str) and value not in GRAMMAR_FORMATS,
    "uniqueItems": lambda value: value is False,
    "propertyNames": lambda value: _allows_all(value, "string"),  # of every z.record, in zod 4
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), _allows_all),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), lambda value: value == {}),
}
"""By keyword that llguidance refuses, or refuses at times: whether a value forbids nothing."""
_OF_CONTAINS = frozenset({"minContains", "maxContains"})


def without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    """``schema`` without keywords that forbid nothing, for which llguidance would refuse it."""
    ignored = _OF_CONTAINS if "contains" not in schema else frozenset()
    return {
        key: _part(key, value)
        for key, value in schema.items()
        if key not in ignored and not (key in _SAYS_NOTHING and _SAYS_NOTHING[key](value))
    }


def _part(key: str, value: Any) -> Any:
    if key in _DATA:
        return value
    if key in _BY_NAME and isinstance(value, Mapping):
        return {name: _schema(each) for name, each in value.items()}
    return [_schema(each) for each in value] if isinstance(value, list) else _schema(value)


def _schema(value: Any) -> Any:
    return without_annotations(value) if isinstance(value, Mapping) else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


_IS_GOOD: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _is_count),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _is_number),
    # In old drafts a boolean beside minimum and maximum.
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), lambda value: isinstance(value, int | float)),
    **dict.fromkeys(("format", "pattern", "$ref"), _is_text),
    **dict.fromkeys(("enum", "anyOf", "oneOf", "allOf", "prefixItems"), _is_list),
    "required": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    **dict.fromkeys(("items", "additionalProperties"), _is_schema),
    **dict.fromkeys(_BY_NAME, lambda value: isinstance(value, Mapping)),
}
"""By keyword: whether a value is of the type that it must have."""


def is_regex(pattern: str) -> bool:
    """Whether a grammar can be held to ``pattern``: look-around is one that it cannot."""
    grammar = json.dumps({"grammars": [{"json_schema": {"type": "string", "pattern": pattern}}]})
    return not LLMatcher.validate_grammar(grammar, None)


class LenientSchemas:
    """Schemas of one request's functions that are not strict."""

    def __init__(self) -> None:
        self._chars_left = MAX_PATTERN_CHARS

    def without_the_rest(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """``schema`` without what cannot be held, and without annotations."""
        return self._held(without_annotations(schema))

    def _held(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: part
            for key, value in schema.items()
            if key not in _IS_GOOD or _IS_GOOD[key](value)
            if (part := self._part(key, value)) is not None or key in _DATA
        }

    def _part(self, key: str, value: Any) -> Any:
        """None: nothing of it can be held."""
        if key in _DATA:
            return value
        if key == "type":
            return _types(value)
        if key == "pattern":
            return value if self._is_regex(value) else None
        if key in _BY_NAME:
            is_pattern = key == "patternProperties"
            return {name: self._schema(each) for name, each in value.items() if not is_pattern or self._is_regex(name)}
        if key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            return [self._schema(each) for each in value]
        return self._held(value) if isinstance(value, Mapping) else value

    def _schema(self, value: Any) -> Any:
        return self._held(value) if isinstance(value, Mapping) else value if isinstance(value, bool) else {}

    def _is_regex(self, pattern: str) -> bool:
        self._chars_left -= len(pattern) + PATTERN_CHARS
        return self._chars_left >= 0 and is_regex(pattern)


def _types(value: Any) -> str | list[str] | None:
    """Under the names that JSON has for them."""
    given = value if isinstance(value, list) else [value]
    known = [TYPES.get(each, each) for each in given if isinstance(each, str)]
    known = [each for each in dict.fromkeys(known) if each in _JSON_TYPES]
    return known if len(known) > 1 else known[0] if known else None
