"""Values that are written without JSON's types, as JSON text: parameters between XML tags, and Python literals."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Set
from typing import Any

from common.openai.json_schema import TYPES

_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_LOWER_WORDS = ("true", "false", "null")
_PADDED = re.compile(r"([+-]?)0+(\d+)")
_UNSAFE = re.compile(r"\\(?s:.)|['\n\r\0]")
_ESCAPES = "\\'\"abfnrtvx01234567uUN"
MAX_REFERENCES = 8
"""Schemas that refer to each other, one after another, before no more is asked."""
MAX_LITERAL_CHARS = 100_000
"""Longer Python literals are taken for text: Python's parser takes seconds for some."""


def dumps(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, out of an escape
        return json.dumps(value)
    return text


def escaped(text: str) -> str:
    """A piece of a JSON string's inside."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def resolved(schema: Any, root: Any) -> Any:
    """``schema``, or what it refers to inside ``root``."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if found is None:
            break
        schema = found
    return schema


Known = dict[int, frozenset[str] | None]
"""By a schema's identity: its types, None while it is being asked."""


def types_of(schema: Any, root: Any = None, known: Known | None = None) -> frozenset[str]:
    """The JSON types that a parameter's schema allows; empty: any, or it does not say. ``known``: of those of ``root``
    that were asked before. A schema is asked once, however often others refer to it."""
    return _types(schema, root, {} if known is None else known, 0) or frozenset()


def _types(schema: Any, root: Any, known: Known, depth: int) -> frozenset[str] | None:
    """None: it is being asked, so it allows nothing beyond what is found anyway."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return frozenset()
    if id(schema) not in known:
        known[id(schema)] = None
        known[id(schema)] = _types_inside(schema, root, known, depth)
    return known[id(schema)]


def _types_inside(schema: Mapping[str, Any], root: Any, known: Known, depth: int) -> frozenset[str]:
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({TYPES.get(given, given)})
    if isinstance(given, list):
        return frozenset(TYPES.get(each, each) for each in given if isinstance(each, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return frozenset(map(_type_of, values))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            options = [_types(each, root, known, depth + 1) for each in schema[word]]
            told = [option for option in options if option is not None]
            return frozenset().union(*told) if all(told) else frozenset()
    all_of = schema.get("allOf")
    for each in all_of if isinstance(all_of, list) else ():
        if found := _types(each, root, known, depth + 1):
            return found
    return frozenset()


def json_of_text(text: str, types: Set[str]) -> str:
    """The value of a parameter that may have other types than string, as JSON; what fits none of them is a string."""
    stripped = text.strip()
    if types and "string" not in types:
        stripped = _number(stripped) if stripped.lower() not in _LOWER_WORDS else stripped.lower()
    value = _literal(stripped)
    if isinstance(value, str) and types and "string" not in types:  # what is no string was put in quotation marks
        stripped = value.strip()
        value = _literal(stripped)
    if value is _NONE_SUCH:
        return dumps(text)
    if types and not (_types_of_value(value) & types):
        return dumps(text)
    return _as_written(stripped, value)


def json_of_python(text: str) -> str:
    """A Python literal as JSON; what is none is a string."""
    stripped = _number(text.strip())
    if stripped[:1] in ("'", '"') and len(stripped) > 1 and stripped[-1] == stripped[0]:
        return dumps(_unquoted(stripped))
    value = _literal(stripped)
    return dumps(stripped) if value is _NONE_SUCH else _as_written(stripped, value)


class _NoneSuch:
    pass


_NONE_SUCH = _NoneSuch()


def _as_written(text: str, value: Any) -> str:
    """Numbers keep their digits."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            json.loads(text)
        except ValueError:
            return dumps(value)
        return text
    return dumps(value)


def _literal(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        pass
    if len(text) > MAX_LITERAL_CHARS:
        return _NONE_SUCH
    try:
        value = _evaluated(text)
        if isinstance(value, set):  # in the order in which it is written
            value = _evaluated("[" + text.strip()[1:-1] + "]")
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _NONE_SUCH
    return value if isinstance(value, int | float | str | list | dict | tuple | None) else _NONE_SUCH


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:  # ast's
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _evaluated(text: str) -> Any:
    """A literal of Python, in which JSON's words may stand."""
    return ast.literal_eval(_JsonWords().visit(ast.parse(text.strip(), mode="eval")))


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _number(text: str) -> str:
    """Without zeros in front, which neither JSON nor Python has."""
    padded = _PADDED.fullmatch(text)
    return padded[1].replace("+", "") + padded[2] if padded else text


def _unquoted(text: str) -> str:
    """A string literal, whose own quotation marks and line breaks need not be escaped inside."""
    inner = text[1:-1]
    quote = text[0] * 2
    if len(inner) >= 4 and inner.startswith(quote) and inner.endswith(quote):
        inner = inner[2:-2]
    if "\\" not in inner:
        return inner
    if text[0] == '"':
        try:
            return str(json.loads('"' + inner + '"', strict=False))
        except ValueError:
            pass
    try:
        return str(ast.literal_eval("'" + _UNSAFE.sub(_safe, inner) + "'"))
    except (ValueError, SyntaxError, MemoryError):
        return inner


def _safe(found: re.Match[str]) -> str:
    """A backslash that escapes nothing stands for itself."""
    text = found.group()
    return text if text[0] == "\\" and text[1] in _ESCAPES else "".join(f"\\U{ord(each):08x}" for each in text)


def _type_of(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "array"


def _types_of_value(value: Any) -> set[str]:
    name = _type_of(value)
    if name == "integer" or (name == "number" and float(value).is_integer()):
        return {"integer", "number"}
    return {name}
