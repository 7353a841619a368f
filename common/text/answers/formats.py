"""How a model's answers are written: where its reasoning is, and what stands around the parts of a tool call.

A format is found by rendering (``common.text.answers.detection``) or named by a flag. ``CallLayout`` has the template's
own separators, so that a call that was held to them is rendered with the same tokens in the next turn; parsers are
more lenient and know a format's ``kind`` and markers only.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from common.text.answers.values import Known, resolved, types_of

FORMAT_VERSION = 5
"""Of parsers, grammars and the text of tokens together: nodes with different ones must not continue each other's
answers."""
THINK_BEGIN, THINK_END = "<think>", "</think>"


class CallKind(enum.Enum):
    """JSON: objects with ``name`` and ``arguments``, alone or in a list; XML: ``<function=f><parameter=p>``; PYTHON:
    ``[f(p="x")]``; KIMI: an id with the name in it, then JSON."""

    JSON = "json"
    XML = "xml"
    PYTHON = "python"
    KIMI = "kimi"


@dataclass(frozen=True, slots=True)
class CallLayout:
    """Text around the parts of calls: ``begin NAME name_end ARGUMENTS between NAME ... ARGUMENTS end``.

    Attributes:
        begin_after_text: instead of ``begin`` where content stands before the first call.
        item_separator, key_separator: of arguments that are JSON; the first also between parameters.
        parameter_begin, parameter_middle, parameter_end: before a parameter's name, between name and value, after the
            value, where arguments are not JSON.
        quote: round strings that are values of parameters.
        words: how true, false and null are written as values of parameters.
    """

    begin: str
    name_end: str
    between: str
    end: str
    begin_after_text: str = ""
    item_separator: str = ", "
    key_separator: str = ": "
    parameter_begin: str = ""
    parameter_middle: str = ""
    parameter_end: str = ""
    quote: str = ""
    words: tuple[str, str, str] = ("true", "false", "null")

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]], *, after_text: bool = False) -> str:
        """The text of calls, each a name and its arguments."""
        texts = [name + self.name_end + self.write_arguments(arguments) for name, arguments in calls]
        begin = self.begin_after_text if after_text and self.begin_after_text else self.begin
        return begin + self.between.join(texts) + self.end

    def write_arguments(self, arguments: Mapping[str, Any]) -> str:
        if not self.parameter_middle:
            return self.dumps(arguments)
        parts = [
            f"{self.parameter_begin}{key}{self.parameter_middle}{self.write_value(value)}{self.parameter_end}"
            for key, value in arguments.items()
        ]
        return (self.item_separator if self.quote else "").join(parts)

    def write_value(self, value: Any) -> str:
        """A parameter's value."""
        if isinstance(value, str):
            return self.quote + value + self.quote
        if value is None or isinstance(value, bool):
            return self.words[2 if value is None else 0 if value else 1]
        return self.dumps(value)

    def dumps(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(self.item_separator, self.key_separator))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """
    Attributes:
        open_marker, close_marker: round all calls that stand together.
        takes_text: the template writes ``arguments`` that are text as they are.
        is_rendered: the template renders calls; else they are put into a message's content.
        in_reasoning: calls may come before reasoning has ended.
    """

    kind: CallKind
    open_marker: str
    close_marker: str
    layout: CallLayout
    takes_text: bool = False
    is_rendered: bool = True
    in_reasoning: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are markers where the model has a special token of that name."""
        return (self.open_marker, self.close_marker, *(KIMI_MARKERS if self.kind is CallKind.KIMI else ()))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """``begin``, ``end``: the markers with the template's own white space. ``always``: every answer begins inside,
    whatever the prompt says."""

    begin: str = THINK_BEGIN + "\n"
    end: str = "\n" + THINK_END + "\n\n"
    always: bool = False
    markers: tuple[str, str] = (THINK_BEGIN, THINK_END)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """
    Attributes:
        header: what the template writes before an assistant's words; "" when that is not known.
        switches: the names of variables through which the template switches reasoning on and off.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    header: str = ""
    switches: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """For node info and logs."""
        tools = self.tools
        return {
            "version": FORMAT_VERSION,
            "header": self.header,
            "tool_calls": None if tools is None else {"kind": tools.kind.value, **asdict(tools.layout)},
            "reasoning": None if self.reasoning is None else list(self.reasoning.markers),
        }


KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_CALL, KIMI_ARGUMENTS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_MARKERS = (KIMI_CALL, KIMI_ARGUMENTS, KIMI_END)
LFM_MARKERS = ("<|tool_call_start|>", "<|tool_call_end|>")


def _json_format(opener: str, closer: str, begin: str, between: str, end: str) -> ToolFormat:
    layout = CallLayout(
        begin=begin + '{"name": "',
        name_end='", "arguments": ',
        between="}" + between + '{"name": "',
        end="}" + end,
        begin_after_text=begin + '{"name": "',
    )
    return ToolFormat(CallKind.JSON, opener, closer, layout, takes_text=True)


_HERMES = _json_format(
    "<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"
)
_XML = ToolFormat(
    CallKind.XML,
    "<tool_call>",
    "</tool_call>",
    CallLayout(
        begin="<tool_call>\n<function=",
        name_end=">",
        between="\n</function>\n</tool_call>\n<tool_call>\n<function=",
        end="\n</function>\n</tool_call>",
        begin_after_text="\n\n<tool_call>\n<function=",
        parameter_begin="\n<parameter=",
        parameter_middle=">\n",
        parameter_end="\n</parameter>",
    ),
    in_reasoning=True,
)
_LFM = ToolFormat(
    CallKind.PYTHON,
    *LFM_MARKERS,
    CallLayout(
        begin=LFM_MARKERS[0] + "[",
        name_end="(",
        between="), ",
        end=")]" + LFM_MARKERS[1],
        parameter_middle="=",
        quote='"',
        words=("True", "False", "None"),
    ),
)
_KIMI = ToolFormat(
    CallKind.KIMI,
    *KIMI_SECTION,
    CallLayout(
        begin=KIMI_SECTION[0] + KIMI_CALL + "functions.",
        name_end=KIMI_ARGUMENTS,
        between=KIMI_END + KIMI_CALL + "functions.",
        end=KIMI_END + KIMI_SECTION[1],
    ),
    takes_text=True,
    in_reasoning=True,
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES,
    "granite": _HERMES,
    "granite4": _HERMES,
    "nemotron_json": _json_format("<TOOLCALL>", "</TOOLCALL>", "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "jamba": _json_format("<tool_calls>", "</tool_calls>", "<tool_calls>[\n    ", ",\n    ", "\n]</tool_calls>"),
    "falcon_h1": _json_format("<tool_call>", "</tool_call>", "<tool_call>\n[", ", ", "]\n</tool_call>"),
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
    "lfm2": _LFM,
    "kimi_k2": _KIMI,
}
"""By the names of ``--tool-call-parser``: markers and layout where the template does not show another one."""
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat(),
    "nemotron_v3": ReasoningFormat(),
    "deepseek_r1": ReasoningFormat(always=True),
}
"""By the names of ``--reasoning-parser``."""


@dataclass(frozen=True, slots=True)
class ToolTypes:
    """Name of a function -> parameter -> its JSON types (``values.types_of``), for formats whose values have none."""

    parameters: Mapping[str, Mapping[str, Set[str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]] | None) -> ToolTypes:
        found: dict[str, Mapping[str, Set[str]]] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = resolved(function.get("parameters"), function.get("parameters"))
                properties = schema.get("properties") if isinstance(schema, Mapping) else None
                named = properties.items() if isinstance(properties, Mapping) else ()
                root = function.get("parameters")
                known: Known = {}
                found[function["name"]] = {str(key): types_of(value, root, known) for key, value in named}
        return cls(found)


def named_format(name: str, found: ToolFormat | None) -> ToolFormat:
    """The format called ``name``, with the layout of the one that was ``found`` where that is of the same kind."""
    named = TOOL_FORMATS[name]
    if found is None:
        return replace(named, is_rendered=False)
    return found if found.kind is named.kind else replace(named, is_rendered=found.is_rendered)
