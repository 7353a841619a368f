"""Formats found by rendering: what each template writes, and that what is found writes the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from common.config.node import REASONING_PARSERS, TOOL_CALL_PARSERS
from common.text.answers.detection import AUTO, NONE, Overrides, Render, detect
from common.text.answers.formats import REASONING_FORMATS, TOOL_FORMATS, CallKind
from common.text.chat_template import ChatTemplate
from tests.support.chat_templates import TEMPLATES

USER = {"role": "user", "content": "Hello"}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": "Bern", "days": 3, "hourly": True, "unit": None}),
    ("now", {}),
]


def renderer(source: str) -> Render:
    template = ChatTemplate(source)

    def render(
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str | None:
        try:
            return template.render(
                messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=False,
                variables=variables,
            )
        except Exception:  # noqa: BLE001 - as any template
            return None

    return render


def nothing(_: str) -> bool:
    return False


KINDS = {
    "hermes": (CallKind.JSON, "<tool_call>", True),
    "granite": (CallKind.JSON, "<tool_call>", False),
    "hermes_thinking": (CallKind.JSON, "<tool_call>", True),
    "hermes_may_think": (CallKind.JSON, "<tool_call>", True),
    "nemotron": (CallKind.JSON, "<TOOLCALL>", True),
    "jamba": (CallKind.JSON, "<tool_calls>", True),
    "falcon": (CallKind.JSON, "<tool_call>", True),
    "xml": (CallKind.XML, "<tool_call>", False),
    "xml_thinking": (CallKind.XML, "<tool_call>", False),
    "python": (CallKind.PYTHON, "<|tool_call_start|>", False),
    "kimi": (CallKind.KIMI, "<|tool_calls_section_begin|>", True),
}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_calls_when_a_template_writes_them_then_the_layout_writes_the_same(name: str) -> None:
    render = renderer(TEMPLATES[name])
    found = detect(render, nothing).tools
    assert found is not None
    assert (found.kind, found.open_marker, found.takes_text) == KINDS[name]
    is_kimi = found.kind is CallKind.KIMI
    calls = [(f"{name}:{i}" if is_kimi else name, arguments) for i, (name, arguments) in enumerate(CALLS)]
    for content in ("", "Well."):
        message = {
            "role": "assistant",
            "content": content,
            "tool_calls": [
                {"id": f"functions.{function}:{i}", "function": {"name": function, "arguments": arguments}}
                for i, (function, arguments) in enumerate(CALLS)
            ],
        }
        text = render([USER, message, USER], tools=None, add_generation_prompt=False, variables={})
        assert text is not None
        assert content + found.layout.write(calls, after_text=bool(content)) in text


def test_calls_when_a_template_does_not_write_them_then_the_vocabulary_tells() -> None:
    render = renderer(TEMPLATES["no_calls"])
    assert detect(render, nothing).tools is None
    found = detect(render, lambda text: text.startswith("<|tool_call_")).tools
    assert found is not None
    assert found.kind is CallKind.PYTHON
    assert not found.is_rendered


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("<tool_call> </tool_call>:\\n<tool_call>\\n{'arguments': <args>, 'name': <name>}\\n</tool_call>", "hermes"),
        ("<TOOLCALL>[one or more]</TOOLCALL>", "nemotron_json"),
        ("<tool_call>\\n<function=name>\\n</function>\\n</tool_call>", "qwen3_coder"),
        ("<tool_call> and </tool_call>", None),
    ],
)  # fmt: skip
def test_calls_when_the_template_only_tells_how_to_write_them_then_that_is_the_format(
    told: str, name: str | None
) -> None:
    template = TEMPLATES["no_calls"].replace("<|system|>Tools:", '<|system|>{{ "' + told + '" }} Tools:')
    assert template != TEMPLATES["no_calls"]
    found = detect(renderer(template), lambda _: False).tools
    assert found == (None if name is None else replace(TOOL_FORMATS[name], is_rendered=False))


def test_reasoning_when_the_prompt_or_an_answer_has_it_then_it_is_found() -> None:
    found = {name: detect(renderer(source), nothing) for name, source in TEMPLATES.items()}
    assert {name for name, each in found.items() if each.reasoning is not None} == {
        "hermes_thinking",
        "hermes_may_think",
        "xml_thinking",
    }
    reasoning = found["hermes_thinking"].reasoning
    assert reasoning is not None
    assert (reasoning.begin, reasoning.end) == ("<think>\n", "\n</think>\n\n")
    assert found["hermes_thinking"].switches == ("enable_thinking",)
    assert {each.header for each in found.values()} == {"<|assistant|>"}
    taken_out = (
        "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
    )
    assert detect(renderer(taken_out), nothing).reasoning is not None


def test_reasoning_when_only_answers_with_calls_keep_it_then_it_is_found() -> None:
    """As Kimi K2 Thinking's template: everything up to the last plain answer loses its reasoning."""
    later = (
        "{%- for m in messages -%}{%- if m.role == 'assistant' and not m.tool_calls -%}"
        "{%- set ns.last = loop.index0 -%}"
    )
    think = "{{- '<think>' + (message.reasoning_content or '' if loop.index0 > ns.last else '') + '</think>' -}}"
    source = (
        "{%- set ns = namespace(last=-1) -%}" + later + "{%- endif -%}{%- endfor -%}"
        + TEMPLATES["kimi"].replace("{{- message.content or '' -}}", think + "{{- message.content or '' -}}")
    )  # fmt: skip
    found = detect(renderer(source), nothing)
    assert found.reasoning is not None
    assert (found.reasoning.begin, found.reasoning.end) == ("<think>", "</think>")
    assert found.tools is not None
    assert found.tools.in_reasoning


def test_calls_when_the_space_around_them_is_unusual_then_the_layout_has_it() -> None:
    """As Nemotron 3's template, which ends calls with a line break, and Qwen3-Coder's, whose header has none before
    calls."""
    source = TEMPLATES["xml"].replace("</tool_call>' -}}", "</tool_call>\\n' -}}")
    assert source != TEMPLATES["xml"]
    found = detect(renderer(source), nothing).tools
    assert found is not None
    assert found.layout.end.endswith("</tool_call>\n")
    turns = (
        "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}{%- if m.tool_calls -%}"
        "{%- if m.content -%}{{- '\\n' + m.content + '\\n' -}}{%- endif -%}{%- for call in m.tool_calls -%}"
        "{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' -}}"
        "{%- for key, value in call.function.arguments | items -%}"
        "{{- '<parameter=' + key + '>\\n' + value | string + '\\n</parameter>\\n' -}}{%- endfor -%}"
        "{{- '</function>\\n</tool_call>' -}}{%- endfor -%}{%- else -%}{{- '\\n' + m.content -}}{%- endif -%}"
        "{{- '<|end|>' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
    )
    found = detect(renderer(turns), nothing).tools
    assert found is not None
    layout = found.layout
    assert (layout.begin, layout.begin_after_text) == ("<tool_call>\n<function=", "\n\n<tool_call>\n<function=")


def test_overrides_when_a_format_is_named_then_it_is_that_one() -> None:
    for name in TOOL_FORMATS:
        found = detect(renderer(TEMPLATES["no_calls"]), nothing, Overrides(name)).tools
        assert found is not None
        assert found.kind is TOOL_FORMATS[name].kind
        assert not found.is_rendered
    found = detect(renderer(TEMPLATES["falcon"]), nothing, Overrides("hermes")).tools
    assert found is not None
    assert "[" in found.layout.begin
    assert detect(renderer(TEMPLATES["hermes"]), nothing, Overrides(NONE)).tools is None
    for name, reasoning in REASONING_FORMATS.items():
        named = detect(renderer(TEMPLATES["hermes"]), nothing, Overrides(reasoning=name)).reasoning
        assert named is not None
        assert named.always is reasoning.always
    assert detect(renderer(TEMPLATES["hermes_thinking"]), nothing, Overrides(reasoning=NONE)).reasoning is None


@pytest.mark.parametrize("source", ["", "{{ raise_exception('no') }}", "{{ messages[0].content }}", "{{ 1 / 0 }}"])
def test_template_when_it_tells_nothing_then_no_format_is_found(source: str) -> None:
    found = detect(renderer(source), nothing)
    assert found.tools is None
    assert found.reasoning is None


def test_names_when_flags_take_them_then_each_has_a_format() -> None:
    assert list(TOOL_CALL_PARSERS) == [AUTO, NONE, *TOOL_FORMATS]
    assert list(REASONING_PARSERS) == [AUTO, NONE, *REASONING_FORMATS]
