"""Grammars that hold an answer to its format: one from the first token to the last, in llguidance's syntax.

``think? (text | schema | calls)``: what of it there is depends on the request. Calls are written with the template's
own separators, so that the next turn's prompt has the same tokens. Markers that are special tokens are named by id.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.openai.bodies.values import ToolName
from common.openai.json_schema import LenientSchemas, without_annotations
from common.openai.protocol import ChatRequest
from common.text.answers.formats import AnswerFormat, CallKind, CallLayout, ToolFormat
from common.text.answers.grammar_values import ParameterRules, lark_text, schema_rule

_FREE_TEXT = "TEXT: /(?s:.*)/"


@dataclass(frozen=True, slots=True)
class Budget:
    """At most ``num_tokens`` of reasoning. ``end_id``: the token that ends it, None where it is several;
    ``special_ids``: of the vocabulary, which are no reasoning."""

    num_tokens: int
    end_id: int | None
    special_ids: Collection[int]

    def rules(self, end_marker: str) -> tuple[list[str], str]:
        """Rules, and what of them is reasoning with its end."""
        if self.end_id is not None:
            others = f"<[^{_ranges({*self.special_ids, self.end_id})}]>"
            return [], f"{others}{{0,{self.num_tokens}}} <[{self.end_id}]>"
        end = json.dumps(end_marker)
        most = self.num_tokens + len(end_marker)
        return [
            f"think_whole[suffix={end}, max_tokens={most}]: TEXT",
            f"think_cut[max_tokens={self.num_tokens}]: TEXT",
        ], f"(think_whole | think_cut {end})"


def _ranges(ids: Collection[int]) -> str:
    """``1-3,7``."""
    parts: list[list[int]] = []
    for token_id in sorted(ids):
        if parts and parts[-1][1] == token_id - 1:
            parts[-1][1] = token_id
        else:
            parts.append([token_id, token_id])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


class Thinking(enum.Enum):
    """How the prompt ends: no reasoning was opened, it is open, or it is opened and closed."""

    ABSENT = "absent"
    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class CallRules:
    """What a chat asks of calls: which ``tools`` may be called, ``is_required``: the answer is nothing but calls,
    ``is_held``: what is a call must be one of these."""

    tools: tuple[Mapping[str, Any], ...]
    is_required: bool
    is_held: bool

    @classmethod
    def of(cls, request: ChatRequest) -> CallRules:
        choice = request.tool_choice
        tools = tuple(request.tools or ()) if choice != "none" else ()
        if isinstance(choice, ToolName):
            tools = tuple(tool for tool in tools if function_of(tool)["name"] == choice.name)
        is_required = isinstance(choice, ToolName) or choice == "required"
        is_strict = any(function_of(tool).get("strict") for tool in tools)
        is_held = is_required or is_strict or request.constraint is not None or not request.parallel_tool_calls
        return cls(tools, is_required and bool(tools), is_held and bool(tools))

    def schemas(self) -> str | None:
        """A grammar of all arguments that are held to their schemas, to check before any format is known."""
        if not self.is_held:
            return None
        functions = [function_of(tool) for tool in self.tools]
        layout, lenient = CallLayout("", "", "", ""), LenientSchemas()
        rules = [
            f"args_{index}: {schema_rule(parameters_schema(each, lenient), layout, strict=bool(each.get('strict')))}"
            for index, each in enumerate(functions)
        ]
        start = " | ".join(f'"{index}" args_{index}' for index in range(len(functions)))
        return json.dumps({"grammars": [{"lark_grammar": "\n".join([f"start: {start}", *rules])}]}, ensure_ascii=False)


def answer_grammar(
    answer_format: AnswerFormat,
    *,
    tools: Sequence[Mapping[str, Any]],
    is_call_required: bool,
    parallel: bool,
    constraint: str | None,
    thinking: Thinking,
    token_id: Callable[[str], int | None],
    budget: Budget | None = None,
) -> str:
    """llguidance's top-level grammar.

    Args:
        tools: those that may be called; none: content only.
        is_call_required: the answer is nothing but calls.
        parallel: several calls may stand together.
        constraint: the grammar of content, top-level too; None: any text.
        budget: of reasoning; None: none.
        token_id: of a marker that is a special token, else None.
    """
    grammars: list[dict[str, Any]] = [{}]
    rules: list[str] = []
    body: list[str] = []
    if constraint is not None and not is_call_required:
        grammars += _named(constraint)
        body.append("@content")
    if tools:
        assert answer_format.tools is not None
        calls = _Calls(answer_format.tools, token_id, rules)
        body.append(calls.rule(tools, parallel=parallel, after_text=constraint is None and not is_call_required))
    if constraint is None and not is_call_required:
        body.append("TEXT")
    start = "body"
    if answer_format.reasoning is not None and thinking is not Thinking.CLOSED:
        start = _thinking(answer_format, thinking, token_id, rules, budget)
    lines = ["%llguidance {}", f"start: {start}", f"body: {' | '.join(body)}", *rules]
    if any("TEXT" in line for line in lines):
        lines.append(_FREE_TEXT)
    grammars[0] = {"lark_grammar": "\n".join(lines) + "\n"}
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _thinking(
    answer_format: AnswerFormat,
    thinking: Thinking,
    token_id: Callable[[str], int | None],
    rules: list[str],
    budget: Budget | None,
) -> str:
    reasoning = answer_format.reasoning
    assert reasoning is not None
    begin_marker, end_marker = reasoning.markers
    rest = lark_text(reasoning.end.partition(end_marker)[2], token_id)
    if budget is not None:
        more, think = budget.rules(end_marker)
        rules += [*more, f"think: {think} {rest}"]
    elif token_id(end_marker) is None:
        rules.append(f"think_text[suffix={json.dumps(end_marker)}]: TEXT")
        rules.append(f"think: think_text {rest}")
    else:
        rules.append(f"think: TEXT <[{token_id(end_marker)}]> {rest}")
    if thinking is Thinking.OPEN:
        return "think body"
    rules.append(f"opened: {lark_text(begin_marker, token_id)} think")
    return "opened? body"


def _named(constraint: str) -> list[dict[str, Any]]:
    """The grammars of a constraint, the first of them as ``content``."""
    try:
        value = json.loads(constraint)
    except ValueError:
        value = None
    if isinstance(value, dict) and isinstance(value.get("grammars"), list):
        first, *others = value["grammars"]
        return [{**first, "name": "content"}, *others]
    return [{"name": "content", "lark_grammar": constraint}]


class _Calls:
    """The rules of one request's calls."""

    def __init__(self, tool_format: ToolFormat, token_id: Callable[[str], int | None], rules: list[str]) -> None:
        self._format = tool_format
        self._token_id = token_id
        self._rules = rules
        self._lenient = LenientSchemas()

    def rule(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, after_text: bool) -> str:
        """Adds all rules; the name of the one for all calls."""
        layout = self._format.layout
        for index, tool in enumerate(tools):
            self._add_tool(index, tool)
        self._rules.append("call: " + " | ".join(f"tool_{index}" for index in range(len(tools))))
        more = f" ({self._text(layout.between)} call)*" if parallel else ""
        tail = f"call{more} {self._text(layout.end)}"
        if not after_text:
            self._rules.append(f"calls: {self._text(layout.begin)} {tail}")
            return "calls"
        opener = self._format.open_marker
        rest = self._text(layout.begin.partition(opener)[2])
        if self._token_id(opener) is None:
            self._rules.append(f"head[lazy]: TEXT {json.dumps(opener)}")
            self._rules.append(f"calls: head {rest} {tail}")
        else:
            self._rules.append(f"calls: TEXT <[{self._token_id(opener)}]> {rest} {tail}")
        return "calls"

    def _add_tool(self, index: int, tool: Mapping[str, Any]) -> None:
        function = function_of(tool)
        layout = self._format.layout
        schema = parameters_schema(function, self._lenient)
        strict = bool(function.get("strict"))
        arguments = f"args_{index}"
        if self._format.kind in (CallKind.XML, CallKind.PYTHON):
            param = f"tools[{index}].function.parameters"
            rules = self._rules
            ParameterRules(layout, self._token_id, rules, name=arguments, strict=strict, param=param).add(schema)
        else:
            self._rules.append(f"{arguments}: {schema_rule(schema, layout, strict=strict)}")
        number = " /:[0-9]{1,4}/" if self._format.kind is CallKind.KIMI else ""
        head = f"{self._text(str(function['name']))}{number} {self._text(layout.name_end)}"
        self._rules.append(f"tool_{index}: {head} {arguments}")

    def _text(self, text: str) -> str:
        return lark_text(text, self._token_id)


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """``tool`` is one of a request's, which are checked."""
    function: Mapping[str, Any] = tool["function"]
    return function


def parameters_schema(function: Mapping[str, Any], lenient: LenientSchemas) -> dict[str, Any]:
    """The schema of a function's arguments, as far as they are held to it; without one it takes none."""
    parameters = function.get("parameters")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = dict(parameters)
    if not schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf"}:
        schema["type"] = "object"
    return without_annotations(schema) if function.get("strict") else lenient.without_the_rest(schema)


def thinking_of(tail: str, answer_format: AnswerFormat) -> Thinking:
    """``tail``: the prompt's text from the last header on."""
    reasoning = answer_format.reasoning
    if reasoning is None:
        return Thinking.ABSENT
    if reasoning.always:
        return Thinking.OPEN
    begin, end = (tail.rfind(marker) for marker in reasoning.markers)
    if begin < 0 and end < 0:
        return Thinking.ABSENT
    return Thinking.OPEN if begin > end else Thinking.CLOSED
