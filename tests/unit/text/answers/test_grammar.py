"""Answers drawn at random from a grammar: they parse, their arguments fit the schemas, and a template that is given the
calls writes the very text."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import llguidance.numpy
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidRequestError
from common.openai.json_schema import MAX_PATTERN_CHARS
from common.openai.protocol import parse_chat
from common.text.answers.detection import detect
from common.text.answers.formats import AnswerFormat, ToolTypes
from common.text.answers.grammar import Budget, CallRules, Thinking, answer_grammar, thinking_of
from tests.support.chat_templates import TEMPLATES
from tests.unit.text.answers.test_detection import renderer
from tests.unit.text.answers.test_parser import parse

TOKENIZER = LLTokenizer("byte")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "minLength": 1, "maxLength": 9},
                    "days": {"type": "integer", "minimum": 0, "maximum": 99},
                    "unit": {"enum": ["c", "f"]},
                    "hourly": {"type": "boolean"},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "sum",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "values": {"type": "array", "items": {"type": "integer", "minimum": -9}, "maxItems": 3},
                    "place": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
                },
                "required": ["values", "place"],
                "additionalProperties": False,
                "$defs": {
                    "place": {
                        "type": "object",
                        "properties": {"name": {"type": "string", "maxLength": 3}},
                        "required": ["name"],
                        "additionalProperties": False,
                    }
                },
            },
        },
    },
]  # fmt: skip
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in TOOLS}
WITH_CALLS = sorted(set(TEMPLATES) - {"no_calls"})


def grammar_of(answer_format: AnswerFormat, **options: Any) -> str:
    given: dict[str, Any] = {
        "tools": TOOLS,
        "is_call_required": True,
        "parallel": True,
        "constraint": None,
        "thinking": Thinking.CLOSED,
        "token_id": lambda _: None,
    }
    return answer_grammar(answer_format, **{**given, **options})


def draw(grammar: str, seed: int, most: int = 3000) -> str:
    """A random text of a grammar, of ASCII."""
    rng, matcher, out = random.Random(seed), LLMatcher(TOKENIZER, grammar), bytearray()
    assert not matcher.is_error(), matcher.get_error()
    masks = llguidance.numpy.allocate_token_bitmask(1, TOKENIZER.vocab_size)
    while len(out) < most:
        llguidance.numpy.fill_next_token_bitmask(matcher, masks, 0)
        bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")[: TOKENIZER.vocab_size]
        allowed = [int(token_id) for token_id in np.flatnonzero(bits)]
        plain = [token_id for token_id in allowed if 32 <= token_id < 127 or token_id == 10]
        if TOKENIZER.eos_token in allowed and (not plain or rng.random() < 0.3):
            return out.decode()
        token_id = rng.choice(plain)
        assert matcher.consume_token(token_id)
        out.append(token_id)
    raise AssertionError(f"no end after {most} characters: {out[:200]!r}")


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = TOKENIZER.tokenize_str(text)
    return matcher.validate_tokens(token_ids) == len(token_ids) and (
        bool(matcher.consume_tokens(token_ids)) and matcher.is_accepting()
    )


def check_calls(name: str, seeds: range, *, parallel: bool) -> None:
    render = renderer(TEMPLATES[name])
    answer_format = detect(render, lambda _: False)
    assert answer_format.tools is not None
    grammar = grammar_of(answer_format, parallel=parallel)
    user = {"role": "user", "content": "Hello"}
    variables = {"enable_thinking": False}
    prompt = render([user], tools=TOOLS, add_generation_prompt=False, variables=variables)
    assert prompt is not None
    for seed in seeds:
        text = draw(grammar, seed)
        total, parser = parse(answer_format, list(text), types=ToolTypes.of(TOOLS))
        assert total.names, text
        assert (total.content, parser.is_call_open) == ("", False), text
        assert parallel or len(total.names) == 1
        calls = []
        for function, arguments, call_id in zip(total.names, total.arguments, total.call_ids, strict=True):
            jsonschema.validate(json.loads(arguments), SCHEMAS[function])
            given = arguments if answer_format.tools.takes_text else json.loads(arguments)
            calls.append({"id": call_id or "call_1", "function": {"name": function, "arguments": given}})
        history = [user, {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "ok"}]
        again = render(history, tools=TOOLS, add_generation_prompt=True, variables=variables)
        assert again is not None
        closed = "<think>\n\n</think>\n\n" if again.startswith(f"{prompt}<|assistant|><think>") else ""
        assert again.startswith(f"{prompt}<|assistant|>{closed}{text}<|end|>"), (text, again)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_when_they_are_required_then_they_fit_and_are_rendered_as_they_were_written(name: str) -> None:
    check_calls(name, range(2), parallel=True)
    check_calls(name, range(2, 4), parallel=False)


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_when_many_are_required_then_all_fit_and_are_rendered_as_they_were_written(name: str) -> None:
    check_calls(name, range(100, 200), parallel=True)
    check_calls(name, range(200, 250), parallel=False)


def text_of(name: str, call: str, arguments: dict[str, Any]) -> tuple[AnswerFormat, str]:
    answer_format = detect(renderer(TEMPLATES[name]), lambda _: False)
    assert answer_format.tools is not None
    return answer_format, answer_format.tools.layout.write([(call, arguments)])


def test_calls_when_text_is_allowed_then_what_begins_as_one_must_be_one() -> None:
    answer_format, call = text_of("hermes", "sum", {"values": [1], "place": None})
    grammar = grammar_of(answer_format, is_call_required=False)
    assert accepts(grammar, "No call < here.")
    assert accepts(grammar, "")
    assert accepts(grammar, f"Well.\n{call}")
    assert not accepts(grammar, f"Well.\n{call.replace('[1]', '[-10]')}")
    assert not accepts(grammar, f"{call}\n{call} and")
    assert accepts(grammar, f"{call}\n{call}")
    assert not accepts(grammar_of(answer_format, is_call_required=False, parallel=False), f"{call}\n{call}")
    required = grammar_of(answer_format)
    assert accepts(required, call)
    assert not accepts(required, "Text")
    assert not accepts(required, f" {call}")


def test_strings_when_they_are_held_then_escapes_are_those_that_a_template_writes() -> None:
    tools = [
        {"function": {"name": "say", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}}
    ]
    answer_format, call = text_of("hermes", "say", {"text": "a\tb"})
    grammar = grammar_of(answer_format, tools=tools)
    assert "a\\tb" in call
    assert accepts(grammar, call)
    assert not accepts(grammar, call.replace("\\t", "\\u0009"))


def test_content_when_it_is_constrained_then_an_answer_is_that_or_calls() -> None:
    answer_format, call = text_of("hermes", "now", {})
    constraint = json.dumps({"grammars": [{"json_schema": {"type": "integer"}}]})
    grammar = grammar_of(answer_format, is_call_required=False, constraint=constraint)
    assert accepts(grammar, "12")
    assert accepts(grammar, call)
    assert not accepts(grammar, "twelve")
    assert not accepts(grammar, f"12{call}")
    alone = grammar_of(answer_format, tools=[], is_call_required=False, constraint='start: "yes" | "no"')
    assert accepts(alone, "yes")
    assert not accepts(alone, "12")
    assert not accepts(alone, call)


def test_reasoning_when_the_prompt_has_opened_it_then_the_constraint_begins_after_it() -> None:
    answer_format, call = text_of("hermes_thinking", "now", {})
    is_open = grammar_of(answer_format, thinking=Thinking.OPEN)
    assert accepts(is_open, f"12 <b\n</think>\n\n{call}")
    assert not accepts(is_open, call)
    assert not accepts(is_open, "x</think>y")
    may_open = grammar_of(answer_format, thinking=Thinking.ABSENT)
    assert accepts(may_open, call)
    assert accepts(may_open, f"<think>\nx\n</think>\n\n{call}")
    assert not accepts(grammar_of(answer_format), f"<think>x</think>\n\n{call}")
    schema = '{"grammars": [{"json_schema": {"const": 5}}]}'
    content = grammar_of(answer_format, tools=[], is_call_required=False, constraint=schema, thinking=Thinking.OPEN)
    assert accepts(content, "5?\n</think>\n\n5")
    assert not accepts(content, "5?\n</think>\n\n6")


def test_reasoning_when_it_has_a_budget_then_it_ends_there() -> None:
    answer_format, call = text_of("hermes_thinking", "now", {})
    budget = Budget(5, None, ())
    for is_required, rest in ((True, call), (False, "Any text.")):
        grammar = grammar_of(
            answer_format, tools=TOOLS, is_call_required=is_required, thinking=Thinking.OPEN, budget=budget
        )
        for thought in ("", "abc", "abcde"):
            assert accepts(grammar, f"{thought}</think>\n\n{rest}")
        assert not accepts(grammar, f"{'a' * 16}</think>\n\n{rest}")
        assert not accepts(grammar, f"{'a' * 16}")
    # Where the end is one token: here a byte, and byte 1 is special.
    by_token = grammar_of(
        answer_format, tools=[], is_call_required=False, thinking=Thinking.OPEN, budget=Budget(3, ord("#"), (1, 2, 4))
    )
    assert accepts(by_token, "abc#\n\nx")
    assert accepts(by_token, "#\n\n")
    assert not accepts(by_token, "abcd#\n\nx")
    assert not accepts(by_token, "a\x01#\n\nx")


@pytest.mark.parametrize(
    ("tail", "thinking"),
    [
        ("", Thinking.ABSENT),
        ("<think>\n", Thinking.OPEN),
        ("<think>\n\n</think>\n\n", Thinking.CLOSED),
        ("<think>so </think> <think>", Thinking.OPEN),
    ],
)
def test_prompt_when_it_ends_then_whether_reasoning_is_open_is_known(tail: str, thinking: Thinking) -> None:
    assert thinking_of(tail, detect(renderer(TEMPLATES["hermes_thinking"]), lambda _: False)) is thinking
    assert thinking_of(tail, AnswerFormat()) is Thinking.ABSENT


def test_schema_when_a_strict_tool_has_what_cannot_be_held_to_then_it_is_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for name in ("hermes", "xml", "python"):
        answer_format = detect(renderer(TEMPLATES[name]), lambda _: False)
        for strict in (True, False):
            tools = [{"type": "function", "function": {"name": "f", "strict": strict, "parameters": schema}}]
            error = LLMatcher.validate_grammar(grammar_of(answer_format, tools=tools), TOKENIZER)
            assert ("uniqueItems" in error) is strict


def to(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


TWICE = {f"c{place}": {"anyOf": [to(f"c{place + 1}")] * 2} for place in range(60)}
REFERRING: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "itself": ({"a": {"anyOf": [{"type": "integer"}, to("a")]}}, [5], [5.5]),
    "each other": (
        {"a": {"oneOf": [{"type": "integer"}, to("b")]}, "b": {"oneOf": [{"type": "boolean"}, to("a")]}},
        [5, True],
        [None],
    ),
    "each twice the next": ({"a": to("c0"), **TWICE, "c60": {"type": ["integer", "null"]}}, [5, None], [5.5]),
}
"""Definitions, values of ``a`` that fit, and such that do not."""


@pytest.mark.parametrize("definitions", REFERRING)
@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_when_schemas_refer_to_each_other_then_each_has_one_rule(name: str, definitions: str) -> None:
    defs, good, bad = REFERRING[definitions]
    schema = {"type": "object", "properties": {"p": to("a"), "q": to("a")}, "required": ["p"], "$defs": defs}
    call = "f:0" if name == "kimi" else "f"
    answer_format, _ = text_of(name, call, {})
    grammar = grammar_of(answer_format, tools=[{"function": {"name": "f", "parameters": schema}}])
    assert len(str(grammar)) < 50 * len(json.dumps(schema))  # a rule for each way would be 2**60 of them
    for values, fits in ((good, True), (bad, False)):
        for value in values:
            assert accepts(grammar, text_of(name, call, {"p": value})[1]) is fits, value
            assert accepts(grammar, text_of(name, call, {"p": good[0], "q": value})[1]) is fits, value


@pytest.mark.parametrize("name", ["xml", "python"])
def test_calls_when_their_rules_are_longer_than_a_grammar_may_be_then_the_tool_is_named(name: str) -> None:
    integer = {"type": "integer"}
    schema = {"type": "object", "properties": {f"p{i}": integer for i in range(10_000)}}
    schema["$defs"] = {f"d{i}": integer for i in range(10_000)}
    answer_format, _ = text_of(name, "f", {})
    tools = [{"function": {"name": "f"}}, {"function": {"name": "g", "parameters": schema}}]
    with pytest.raises(InvalidRequestError, match="more than 1000000 characters") as caught:
        grammar_of(answer_format, tools=tools)
    assert caught.value.param == "tools[1].function.parameters"


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
PARTS: dict[str, tuple[dict[str, Any], list[Any], list[Any], bool]] = {
    "look-around": ({"type": "string", "pattern": EMAIL}, ["a@b.ch"], [5], False),
    "pattern that is none": ({"type": "string", "pattern": "a(b"}, ["x"], [5], False),
    "pattern of another type": ({"type": "string", "pattern": None}, ["x"], [5], False),
    "format of another type": ({"type": "string", "format": None}, ["x"], [5], False),
    "length of another type": ({"type": "string", "maxLength": 10.0, "minLength": None}, ["x"], [5], False),
    "type of another language": ({"type": "float", "minimum": "0"}, [5.5], [True], False),
    "types that nobody knows": ({"type": ["int", "file"], "maximum": 9}, [5], [True, 10], False),
    "required of another type": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": 5}, "required": None},
        [{}, {"a": 5}],
        [{"a": True}],
        False,
    ),
    "patterns of properties": (
        {
            "type": "object",
            "patternProperties": {"^a$": {"type": "integer"}, "(?=b)": {}},
            "additionalProperties": None,
        },
        [{"a": 5}],
        [{"a": True}],
        False,
    ),
    "nothing": ({"anyOf": [{"const": None}, {"type": "integer", "enum": None}]}, [None, 5], [True], False),
    "escaped slashes": (
        {"type": "string", "pattern": r"^https?:\/\/x[\/]$"},
        ["http://x/"],
        [r"http:\/\/x/"],
        True,
    ),
    "slashes": ({"type": "string", "pattern": "^https?://x/$"}, ["https://x/"], ["https:/x/"], True),
    "escaped backslash": ({"type": "string", "pattern": r"^a\\/b\/$"}, ["a\\/b/"], ["a/b/"], True),
    "line break": ({"type": "string", "pattern": "^a\nb\\\n$"}, ["a\nb\n"], ["anb\n"], True),
}
"""A parameter's schema, values that fit, such that do not, and whether a strict function can have it."""


# Strings in Python have neither backslash nor line break.
HELD = [(name, part) for name in WITH_CALLS for part in PARTS if name != "python" or "\\" not in str(PARTS[part][1])]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("name", "part"), HELD)
def test_keyword_when_it_cannot_be_held_then_only_a_strict_function_is_refused(
    name: str, part: str, strict: bool
) -> None:
    parameter, good, bad, can_be_strict = PARTS[part]
    schema = {"type": "object", "properties": {"p": parameter}, "required": ["p"], "additionalProperties": False}
    tool = {"function": {"name": "f", "strict": strict, "parameters": schema}}
    call = "f:0" if name == "kimi" else "f"
    answer_format, _ = text_of(name, call, {})
    grammar = grammar_of(answer_format, tools=[tool])
    checked = CallRules((tool,), is_required=True, is_held=True).schemas()
    assert checked is not None
    if strict and not can_be_strict:
        assert LLMatcher.validate_grammar(checked, TOKENIZER)
        return
    assert LLMatcher.validate_grammar(checked, TOKENIZER) == ""
    for values, fits in ((good, True), (bad, False)):
        for value in values:
            # Between tags all values are text.
            if fits or not (name.startswith("xml") and parameter.get("type") == "string" and value == 5):
                assert accepts(grammar, text_of(name, call, {"p": value})[1]) is fits, value


def test_patterns_when_they_are_longer_than_may_be_tried_then_they_are_left_out() -> None:
    answer_format, _ = text_of("hermes", "f", {})
    slow = {"type": "string", "pattern": r"\p{L}" * (MAX_PATTERN_CHARS // 15)}
    schema = {"type": "object", "properties": {f"p{i}": slow for i in range(50)}}
    begin_s = time.process_time()
    grammar = grammar_of(answer_format, tools=[{"function": {"name": "f", "parameters": schema}}])
    assert grammar.count("pattern") == 2
    assert time.process_time() - begin_s < 1


ODD: list[Any] = [None, 5, "x", [], [5], {}, {"type": 5}, {"$ref": "#/x"}, {"$ref": "#"}, {"enum": 5}, {"anyOf": [5]}]


@pytest.mark.parametrize("name", ["hermes", "xml", "python"])
def test_schemas_of_tools_when_they_are_odd_then_refused_or_taken(name: str) -> None:
    answer_format = detect(renderer(TEMPLATES[name]), lambda _: False)
    schemas = [each for each in ODD if each is None or isinstance(each, dict)]
    schemas += [{"type": "object", "properties": odd, "required": odd, "allOf": odd} for odd in ODD]
    schemas += [{"type": "object", "properties": {"a": odd}} for odd in ODD]
    for schema in schemas:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        assert isinstance(LLMatcher.validate_grammar(grammar_of(answer_format, tools=[tool]), TOKENIZER), str)
        ToolTypes.of([tool])


def test_schemas_when_calls_are_held_then_they_can_be_checked_before_a_format_is_known() -> None:
    def schemas(**fields: Any) -> str | None:
        messages = [{"role": "user", "content": "a"}]
        return CallRules.of(parse_chat({"messages": messages, "tools": TOOLS, **fields})).schemas()

    assert schemas(tools=TOOLS[:2]) is None  # any call is taken
    for held in ({"tool_choice": "required"}, {"parallel_tool_calls": False}, {}):
        grammar = schemas(**held)
        assert grammar is not None
        assert LLMatcher.validate_grammar(grammar, TOKENIZER) == ""
        assert accepts(grammar, "1{}")
    assert schemas(tool_choice="none") is None
    bad = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "nothing"}}}
    grammar = schemas(tools=[bad])
    assert grammar is not None
    assert "nothing" in LLMatcher.validate_grammar(grammar, TOKENIZER)
