"""Chat templates rendered as transformers renders them, without transformers.

The environment, what templates may call in it, and the treatment of a final message that is to be continued follow
``transformers.utils.chat_template_utils`` (5.23); tests compare the two, and a proxy that renders for a node first
checks itself against texts that the node has rendered. Compiled once; may be used from several threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Names under which a message's reasoning comes; templates read the first.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled template. Raises jinja2's TemplateSyntaxError for source that is none."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._template = _environment().from_string(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The conversation as text. ``variables``: special tokens and the caller's own.

        Raises what the template raises, and ValueError for a final message that cannot be continued.
        """
        if not messages:
            raise ValueError("Cannot apply chat template to an empty conversation. Provide at least one message.")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt are not compatible.")
        chat = [_with_reasoning(message) for message in messages]
        final = ""
        if continue_final_message:
            final = _final_content(chat[-1], self.source)
            chat[-1]["content"] = final + _CONTINUE_TAG
        text = self._template.render(
            messages=chat,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return _cut_at_tag(text, final) if continue_final_message else text


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    copy = {key: value for key, value in message.items() if value is not None}
    reasoning = next((copy[name] for name in _REASONING_FIELDS if name in copy), None)
    if reasoning is not None:
        copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
    return copy


def _final_content(message: Mapping[str, Any], source: str) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError('continue_final_message is set but the final message has no "content" to continue!')
    if "content" not in source:
        raise ValueError('continue_final_message is set to "content" but the chat_template does not read that field')
    return content


def _cut_at_tag(text: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise ValueError(
            "continue_final_message is set but the final message does not appear in the chat after applying the chat "
            "template!"
        )
    place = text.rindex(tag)
    if text[place : place + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:place]
    return text[:place].rstrip()  # the template trims, so what was before the tag would have been trimmed too


# --- what a template may use ------------------------------------------------------------------------------------------


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
        autoescape=False,  # a prompt is no HTML
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    return environment


class _GenerationTag(Extension):
    """``{% generation %}`` marks what an assistant said, for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_body"), [], [], body)
        block.set_lineno(line)
        return block

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _TemplateDict:
    """``dict`` without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """``namespace`` that holds no underscored names: those lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=...)` works, as in jinja2
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"Chat templates cannot store underscore-prefixed attributes on a namespace, but got {name!r}. "
            "Please rename the attribute."
        )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time, as transformers
