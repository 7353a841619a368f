"""Every spelling of a constraint, and what is wrong with one that is refused."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from common.errors import InvalidRequestError
from common.grammar.trial import ONE_OF, try_grammar
from common.openai.constraint import MAX_GRAMMAR_CHARS, Constraint, ConstraintKind, read_constraint
from common.openai.json_schema import GRAMMAR_FORMATS

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b", "a"]}
TAGS = {
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}, {"begin": "<g>", "schema": {}, "end": ""}],
    "triggers": ["<"],
}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, ConstraintKind.JSON_OBJECT),
        ({"response_format": {"type": "json_object", "schema": {}}}, ConstraintKind.JSON_OBJECT),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ConstraintKind.JSON_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json_schema"),
        ({"response_format": {"type": "structural_tag", **TAGS}}, ConstraintKind.STRUCTURAL_TAG),
        ({"structured_outputs": {"json": SCHEMA}}, ConstraintKind.JSON_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": True}}, ConstraintKind.JSON_SCHEMA),
        ({"structured_outputs": {"json": True}}, ConstraintKind.JSON_SCHEMA),
        (
            {
                "structured_outputs": {
                    "json": SCHEMA,
                    "disable_additional_properties": False,
                    "_backend_was_auto": False,
                }
            },
            ConstraintKind.JSON_SCHEMA,
        ),
        ({"guided_regex": "x+", "guided_wat": ""}, ConstraintKind.REGEX),
        ({"structured_outputs": {"json_object": True}}, ConstraintKind.JSON_OBJECT),
        ({"structured_outputs": {"regex": "a/b|\\d+"}}, ConstraintKind.REGEX),
        ({"structured_outputs": {"choice": ['yes "or"', "no\n\\", "日本"]}}, ConstraintKind.CHOICE),
        ({"structured_outputs": {"grammar": 'start: "a" | /b+/'}}, ConstraintKind.GRAMMAR),
        ({"structured_outputs": {"grammar": 'root ::= "a" | [b-d]+'}}, ConstraintKind.GRAMMAR),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, ConstraintKind.STRUCTURAL_TAG),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, ConstraintKind.JSON_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "xgrammar"}, ConstraintKind.JSON_SCHEMA),
        ({"guided_json_object": True}, ConstraintKind.JSON_OBJECT),
        ({"guided_regex": "x+"}, ConstraintKind.REGEX),
        ({"guided_choice": ["a"]}, ConstraintKind.CHOICE),
        ({"guided_grammar": 'root ::= "a"'}, ConstraintKind.GRAMMAR),
    ],
)
def test_constraint_when_spelled_in_any_way_then_it_is_one_that_compiles(body: dict[str, Any], kind: str) -> None:
    constraint = read_constraint(body)
    assert constraint is not None
    assert constraint.kind == kind
    assert constraint == read_constraint(json.loads(json.dumps(body)))

    async def lark_of(text: str, param: str) -> str:
        assert text.startswith("root ::=")
        assert param.endswith("grammar")
        return gbnf_to_lark(text)

    assert try_grammar(asyncio.run(constraint.in_lark(lark_of)).grammar()) == ""


@pytest.mark.parametrize(
    "text",
    [
        "%llguidance {}",
        "\n" * 100_000 + "  start\n :",
        "a: b\n\x0b\tstart:",
        "root ::= start\n",
        "\n" * 100_000,
        " start\n" * 10_000,
        "start" + "\n" * 100_000,
        "%llguidances",
    ],
)
def test_grammar_when_it_is_lark_then_that_is_known_at_once(text: str) -> None:
    constraint = read_constraint({"guided_grammar": text})
    assert constraint is not None
    asked: list[str] = []

    async def lark_of(text: str, _: str) -> str:
        asked.append(text)
        return "%llguidance {}"

    begin_s = time.process_time()
    asyncio.run(constraint.in_lark(lark_of))
    assert time.process_time() - begin_s < 5.0  # some ms; llguidance's own way takes minutes
    assert bool(asked) != is_lark_syntax(text[-100:])


def test_json_object_when_it_brings_a_schema_then_is_held_to_it_as_json_schema_is() -> None:
    spelled = [{"type": "json_object", "schema": SCHEMA}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}]
    held, usual = (read_constraint({"response_format": each}) for each in spelled)
    assert held is not None
    assert usual is not None
    assert held.grammar() == usual.grammar()
    assert list(held.schema()["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": None},
        {"guided_json": None},
        {"guided_decoding_backend": "auto"},
        {"guided_json_object": False},
        {"structured_outputs": {"json": None, "_backend_was_auto": False}},
    ],
)
def test_constraint_when_nothing_constrains_then_there_is_none(body: dict[str, Any]) -> None:
    assert read_constraint(body) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": [1]}}, "response_format.schema"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "tag"}}}, "response_format.format"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.triggers"),
        ({"structured_outputs": 1}, "structured_outputs"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"guided_json": '{"items":' * 300 + "{}" + "}" * 300}, "guided_json"),
        ({"guided_json": '{"type":"integer","maximum":18446744073709551616}'}, "guided_json"),
        ({"guided_json": {"items": {"type": "integer", "maximum": 10**25}}}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"maximum": 10**25}}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        **TAGS,
                        "structures": [{**TAGS["structures"][0], "schema": {"minimum": -(10**25)}}],
                    }
                }
            },
            "structured_outputs.structural_tag.structures[0].schema",
        ),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 1}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a", "wat": 1}}, "structured_outputs.wat"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        ({"guided_wat": 1}, "guided_wat"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": " " * (MAX_GRAMMAR_CHARS + 1)}}, "structured_outputs.json"),
    ],
)
def test_constraint_when_malformed_then_the_error_names_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_constraint(body)
    assert caught.value.param == param
    assert param.split(".")[0].rstrip("s") in caught.value.message


def test_schema_when_it_brings_options_for_the_compiler_then_they_are_ours() -> None:
    constraint = read_constraint({"structured_outputs": {"json": {"x-guidance": {"lenient": True}, "not": {}}}})
    assert constraint is not None
    assert "lenient" not in constraint.grammar()
    assert "not" in try_grammar(constraint.grammar())
    compact = read_constraint({"structured_outputs": {"json": {}, "disable_any_whitespace": True}})
    assert compact is not None
    assert compact.schema() == {"x-guidance": {"whitespace_flexible": False}}


def test_schema_when_a_format_is_an_annotation_then_it_says_nothing_of_the_text() -> None:
    annotated = {
        "type": "object",
        "properties": {
            "format": {"type": "integer", "format": "int32"},
            "default": {"anyOf": [{"type": "string", "format": "color"}, {"type": "string", "format": "uuid"}]},
            "kind": {"const": {"format": "color"}},
        },
        "$defs": {"link": {"type": "string", "format": "uri-reference"}},
    }
    constraint = read_constraint({"structured_outputs": {"json": annotated}})
    assert constraint is not None
    schema = constraint.schema()
    assert schema["properties"] == {
        "format": {"type": "integer"},
        "default": {"anyOf": [{"type": "string"}, {"type": "string", "format": "uuid"}]},
        "kind": {"const": {"format": "color"}},
    }
    assert schema["$defs"] == {"link": {"type": "string"}}
    assert try_grammar(constraint.grammar()) == ""


@pytest.mark.parametrize(
    ("silent", "telling"),
    [
        ({"uniqueItems": False}, {"uniqueItems": True}),
        ({"propertyNames": {"type": "string"}}, {"propertyNames": {"type": "string", "maxLength": 2}}),
        ({"propertyNames": {"type": "string", "description": "A city."}}, {"propertyNames": {"pattern": "^a"}}),
        ({"propertyNames": True}, {"propertyNames": False}),
        ({"propertyNames": {}}, {"propertyNames": {"enum": ["a"]}}),
        ({"minContains": 1, "maxContains": 2}, {"minContains": 1, "contains": {"type": "string"}}),
        ({"unevaluatedProperties": True}, {"unevaluatedProperties": False}),
        ({"unevaluatedItems": {}}, {"unevaluatedItems": {"type": "string"}}),
        ({"dependentRequired": {}}, {"dependentRequired": {"a": ["b"]}}),
        ({"dependentSchemas": {}}, {"dependentSchemas": {"a": {"required": ["b"]}}}),
        ({"dependencies": {}}, {"dependencies": {"a": ["b"]}}),
    ],
)
def test_schema_when_a_keyword_forbids_nothing_then_it_is_as_without_and_else_refused_by_name(
    silent: dict[str, Any], telling: dict[str, Any]
) -> None:
    def held(keywords: dict[str, Any]) -> Constraint:
        # A property may be called as the keyword is.
        schema = {"properties": {"a": {"type": ["object", "array"], **keywords}, **dict.fromkeys(keywords, True)}}
        constraint = read_constraint({"structured_outputs": {"json": {"type": "object", **schema}}})
        assert constraint is not None
        return constraint

    constraint = held(silent)
    assert try_grammar(constraint.grammar()) == ""
    properties = constraint.schema()["properties"]
    assert properties == {"a": {"type": ["object", "array"]}, **dict.fromkeys(silent, True)}
    assert next(iter(telling)) in try_grammar(held(telling).grammar())


def test_schema_when_branches_of_one_of_may_both_fit_then_the_refusal_names_what_a_client_can_do() -> None:
    branches = [{"type": "string"}, {"type": "string", "maxLength": 3}]
    constraint = read_constraint({"structured_outputs": {"json": {"oneOf": branches}}})
    assert constraint is not None
    assert try_grammar(constraint.grammar()) == ONE_OF


@pytest.mark.parametrize("name", sorted(GRAMMAR_FORMATS))
def test_schema_when_a_format_is_one_of_the_grammars_then_it_is_kept(name: str) -> None:
    constraint = read_constraint({"structured_outputs": {"json": {"type": "string", "format": name}}})
    assert constraint is not None
    assert constraint.schema()["format"] == name
    assert try_grammar(constraint.grammar()) == ""
