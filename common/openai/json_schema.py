"""JSON schemas as clients send them, made ready for a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GRAMMAR_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Values of ``format`` that llguidance holds a text to."""
_DATA = frozenset({"const", "enum", "default", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    """``schema`` without each ``format`` that no grammar knows: draft 2020-12 calls it an annotation, which forbids no
    text."""
    return {key: _part(key, value) for key, value in schema.items() if not _is_annotation(key, value)}


def _is_annotation(key: str, value: object) -> bool:
    return key == "format" and isinstance(value, str) and value not in GRAMMAR_FORMATS


def _part(key: str, value: Any) -> Any:
    if key in _DATA:
        return value
    if key in _BY_NAME and isinstance(value, Mapping):
        return {name: _schema(each) for name, each in value.items()}
    return [_schema(each) for each in value] if isinstance(value, list) else _schema(value)


def _schema(value: Any) -> Any:
    return without_annotations(value) if isinstance(value, Mapping) else value
