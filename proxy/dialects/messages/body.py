"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: the body and its content blocks as models, and what of the
API is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from common.errors import InvalidRequestError
from common.openai.bodies.base import Body, declare, read_body
from common.openai.bodies.models import MAX_TOKENS
from common.openai.bodies.values import MAX_TOOLS
from common.openai.messages import CACHE_CONTROL
from common.wire.fields import MAX_TOKEN_ID
from proxy.dialects.fields import objects, read_kind, refuse, refuse_given, texts

_ONE_TIER = "there is one"

# Field that is not built -> why.
_REFUSED: Mapping[str, str] = {
    "container": "no code runs here",
    "mcp_servers": "no tools run here; offer them as tools of your own",
    "context_management": "nothing is edited here",
    "diagnostics": "answers are not stored here",
    "inference_geo": "the nodes are where they are",
}


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = declare("Anthropic", "Accepted: states stay for as long as there is room.")


class Block(Body):
    """A content block. ``cache_control``: a state is kept at its end."""

    cache_control: CacheControl | None = declare("Anthropic", "The prompt up to here will be used again.")


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ImageSource(Body):
    type: Literal["base64", "url"]
    media_type: str | None = declare("Anthropic", "Of base64, such as `image/png`.")
    data: str | None = declare("Anthropic", "The image in base64.")
    url: str | None = declare("Anthropic", "Of an image that the proxy may fetch, or a data URL.")


class ImageBlock(Block):
    type: Literal["image"]
    source: ImageSource

    @property
    def image_url(self) -> str:
        source = self.source
        return source.url or "" if source.type == "url" else f"data:{source.media_type};base64,{source.data or ''}"


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Any = None
    is_error: bool | None = declare("Anthropic", "The text is given to the model as an error.", means=False)


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = declare("Anthropic", "Not read: reasoning is the client's to keep.")


AnyBlock = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock

_BLOCKS: Mapping[str, Mapping[str, type[AnyBlock]]] = {
    "user": {"text": TextBlock, "image": ImageBlock, "tool_result": ToolResultBlock},
    "tool_result": {"text": TextBlock, "image": ImageBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "system": {"text": TextBlock},
}


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Any = declare("Anthropic", "A text, or blocks: text, image, thinking, tool_use, tool_result.", default=...)


def read_messages(value: object) -> list[tuple[str, list[AnyBlock]]]:
    """Role and blocks of each message. Raises InvalidRequestError naming the block at fault."""
    messages = objects("messages", value)
    if not messages:
        raise InvalidRequestError("messages must hold at least one message, got an empty list", param="messages")
    read: list[tuple[str, list[AnyBlock]]] = []
    for index, each in enumerate(messages):
        message = read_body(Message, each, prefix=f"messages[{index}].")
        kinds = _BLOCKS[message.role]
        read.append((message.role, read_blocks(f"messages[{index}].content", message.content, kinds)))
    return read


def read_result(name: str, value: object) -> list[AnyBlock]:
    """Of a tool."""
    return [] if value is None else read_blocks(name, value, _BLOCKS["tool_result"])


def read_blocks(name: str, value: object, kinds: Mapping[str, type[AnyBlock]] = _BLOCKS["system"]) -> list[AnyBlock]:
    if isinstance(value, str):
        return [TextBlock(type="text", text=value)]
    why = "only " + ", ".join(kinds) + " blocks are"
    return [read_kind(f"{name}[{index}]", each, kinds, why=why) for index, each in enumerate(objects(name, value))]


def _read_system(value: object) -> list[AnyBlock]:
    return [] if value is None else read_blocks("system", value)


class Tool(Block):
    type: Literal["custom"] | None = None
    name: str = declare("Anthropic", "The tool's name.", default=..., min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any] = declare("Anthropic", "A JSON Schema of the arguments.", default=...)
    strict: bool | None = declare("Anthropic", "Arguments follow the schema.", means=False)
    eager_input_streaming: bool | None = declare("Anthropic", "Accepted: arguments are streamed as they are made.")


_REFUSED_OF_TOOL = {
    "defer_loading": "all tools are in the prompt",
    "input_examples": "templates print none; put them into the description",
}


def read_tools(value: object) -> list[Tool]:
    tools = []
    for index, tool in enumerate([] if value is None else objects("tools", value, at_most=MAX_TOOLS)):
        name = f"tools[{index}]"
        why = "only tools with an input_schema of the client's own are"
        read = read_kind(name, {**tool, "type": tool.get("type") or "custom"}, {"custom": Tool}, why=why)
        refuse_given(tool, _REFUSED_OF_TOOL, prefix=f"{name}.")
        if tool.get("allowed_callers") not in (None, ["direct"]):
            refuse(f"{name}.allowed_callers", tool["allowed_callers"], "the model alone calls")
        tools.append(read)
    return tools


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = declare("Anthropic", "Of type tool: which one.")
    disable_parallel_tool_use: bool | None = declare("Anthropic", "At most one call in an answer.", means=False)


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = declare("Anthropic", "Of the reasoning.", ge=1, le=MAX_TOKENS)
    display: Literal["summarized", "omitted"] | None = declare(
        "Anthropic", "`omitted`: reasoning is not given back; else it is given whole."
    )


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = declare("Anthropic", "The answer follows it.", default=..., alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = declare(
        "Anthropic", "For templates that know it."
    )
    format: OutputFormat | None = declare("Anthropic", "Only `json_schema`.")


class Metadata(Body):
    user_id: str | None = declare("Anthropic", "Accepted.")


class CountTokensBody(Body):
    """What makes the prompt."""

    model: str | None = declare("Anthropic", "Absent or empty: the served model.")
    messages: Annotated[Any, PlainValidator(read_messages, json_schema_input_type=list[Message])] = declare(
        "Anthropic", "The conversation; an assistant's message at its end is gone on with.", default=...
    )
    system: Annotated[Any, PlainValidator(_read_system, json_schema_input_type=str | list[TextBlock] | None)] = declare(
        "Anthropic", "A text, or text blocks.", default=()
    )
    tools: Annotated[Any, PlainValidator(read_tools, json_schema_input_type=list[Tool] | None)] = declare(
        "Anthropic", "Tools of the client's own.", default=()
    )
    tool_choice: ToolChoice | None = declare("Anthropic", "`auto`, `any`, `tool` or `none`.")
    thinking: Thinking | None = declare("Anthropic", "Reasoning; absent: as the model's template does by itself.")
    output_config: OutputConfig | None = declare("Anthropic", "`effort` and `format`.")
    output_format: OutputFormat | None = declare("Anthropic", "Older place of output_config.format.")
    cache_control: CacheControl | None = declare("Anthropic", "Accepted: the prompt's end is always kept.")
    speed: Literal["standard", "fast"] | None = declare("Anthropic", "`standard` alone.", means="standard")
    user_profile_id: str | None = declare("Anthropic", "Accepted.")
    workspace_id: str | None = declare("Anthropic", "Accepted.")


class MessagesBody(CountTokensBody):
    max_tokens: int = declare("Anthropic", "Of the answer, reasoning included.", default=..., ge=1, le=MAX_TOKENS)
    stop_sequences: Annotated[list[str] | None, texts("stop_sequences")] = declare(
        "Anthropic", "Texts that end the answer; they are not part of it."
    )
    temperature: float | None = declare("Anthropic", "0 is greedy.", ge=0, le=2)
    top_p: float | None = declare("Anthropic", "Nucleus sampling.", gt=0, le=1)
    top_k: int | None = declare("Anthropic", "The most likely tokens alone.", ge=-1, le=MAX_TOKEN_ID)
    stream: bool | None = declare("Anthropic", "Events instead of one answer.", means=False)
    metadata: Metadata | None = declare("Anthropic", "Only `user_id`.")
    service_tier: Literal["auto", "standard_only"] | None = declare("Anthropic", f"Accepted: {_ONE_TIER}.")


def read_messages_body(body: Mapping[str, Any]) -> MessagesBody:
    """Raises InvalidRequestError naming field and value."""
    if body.get("max_tokens") is None:
        raise InvalidRequestError("max_tokens is required", param="max_tokens")
    read = read_body(MessagesBody, body)
    _check(body, read)
    return read


def read_count_tokens_body(body: Mapping[str, Any]) -> CountTokensBody:
    """Raises InvalidRequestError naming field and value."""
    read = read_body(CountTokensBody, body)
    _check(body, read)
    return read


def _check(body: Mapping[str, Any], read: CountTokensBody) -> None:
    refuse_given(body, _REFUSED)
    if read.speed == "fast":
        refuse("speed", "fast", _ONE_TIER)
    thinking = read.thinking
    if thinking is not None and (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        wanted = "given" if thinking.type == "enabled" else "absent"
        raise InvalidRequestError(
            f"thinking.budget_tokens must be {wanted} with type {thinking.type}, got {thinking.budget_tokens}",
            param="thinking.budget_tokens",
        )
    choice = read.tool_choice
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        wanted = "given" if choice.type == "tool" else "absent"
        raise InvalidRequestError(
            f"tool_choice.name must be {wanted} with type {choice.type}, got {choice.name!r}", param="tool_choice.name"
        )


def is_marked(body: Mapping[str, Any]) -> bool:
    """Whether anything in ``body`` has a mark. Takes as long as the body is."""
    marked = [body, *_dicts(body.get("tools")), *_dicts(body.get("system"))]
    for message in _dicts(body.get("messages")):
        marked += _dicts(message.get("content"))
    return any(each.get(CACHE_CONTROL) for each in marked)


def _dicts(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
