"""Chat templates of our own, one for each way in which the families of models write calls and reasoning.

They write the markup as published checkpoints do, on turns that the test models' special tokens fence
(``common.models.synthetic``).
"""

from __future__ import annotations

from collections.abc import Mapping

_TURNS = """
{%- if tools -%}<|system|>Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|end|>{%- endif -%}
{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.role == 'assistant' -%}
THINK
{{- message.content or '' -}}
{%- if message.tool_calls -%}
CALLS
{%- endif -%}
{%- else -%}{{- message.content -}}{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}PROMPT{%- endif -%}
"""
# Reasoning stays where the conversation has no later question.
_LATER = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
_THINK = (
    "{%- if message.reasoning_content and loop.index0 > ns.last -%}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}{%- endif -%}"
)
_THINK_ALWAYS = (
    "{%- if loop.index0 > ns.last -%}"
    "{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' -}}{%- endif -%}"
)
_SWITCHED = (
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}"
    "{%- else -%}{{- '<think>\\n' -}}{%- endif -%}"
)
_JSON_CALL = (
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' -}}'
    "{%- if call.function.arguments is string -%}{{- call.function.arguments -}}"
    "{%- else -%}{{- call.function.arguments | tojson -}}{%- endif -%}{{- '}' -}}"
)
_MAPPING_CALL = (
    "{{- '{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}' -}}"
)
_EACH = "{%- for call in message.tool_calls -%}"


def _template(calls: str, *, think: str = "", prompt: str = "") -> str:
    body = _TURNS.replace("THINK", think).replace("CALLS", calls).replace("PROMPT", prompt)
    return (_LATER if think else "") + body


def _hermes(call: str) -> str:
    return (
        _EACH + "{%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}{{- '<tool_call>\\n' -}}"
        + call + "{{- '\\n</tool_call>' -}}{%- endfor -%}"
    )  # fmt: skip


def _listed(begin: str, between: str, end: str) -> str:
    separator = "{%- if not loop.last -%}{{- '" + between + "' -}}{%- endif -%}"
    return "{{- '" + begin + "' -}}" + _EACH + _JSON_CALL + separator + "{%- endfor -%}{{- '" + end + "' -}}"


_XML = (
    _EACH + "{%- if not loop.first -%}{{- '\\n' -}}{%- elif message.content -%}{{- '\\n\\n' -}}{%- endif -%}"
    "{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}"
    "{%- for key, value in call.function.arguments | items -%}{{- '<parameter=' + key + '>\\n' -}}"
    "{%- if value is string -%}{{- value -}}{%- elif value is mapping or value is sequence -%}{{- value | tojson -}}"
    "{%- else -%}{{- value | string -}}{%- endif -%}{{- '\\n</parameter>\\n' -}}{%- endfor -%}"
    "{{- '</function>\\n</tool_call>' -}}{%- endfor -%}"
)
_PYTHON = (
    "{{- '<|tool_call_start|>[' -}}" + _EACH + "{{- call.function.name + '(' -}}"
    "{%- for key, value in call.function.arguments | items -%}{{- key + '=' -}}"
    '{%- if value is string -%}{{- "\'" + value + "\'" -}}{%- elif value is mapping -%}{{- value | tojson -}}'
    "{%- else -%}{{- value | string -}}{%- endif -%}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}"
    "{{- ')' -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- ']<|tool_call_end|>' -}}"
)
_KIMI = (
    "{{- '<|tool_calls_section_begin|>' -}}" + _EACH + "{{- '<|tool_call_begin|>' + call.id -}}"
    "{{- '<|tool_call_argument_begin|>' -}}{%- if call.function.arguments is string -%}"
    "{{- call.function.arguments -}}{%- else -%}{{- call.function.arguments | tojson -}}{%- endif -%}"
    "{{- '<|tool_call_end|>' -}}{%- endfor -%}{{- '<|tool_calls_section_end|>' -}}"
)

TEMPLATES: Mapping[str, str] = {
    "hermes": _template(_hermes(_JSON_CALL)),
    "granite": _template(_hermes(_MAPPING_CALL)),
    "hermes_thinking": _template(_hermes(_JSON_CALL), think=_THINK, prompt=_SWITCHED),
    "hermes_may_think": _template(
        _hermes(_JSON_CALL),
        think=_THINK,
        prompt="{%- if enable_thinking is defined and not enable_thinking -%}"
        "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}",
    ),
    "nemotron": _template(_listed("<TOOLCALL>[", ", ", "]</TOOLCALL>")),
    "jamba": _template(_listed("<tool_calls>[\\n    ", ",\\n    ", "\\n]</tool_calls>")),
    "falcon": _template(_listed("<tool_call>\\n[", ", ", "]\\n</tool_call>")),
    "xml": _template(_XML),
    "xml_thinking": _template(_XML, think=_THINK_ALWAYS, prompt=_SWITCHED),
    "python": _template(_PYTHON),
    "kimi": _template(_KIMI),
    "no_calls": _template(""),
}
"""Name -> source."""
SPECIAL_MARKERS: Mapping[str, tuple[str, ...]] = {
    "python": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "kimi": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
}
"""Markers that are special tokens in the vocabularies of a format's models."""
