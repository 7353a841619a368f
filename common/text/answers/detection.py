"""The format of a model's answers, found by rendering conversations through its chat template.

1 what stands before an assistant's words, 2 whether reasoning is written, or taken out of earlier answers, 3 a call:
its name, keys and values are words that nothing else has, so what stands around them is the template's own. What cannot
be found that way (templates that do not render calls, but tell the model how to write them, or whose vocabulary has a
format's markers) is taken from the table of formats. The same on every machine: nothing but the template and the
vocabulary is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.text.answers.formats import (
    KIMI_CALL,
    KIMI_SECTION,
    LFM_MARKERS,
    REASONING_FORMATS,
    THINK_BEGIN,
    THINK_END,
    TOOL_FORMATS,
    AnswerFormat,
    CallKind,
    CallLayout,
    ReasoningFormat,
    ToolFormat,
    named_format,
)

AUTO, NONE = "auto", "none"
NAME, OTHER_NAME = "zqprobefn", "zqotherfn"
KEY, OTHER_KEY = "zqkeya", "zqkeyb"
VALUE, OTHER_VALUE = "zqvala", "zqvalb"
CONTENT, REASONING = "zqsaid", "zqthought"
_USER = {"role": "user", "content": "zqasked"}
_NEXT = {"role": "user", "content": "zqagain"}
SWITCHES = ("enable_thinking", "thinking")
"""Variables through which templates switch reasoning on and off."""
_ID = re.compile(r',\s*"id":\s*"functions\.\w+:\d+"')
_TAG = re.compile(r"<[^<>\s]+>")
_DESCRIBED = {"hermes": r"\s*{", "nemotron_json": r"\s*\[", "jamba": r"\s*\[", "qwen3_coder": r"\s*<function="}
"""What follows the marker of calls in instructions to write them so."""

Render = Callable[..., str | None]
"""``(messages, *, tools, add_generation_prompt, variables) -> text``; None where the template refuses."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Formats that are named instead of found: names of the tables, ``auto``, or ``none``."""

    tools: str = AUTO
    reasoning: str = AUTO


DETECTED = Overrides()


def detect(render: Render, is_token: Callable[[str], bool], overrides: Overrides = DETECTED) -> AnswerFormat:
    """``is_token``: whether the vocabulary has a token of that text."""
    probe = _Probe(render)
    reasoning = probe.reasoning()
    if overrides.reasoning != AUTO:
        named = None if overrides.reasoning == NONE else REASONING_FORMATS[overrides.reasoning]
        reasoning = replace(named, begin=reasoning.begin, end=reasoning.end) if named and reasoning else named
    tools = probe.tools() or probe.described() or _from_vocabulary(is_token)
    if overrides.tools != AUTO:
        tools = None if overrides.tools == NONE else named_format(overrides.tools, tools)
    return AnswerFormat(tools, reasoning, probe.header, probe.switches())


def _from_vocabulary(is_token: Callable[[str], bool]) -> ToolFormat | None:
    """Of models whose templates leave calls to whoever calls them."""
    for name, markers in (("lfm2", LFM_MARKERS), ("kimi_k2", KIMI_SECTION)):
        if all(map(is_token, markers)):
            return replace(TOOL_FORMATS[name], is_rendered=False)
    return None


def _call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"functions.{name}:{number}", "type": "function", "function": function}


class _Probe:
    """Renderings of one template. ``header``: before an assistant's words."""

    def __init__(self, render: Render) -> None:
        self._render_text = render
        self._before = self._render([_USER], is_prompt=False) or ""
        self._prompts = [
            self._prompt(variables)
            for variables in ({}, *({switch: value} for switch in SWITCHES for value in (True, False)))
        ]
        self.header = self._header()

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        is_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        has_tools: bool = False,
    ) -> str | None:
        properties = {KEY: {"type": "string"}, OTHER_KEY: {"type": "string"}}
        parameters = {"type": "object", "properties": properties}
        tools = [
            {"type": "function", "function": {"name": "zqtool", "description": "zqtool", "parameters": parameters}}
        ]
        return self._render_text(
            messages,
            tools=tools if has_tools else None,
            add_generation_prompt=is_prompt,
            variables=variables or {},
        )

    def _prompt(self, variables: Mapping[str, Any]) -> str:
        """The generation prompt."""
        text = self._render([_USER], variables=variables) or ""
        before = self._render([_USER], is_prompt=False, variables=variables) or ""
        return text[len(before) :] if before and text.startswith(before) else ""

    def _header(self) -> str:
        """What the generation prompt begins with, without reasoning."""
        return self._prompts[0].partition(THINK_BEGIN)[0]

    def switches(self) -> tuple[str, ...]:
        on_off = [(switch, self._prompts[1 + 2 * i], self._prompts[2 + 2 * i]) for i, switch in enumerate(SWITCHES)]
        return tuple(switch for switch, on, off in on_off if on != off)

    def _turn(self, message: Mapping[str, Any], rest: Sequence[Mapping[str, Any]], *, has_tools: bool = True) -> str:
        """What an assistant's ``message`` and what follows look like, after the header; "" when it cannot be told."""
        text = self._render([_USER, message, *rest], has_tools=has_tools) or ""
        start = text.find("zqasked")
        start = text.find(self.header, start) if start >= 0 and self.header else -1
        return text[start + len(self.header) :] if start >= 0 else ""

    # --- reasoning

    def reasoning(self) -> ReasoningFormat | None:
        message = {"role": "assistant", "content": CONTENT, "reasoning_content": REASONING}
        written = ""
        # Some templates write the reasoning of answers with calls only.
        call = _call(NAME, {KEY: VALUE, OTHER_KEY: OTHER_VALUE})
        result = {"role": "tool", "name": NAME, "tool_call_id": call["id"], "content": "zqresult"}
        for said, rest in ((message, []), (message, [_NEXT]), ({**message, "tool_calls": [call]}, [result])):
            turn = self._turn(said, rest, has_tools=said is not message)
            if REASONING in turn and THINK_BEGIN in turn.partition(REASONING)[0] and CONTENT in turn:
                written = turn
                break
        old = {"role": "assistant", "content": f"{THINK_BEGIN}{REASONING}{THINK_END}{CONTENT}"}
        reread = self._turn(old, [_NEXT], has_tools=False)
        is_taken_out = CONTENT in reread and REASONING not in reread
        if not (written or is_taken_out or any(THINK_BEGIN in prompt for prompt in self._prompts)):
            return None
        found = ReasoningFormat()
        if not written:
            opened = next((p for p in self._prompts if THINK_BEGIN in p and THINK_END not in p), "")
            return replace(found, begin=THINK_BEGIN + opened.partition(THINK_BEGIN)[2]) if opened else found
        begin, _, after = written.partition(REASONING)
        end = after.partition(CONTENT)[0]
        return replace(found, begin=begin, end=end) if THINK_END in end else found

    # --- calls

    def tools(self) -> ToolFormat | None:
        takes_text = False
        turn = self._calls([_call(NAME, {KEY: VALUE, OTHER_KEY: OTHER_VALUE})])
        is_mapping = NAME in turn and f"'{KEY}'" not in turn
        # Two blanks: text that was parsed and written again has one.
        text = f'{{"{KEY}":  "{VALUE}", "{OTHER_KEY}": "{OTHER_VALUE}"}}'
        as_text = self._calls([_call(NAME, text)])
        takes_text = text in as_text
        if not is_mapping and not takes_text:
            return None
        if not is_mapping:
            turn = as_text.replace(f'"{KEY}":  "', f'"{KEY}": "')
        before, _, after = turn.partition(NAME)
        kind, base = _kind(before, after)
        if kind is None or base is None:
            return None
        before = before[before.rfind(THINK_END) + len(THINK_END) :].lstrip("\n") if THINK_END in before else before
        tags = _TAG.findall(before)
        opener = base.open_marker if kind is CallKind.KIMI or not tags else tags[0]
        closer = base.close_marker if opener == base.open_marker else _closing(opener)
        layout = self._layout(kind, before, after, base.layout, is_mapping=is_mapping)
        if layout is None or opener not in layout.begin or closer not in layout.end:
            layout = base.layout
        return replace(base, open_marker=opener, close_marker=closer, layout=layout, takes_text=takes_text)

    def described(self) -> ToolFormat | None:
        """Of templates that do not write calls, and tell the model how to."""
        text, without = self._render([_USER], has_tools=True) or "", self._render([_USER]) or ""
        for name, following in _DESCRIBED.items():
            found = TOOL_FORMATS[name]
            is_told = re.search(re.escape(found.open_marker) + following, text) and found.close_marker in text
            if is_told and found.open_marker not in without:
                return replace(found, is_rendered=False)
        return None

    def _calls(self, calls: Sequence[Mapping[str, Any]], content: str = "") -> str:
        message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
        results = [{"role": "tool", "name": NAME, "tool_call_id": call["id"], "content": "zqresult"} for call in calls]
        return self._turn(message, results) or self._turn(message, [])

    def _layout(
        self, kind: CallKind, before: str, after: str, base: CallLayout, *, is_mapping: bool
    ) -> CallLayout | None:
        parts = _json_parts(after) if kind in (CallKind.JSON, CallKind.KIMI) else _parameter_parts(kind, after)
        if parts is None:
            return None
        layout, rest = parts
        one, other = {KEY: VALUE, OTHER_KEY: OTHER_VALUE}, {KEY: "zqvalc", OTHER_KEY: "zqvald"}
        written = [layout.dumps(each) if not is_mapping else each for each in (one, other)]
        both = self._calls([_call(NAME, written[0]), _call(OTHER_NAME, written[1], 1)])
        _, _, following = both.partition(layout.write_arguments(one))
        between, found, _ = following.partition(OTHER_NAME)
        said = self._turn({"role": "assistant", "content": CONTENT}, [_NEXT])
        _, _, tail = said.partition(CONTENT)
        end = rest[: _overlap(rest, tail)] if tail else ""
        with_content = self._calls([_call(NAME, written[0])], CONTENT)
        _, has_content, content_rest = with_content.partition(CONTENT)
        begin_after_text = content_rest.partition(NAME)[0] if has_content and NAME in content_rest else ""
        if not found or not end:
            return None
        # Ids are the client's matter: a model cannot know the one that its call will get.
        between, end = (_ID.sub("", text) for text in (between, end))
        words = self._words(layout) if kind in (CallKind.XML, CallKind.PYTHON) else layout.words
        return replace(layout, begin=before, between=between, end=end, begin_after_text=begin_after_text, words=words)

    def _words(self, layout: CallLayout) -> tuple[str, str, str]:
        """How the template writes true, false and null."""
        words = []
        for value, usual in zip((True, False, None), layout.words, strict=True):
            turn = self._calls([_call(NAME, {KEY: value, OTHER_KEY: OTHER_VALUE})])
            _, _, after = turn.partition(f"{KEY}{layout.parameter_middle}")
            word = re.match(r"\w+", after)
            words.append(word.group() if word is not None else usual)
        return words[0], words[1], words[2]


def _kind(before: str, after: str) -> tuple[CallKind | None, ToolFormat | None]:
    if before.endswith("<function="):
        return CallKind.XML, TOOL_FORMATS["qwen3_coder"]
    if after.startswith("("):
        return CallKind.PYTHON, TOOL_FORMATS["lfm2"]
    if KIMI_CALL in before:
        return CallKind.KIMI, TOOL_FORMATS["kimi_k2"]
    if re.search(r'"name":\s*"$', before) and _TAG.search(before):
        return CallKind.JSON, TOOL_FORMATS["hermes"]
    return None, None


def _closing(tag: str) -> str:
    """``<x>`` -> ``</x>``, ``<|x_start|>`` -> ``<|x_end|>``."""
    if tag.startswith("<|"):
        return tag.replace("start", "end").replace("begin", "end")
    return "</" + tag[1:]


def _json_parts(after: str) -> tuple[CallLayout, str] | None:
    """The layout of ``after`` a name, and what follows the arguments."""
    key, value = rf"\{{\"{KEY}\"(?P<key>[^\"]*)\"{VALUE}\"", rf"\"{OTHER_KEY}\"[^\"]*\"{OTHER_VALUE}\"\}}"
    pattern = rf"(?P<name_end>.*?){key}(?P<item>[^\"]*){value}"
    match = re.match(pattern, after, re.DOTALL)
    if match is None:
        return None
    name_end = match["name_end"].removeprefix(":0")  # a Kimi call's number
    layout = CallLayout("", name_end, "", "", item_separator=match["item"], key_separator=match["key"])
    return layout, after[match.end() :]


def _parameter_parts(kind: CallKind, after: str) -> tuple[CallLayout, str] | None:
    try:
        first, rest = after.split(KEY, 1)
        middle, rest = rest.split(VALUE, 1)
        second, rest = rest.split(OTHER_KEY, 1)
        _, rest = rest.split(OTHER_VALUE, 1)
    except ValueError:
        return None
    if kind is CallKind.PYTHON:
        quote = middle[-1:]
        if not quote or quote not in "'\"" or not second.startswith(quote) or not rest.startswith(quote):
            return None
        layout = CallLayout(
            "", first, "", "", item_separator=second[1:], parameter_middle=middle[:-1], quote=quote,
            words=("True", "False", "None"),
        )  # fmt: skip
        return layout, rest[1:]
    begin = ""
    while len(begin) < min(len(first), len(second)) and first[-1 - len(begin)] == second[-1 - len(begin)]:
        begin = first[len(first) - len(begin) - 1 :]
    # A line break in front of a tag belongs to that tag, not to what ends before it.
    end = second[: len(second) - len(begin)]
    if not begin or not end or not rest.startswith(end):
        return None
    layout = CallLayout(
        "", first[: len(first) - len(begin)], "", "", parameter_begin=begin, parameter_middle=middle, parameter_end=end
    )
    return layout, rest[len(end) :]


def _overlap(rest: str, tail: str) -> int:
    """Where in ``rest`` the end of a turn begins that ``tail`` begins with."""
    best, place = 0, len(rest)
    for start in range(len(rest)):
        length = 0
        while start + length < len(rest) and length < len(tail) and rest[start + length] == tail[length]:
            length += 1
        if length > best:
            best, place = length, start
    return place
