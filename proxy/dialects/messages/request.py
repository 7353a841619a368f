"""A Messages body as a chat body. ``cache_control`` marks go on to the chat, which keeps states there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequestError
from common.openai.messages import CACHE_CONTROL, IMAGE_URL
from common.text.answers.detection import SWITCHES
from common.wire.json_text import dump_json
from proxy.dialects.fields import given, passed
from proxy.dialects.messages.body import (
    AnyBlock,
    Block,
    CountTokensBody,
    ImageBlock,
    MessagesBody,
    OutputFormat,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    read_result,
)

ERROR_PREFIX = "Error: "
"""Before the text of a tool's result that is an error and does not say so: a chat has no other place for it."""

ChatMessage = dict[str, Any]
_Named = tuple[str, AnyBlock]
"""A block, and its place in the body for errors."""
_MARK = {CACHE_CONTROL: {"type": "ephemeral"}}
# A field of the chat body -> what the client calls it.
NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
# How a field that lies deeper ends in the chat body -> in the client's.
INNER_NAMES: Mapping[str, str] = {".json_schema.schema": ".schema", ".function.parameters": ".input_schema"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: MessagesBody) -> dict[str, Any]:
    """Raises InvalidRequestError naming the block at fault."""
    chat = given(
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stream=body.stream,
        # message_start says the prompt's tokens: the first event has to know them.
        stream_options={"include_usage": True, "continuous_usage_stats": True} if body.stream else None,
    )
    return {**passed(body), **to_prompt(body), **chat}


def to_prompt(body: CountTokensBody) -> dict[str, Any]:
    """What of the chat body makes the prompt, and what goes with it."""
    output_format = _format_given(body) or body.output_format
    return given(
        model=body.model,
        messages=_messages(body),
        tools=[_tool(tool) for tool in body.tools] or None,
        **_tool_choice(body.tool_choice),
        **_reasoning(body),
        response_format=None if output_format is None else _format(output_format),
        continue_final_message=True if body.messages[-1][0] == "assistant" else None,
        chat_template_kwargs=_template_kwargs(body),
    )


def _format_given(body: CountTokensBody) -> OutputFormat | None:
    """In ``output_config``."""
    return body.output_config.format if body.output_config is not None else None


def names_of(body: CountTokensBody) -> Mapping[str, str]:
    """``NAMES``, for errors about ``body``."""
    if body.output_format is None or _format_given(body) is not None:
        return NAMES
    return {**NAMES, "response_format": "output_format"}


def _reasoning(body: CountTokensBody) -> dict[str, Any]:
    thinking, output = body.thinking, body.output_config
    effort = None if output is None else output.effort
    if thinking is None:
        return given(reasoning_effort=effort)
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    return given(
        reasoning_effort=effort,
        thinking_token_budget=thinking.budget_tokens,
        include_reasoning=False if thinking.display == "omitted" else None,
    )


def _template_kwargs(body: CountTokensBody) -> Any:
    """The client's own, over the switches by which templates reason that do so only when told. An effort sets those
    by itself."""
    extra = body.model_extra or {}
    own = extra.get("chat_template_kwargs")
    is_on = body.thinking is not None and body.thinking.type == "enabled"
    has_effort = bool(extra.get("reasoning_effort")) or bool(body.output_config and body.output_config.effort)
    if not is_on or has_effort or not (own is None or isinstance(own, Mapping)):
        return own  # what is no object is the chat's to refuse
    return {**dict.fromkeys(SWITCHES, True), **(own or {})}


def _messages(body: CountTokensBody) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    system: list[_Named] = [("system", block) for block in body.system]
    turns = _turns(body)
    for index, (role, blocks) in enumerate(turns):
        if role == "assistant":
            messages.append(_assistant(blocks, is_last=index == len(turns) - 1))
        elif role == "system" and not messages:
            system += blocks
        else:
            messages += _said(role, blocks)
    return [*_said("system", system), *messages]


def _turns(body: CountTokensBody) -> list[tuple[str, list[_Named]]]:
    """Messages of one role that follow each other are one turn, as in the API: many templates take no two."""
    turns: list[tuple[str, list[_Named]]] = []
    for index, (role, blocks) in enumerate(body.messages):
        named = [(f"messages[{index}].content[{place}]", block) for place, block in enumerate(blocks)]
        if turns and turns[-1][0] == role and role != "system":
            turns[-1][1].extend(named)
        else:
            turns.append((role, named))
    return turns


def _said(role: str, blocks: Sequence[_Named]) -> list[ChatMessage]:
    """Texts and images that stand together are one message, each tool's result is one of its own."""
    messages: list[ChatMessage] = []
    shown: list[AnyBlock] = []
    for name, block in blocks:
        if isinstance(block, TextBlock | ImageBlock):
            shown.append(block)
        elif isinstance(block, ToolResultBlock):
            if shown:
                messages.append({"role": role, "content": _content(shown)})
                shown = []
            messages.append(_tool_result(name, block))
    if shown or (role == "user" and not messages):
        messages.append({"role": role, "content": _content(shown)})
    return messages


def _assistant(named: Sequence[_Named], *, is_last: bool) -> ChatMessage:
    """As the model wrote it: its texts are one text."""
    blocks = [block for _, block in named]
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    message: ChatMessage = {"role": "assistant", "content": "".join(texts)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "".join(thoughts)
    for name, block in named:
        if isinstance(block, ToolUseBlock):
            if is_last:
                where = name.partition(".")[0]
                raise InvalidRequestError(
                    f"{where} calls tools: a message with their tool_result blocks must follow", param=where
                )
            function = {"name": block.name, "arguments": dump_json(block.input).decode()}
            call = {"id": block.id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return message | _mark(*blocks)


def _tool_result(name: str, block: ToolResultBlock) -> ChatMessage:
    blocks = read_result(f"{name}.content", block.content)
    first = blocks[0].text if blocks and isinstance(blocks[0], TextBlock) else None
    if block.is_error and not (first or "").lower().startswith("error"):
        rest = blocks if first is None else blocks[1:]
        blocks = [TextBlock(type="text", text=ERROR_PREFIX + (first or "")), *rest]
    message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(blocks)}
    return message | _mark(block)


def _content(blocks: Sequence[AnyBlock]) -> str | list[ChatMessage]:
    if len(blocks) == 1 and isinstance(blocks[0], TextBlock) and blocks[0].cache_control is None:
        return blocks[0].text
    return [_part(each) | _mark(each) for each in blocks]


def _part(block: AnyBlock) -> ChatMessage:
    if isinstance(block, ImageBlock):
        return {"type": IMAGE_URL, IMAGE_URL: {"url": block.image_url}}
    assert isinstance(block, TextBlock), f"a {block.type} block is no part of a text"
    return {"type": "text", "text": block.text}


def _mark(*blocks: Block) -> ChatMessage:
    return _MARK if any(block.cache_control is not None for block in blocks) else {}


def _tool(tool: Tool) -> ChatMessage:
    function = given(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict or None
    )
    return {"type": "function", "function": function} | _mark(tool)


def _tool_choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    return given(
        tool_choice=_CHOICES.get(choice.type, named),
        parallel_tool_calls=False if choice.disable_parallel_tool_use else None,
    )


def _format(value: OutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value.schema_, "strict": True}}
