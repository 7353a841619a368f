"""Answers taken apart: every kind of case, and the same result however the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from common.text.answers.deltas import AnswerDelta
from common.text.answers.formats import TOOL_FORMATS, AnswerFormat, ToolTypes
from common.text.answers.parser import AnswerParser
from common.text.answers.reader import marker_character
from tests.unit.text.answers.cases import CASES, TYPES, Case

IDS = [f"{case.kind}: {case.name}" for case in CASES]


class Total:
    """What deltas come to."""

    def __init__(self, deltas: Iterable[AnswerDelta]) -> None:
        self.reasoning = self.content = ""
        self.names: list[str] = []
        self.arguments: list[str] = []
        self.call_ids: list[str | None] = []
        for delta in deltas:
            self.reasoning += delta.reasoning
            self.content += delta.content
            for call in delta.calls:
                if call.name is not None:
                    assert call.index == len(self.names)
                    self.names.append(call.name)
                    self.arguments.append("")
                    self.call_ids.append(call.call_id)
                assert call.index == len(self.names) - 1
                self.arguments[-1] += call.arguments

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


def parse(
    answer_format: AnswerFormat,
    pieces: Iterable[str],
    *,
    in_reasoning: bool = False,
    types: ToolTypes = TYPES,
    characters: Mapping[str, str] | None = None,
) -> tuple[Total, AnswerParser]:
    parser = AnswerParser(
        answer_format, has_tools=True, in_reasoning=in_reasoning, types=types, characters=characters or {}
    )
    total = Total([*map(parser.feed, pieces), parser.finish()])
    return total, parser


def parse_case(case: Case, pieces: Iterable[str]) -> tuple[Total, AnswerParser]:
    return parse(case.answer_format, pieces, in_reasoning=case.in_reasoning)


def cuts(text: str, seed: int) -> list[str]:
    """``text`` in pieces; the bytes of a character may be in two, then it comes with the second."""
    data, rng = text.encode(), random.Random(seed)
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 10)))
    pieces, rest = [], b""
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        rest += data[start:end]
        whole = rest.decode(errors="ignore")
        pieces.append(whole)
        rest = rest[len(whole.encode()) :]
    return pieces


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_answer_when_it_is_whole_then_its_parts_are_found(case: Case) -> None:
    total, parser = parse_case(case, [case.text])
    assert (total.reasoning, total.content) == (case.reasoning, case.content)
    assert total.names == [name for name, _ in case.calls]
    assert parser.is_call_open is case.is_open
    for number, (text, (_, expected)) in enumerate(zip(total.arguments, case.calls, strict=True)):
        is_cut = case.is_open and number == len(case.calls) - 1
        assert (text if is_cut else json.loads(text)) == expected
    if case.call_ids is not None:
        assert total.call_ids == case.call_ids


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_answer_when_it_comes_in_pieces_then_its_parts_are_the_same(case: Case) -> None:
    whole, _ = parse_case(case, [case.text])
    assert parse_case(case, list(case.text))[0] == whole
    for seed in range(20):
        assert parse_case(case, cuts(case.text, seed))[0] == whole


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_answer_when_it_is_cut_at_a_thousand_places_then_its_parts_are_the_same(case: Case) -> None:
    whole, _ = parse_case(case, [case.text])
    for seed in range(1000):
        assert parse_case(case, cuts(case.text, seed))[0] == whole
    for end in range(len(case.text)):
        assert parse_case(case, list(case.text[:end]))[0] == parse_case(case, [case.text[:end]])[0]


def test_piece_when_nothing_may_follow_that_changes_it_then_it_comes_at_once() -> None:
    parser = AnswerParser(CASES[0].answer_format, has_tools=True, in_reasoning=True, types=TYPES, characters={})
    assert parser.feed("Hm").reasoning == "Hm"
    assert parser.feed("</thi") == AnswerDelta()
    assert parser.feed("nk>Yes").content == "Yes"
    assert parser.feed('<tool_call>{"name": "weather"').calls[0].name == "weather"
    assert parser.feed(', "arguments": {"ci').calls[0].arguments == '{"ci'
    assert parser.feed('ty": "B').calls[0].arguments == 'ty": "B'


def test_strings_of_json_when_they_have_control_characters_then_those_are_escaped() -> None:
    arguments = '{\n"a": "1\n\\"2\t\\\n\x00\\\\", "b\r": {"c": "\x1f"}\n}'
    whole = {"a": '1\n"2\t\\\n\0\\', "b\r": {"c": "\x1f"}}
    for kind, text in (
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + arguments + "}</tool_call>"),
        ("hermes", '<tool_call>{"arguments": ' + arguments + ', "name": "f"}</tool_call>'),
        ("kimi_k2", f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"),
    ):
        for pieces in ([text], list(text)):
            total, _ = parse(AnswerFormat(TOOL_FORMATS[kind]), pieces)
            assert [json.loads(each) for each in total.arguments] == [whole]
    inner = '<tool_call>{"name": "f", "arguments": "{\n\\"a\\": \\"1\n2\\"}"}</tool_call>'
    total, _ = parse(AnswerFormat(TOOL_FORMATS["hermes"]), [inner])
    assert json.loads(total.arguments[0]) == {"a": "1\n2"}


def test_tools_when_the_request_has_none_then_calls_are_content() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    parser = AnswerParser(CASES[0].answer_format, has_tools=False, in_reasoning=False, types=TYPES, characters={})
    assert parser.feed(text).content == text


def test_special_tokens_when_a_text_spells_them_then_they_mark_nothing() -> None:
    answer_format = AnswerFormat(TOOL_FORMATS["lfm2"])
    names = ("<|tool_call_start|>", "<|tool_call_end|>")
    characters = {name: marker_character(index) for index, name in enumerate(names)}
    begin, end = characters.values()
    spelled = "<|tool_call_start|>[now()]<|tool_call_end|>"
    total, _ = parse(answer_format, [spelled, begin, "[write(text='", spelled, "')]", end], characters=characters)
    assert total.content == spelled
    assert json.loads(total.arguments[0]) == {"text": spelled}
    # A marker that marks nothing is text again.
    total, _ = parse(answer_format, ["a", end, begin, "b"], characters=characters)
    assert total.content == "a<|tool_call_end|><|tool_call_start|>b"


@pytest.mark.parametrize("types", [{"string", "null"}, {"string"}, {"array"}, None])
def test_special_tokens_when_they_are_in_a_parameter_of_any_type_then_are_spelled_in_the_json(types: Any) -> None:
    think = marker_character(0)
    text = f"<function=f><parameter=a>b{think}</parameter><parameter=k{think}>c</parameter></function>"
    total, _ = parse(
        AnswerFormat(TOOL_FORMATS["qwen3_coder"]),
        list(text),
        types=ToolTypes({"f": {} if types is None else {"a": frozenset(types)}}),
        characters={"<think>": think},
    )
    assert json.loads(total.arguments[0].encode()) == {"a": "b<think>", "k<think>": "c"}


def test_special_tokens_when_they_are_in_the_id_of_a_call_then_are_spelled() -> None:
    think = marker_character(0)
    text = f"<|tool_call_begin|>functions.f{think}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    total, _ = parse(AnswerFormat(TOOL_FORMATS["kimi_k2"]), list(text), characters={"<think>": think})
    assert (total.names, total.call_ids) == (["f<think>"], ["functions.f<think>:0"])


@pytest.mark.full
def test_time_when_an_answer_is_long_and_odd_then_it_grows_with_its_length() -> None:
    """A parser that read held text again for each piece would need minutes here."""
    answer_format = CASES[0].answer_format
    odd: list[list[str]] = [
        [" "] * 50_000,
        ["<tool_call>"] * 5_000,
        ['<tool_call>{"name": "', *["x"] * 20_000],
        ['<tool_call>{"x": [', *["[", " "] * 20_000],
        ['<tool_call>{"name": "f", "arguments": {"a": "', *["\\\\"] * 20_000],
    ]
    value = "<tool_call><function=write><parameter=text>"
    odd_xml: list[list[str]] = [
        [value, "</parameter>", *[" "] * 20_000],
        [value, *["</parameter>,"] * 3_000],
        [value, *["<parameter=a>"] * 3_000],
        [value, "</parameter><parameter=", *["x"] * 20_000],
    ]
    xml_format = AnswerFormat(TOOL_FORMATS["qwen3_coder"])
    for which, pieces in [*((answer_format, each) for each in odd), *((xml_format, each) for each in odd_xml)]:
        total, _ = parse(which, pieces)
        assert len(total.content) + sum(map(len, total.arguments)) > 0


def test_value_when_it_is_half_a_surrogate_pair_then_it_is_escaped() -> None:
    text = '<|tool_call_start|>[f(a={"b": "\\ud800"})]<|tool_call_end|>'
    total, _ = parse(AnswerFormat(TOOL_FORMATS["lfm2"]), [text])
    arguments: Any = json.loads(total.arguments[0].encode())
    assert arguments == {"a": {"b": "\ud800"}}
