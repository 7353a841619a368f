"""The types that a schema allows, whatever refers to what in it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from common.text.answers.formats import ToolTypes
from common.text.answers.values import MAX_REFERENCES


def types_of_parameters(properties: dict[str, Any], definitions: dict[str, Any]) -> dict[str, set[str]]:
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    found = ToolTypes.of([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    return {name: set(types) for name, types in found.parameters["f"].items()}


def to(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
def test_types_when_a_schema_refers_to_itself_many_times_then_each_schema_is_asked_once(word: str) -> None:
    definitions = {"a": {word: [to("a")] * 40}}
    definitions |= {f"b{depth}": {word: [to(f"b{depth + 1}")] * 40} for depth in range(MAX_REFERENCES * 2)}
    properties = {f"p{number}": to(name) for number in range(50) for name in ("a", "b0")}
    begin_s = time.process_time()
    found = types_of_parameters(properties, definitions)
    assert time.process_time() - begin_s < 5.0  # 8 ms; asked again and again, 40**9 questions
    assert found == {name: set() for name in properties}


@pytest.mark.parametrize("word", ["anyOf", "oneOf"])
def test_types_when_one_of_them_is_the_schema_itself_then_they_are_those_of_the_others(word: str) -> None:
    definitions = {"tree": {word: [to("tree"), {"type": "string"}, {"type": "array", "items": to("tree")}, to("n")]}}
    definitions["n"] = {word: [to("tree"), {"type": "number"}]}
    properties = {"tree": to("tree"), "again": {word: [to("tree"), to("tree"), {"type": "null"}]}}
    assert types_of_parameters(properties, definitions) == {
        "tree": {"string", "array", "number"},
        "again": {"string", "array", "number", "null"},
    }
