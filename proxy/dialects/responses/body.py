"""``POST /v1/responses``: the body and its input items as models, and what of the API is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import PlainValidator

from common.errors import InvalidRequestError
from common.openai.bodies.base import Body, declare, read_body
from common.openai.bodies.models import MAX_LOGPROBS, MAX_TOKENS
from common.openai.bodies.values import MAX_TOOLS, Function
from common.wire.fields import invalid, shown
from proxy.dialects.fields import UNSUPPORTED, objects, read_kind, refuse, refuse_given, texts

MAX_METADATA = 16
"""Entries of ``metadata``; this and the lengths of its texts are OpenAI's."""
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512

ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"

_ONLY_TEXT = "only text is"
_NO_STATE = "answers are not stored here; send the whole conversation as input"

# Field that is not built -> why.
_REFUSED: Mapping[str, str] = {
    "previous_response_id": _NO_STATE,
    "conversation": _NO_STATE,
    "background": "an answer is sent on the connection that asked for it",
    "background_options": "an answer is sent on the connection that asked for it",
    "prompt": "there are no stored prompts",
    "context_management": "nothing is compacted here",
    "moderation": "nothing is moderated here",
    "access_programs": "there are none here",
    "image": _ONLY_TEXT,
}


# --- items ------------------------------------------------------------------------------------------------------------


class TextPart(Body):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = declare(
        "OpenAI", "The prompt up to here will be used again: a state is kept there."
    )


class ImagePart(Body):
    type: Literal["input_image"]
    image_url: str = declare("OpenAI", "A data URL, or one of an image that the proxy may fetch.", default=...)
    detail: Literal["low", "high", "auto", "original"] | None = declare("OpenAI", "Accepted: the model's own.")
    prompt_cache_breakpoint: dict[str, Any] | None = declare(
        "OpenAI", "The prompt up to here will be used again: a state is kept there."
    )


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


class MessageItem(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Any


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Any


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: Any = None
    content: Any = None
    encrypted_content: str | None = None


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem

_ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}
_PARTS: Mapping[str, type[Body]] = {
    "input_text": TextPart,
    "output_text": TextPart,
    "text": TextPart,
    "summary_text": TextPart,
    "reasoning_text": TextPart,
    "refusal": RefusalPart,
}


def read_input(value: object) -> str | list[Item]:
    """Raises InvalidRequestError naming the item."""
    if isinstance(value, str):
        return value
    items = objects("input", value)
    if not items:
        raise InvalidRequestError("input must hold at least one item, got an empty list", param="input")
    return [_read_item(f"input[{index}]", item) for index, item in enumerate(items)]


def _read_item(name: str, item: Mapping[str, Any]) -> Item:
    why = _NO_STATE if item.get("type") == "item_reference" else "only " + ", ".join(_ITEMS) + " are"
    default = "message" if "role" in item else None
    read: Item = read_kind(name, item, _ITEMS, default, why=why)
    refuse_given(item, {"namespace": "functions have no namespaces here"}, prefix=f"{name}.")
    return read


class Part(NamedTuple):
    """``is_marked``: a state is to be kept at its end. ``is_image``: ``text`` is its URL."""

    text: str
    is_marked: bool = False
    is_image: bool = False


def read_parts(name: str, value: object, *, may_have_images: bool = False) -> list[Part]:
    if isinstance(value, str):
        return [Part(value)]
    kinds: Mapping[str, type[Body]] = {**_PARTS, "input_image": ImagePart} if may_have_images else _PARTS
    why = "only text and input_image are" if may_have_images else _ONLY_TEXT
    read: list[Part] = []
    for index, part in enumerate(objects(name, value)):
        found: Body = read_kind(f"{name}[{index}]", part, kinds, why=why)
        if isinstance(found, TextPart):
            read.append(Part(found.text, found.prompt_cache_breakpoint is not None))
        elif isinstance(found, ImagePart):
            read.append(Part(found.image_url, found.prompt_cache_breakpoint is not None, is_image=True))
        elif isinstance(found, RefusalPart):
            read.append(Part(found.refusal))
    return read


# --- the body ---------------------------------------------------------------------------------------------------------


class FunctionTool(Function):
    type: Literal["function"]


_REFUSED_OF_TOOL = {"defer_loading": "all tools are in the prompt", "async": "a call is answered in the next request"}


def read_tools(value: object) -> list[FunctionTool]:
    tools = []
    for index, tool in enumerate(objects("tools", value, at_most=MAX_TOOLS)):
        name = f"tools[{index}]"
        read: FunctionTool = read_kind(name, tool, {"function": FunctionTool}, why="only functions are")
        refuse_given(tool, _REFUSED_OF_TOOL, prefix=f"{name}.")
        if tool.get("allowed_callers") not in (None, ["direct"]):
            refuse(f"{name}.allowed_callers", tool["allowed_callers"], "the model alone calls")
        tools.append(read)
    return tools


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = declare(
        "OpenAI", "For templates that know it."
    )
    summary: Literal["auto", "detailed", "concise"] | None = declare(
        "OpenAI", "`auto` and `detailed`: the reasoning comes as the summary; concise is refused."
    )
    generate_summary: Literal["auto", "detailed", "concise"] | None = declare("OpenAI", "Older name of summary.")
    context: Literal["auto", "current_turn", "all_turns"] | None = declare("OpenAI", "`auto` alone.", means="auto")
    mode: str | None = declare("OpenAI", "`standard` alone.", means="standard")


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = declare("OpenAI", "A JSON Schema.", alias="schema")
    strict: bool | None = None


class Text(Body):
    format: TextFormat | None = declare("OpenAI", "`text`, `json_object` or `json_schema`.", means={"type": "text"})
    verbosity: Literal["low", "medium", "high"] | None = declare("OpenAI", "`medium` alone.", means="medium")


class StreamOptions(Body):
    include_obfuscation: bool | None = declare("OpenAI", "`false` alone.", means=False)


class ResponsesBody(Body):
    model: str | None = declare("OpenAI", "Absent or empty: the served model.")
    input: Annotated[Any, PlainValidator(read_input, json_schema_input_type=str | list[Item])] = declare(
        "OpenAI", "A text, or items: message, function_call, function_call_output, reasoning.", default=...
    )
    instructions: str | None = declare("OpenAI", "The system message, before those of input.")
    tools: Annotated[Any, PlainValidator(read_tools, json_schema_input_type=list[FunctionTool])] = declare(
        "OpenAI", "Functions.", default=()
    )
    tool_choice: Any = declare("OpenAI", "`none`, `auto`, `required`, or a function by name.", means="auto")
    parallel_tool_calls: bool | None = declare("OpenAI", "Whether an answer may hold several calls.", means=True)
    max_tool_calls: int | None = declare("OpenAI", "Of tools that a service runs itself, of which this one has none.")
    text: Text | None = declare("OpenAI", "The answer's format.")
    reasoning: Reasoning | None = declare("OpenAI", "How much, and how it is shown.")
    max_output_tokens: int | None = declare(
        "OpenAI", "Of reasoning and answer together.", means="the rest of the context", ge=1, le=MAX_TOKENS
    )
    temperature: float | None = declare("OpenAI", "0 is greedy.", ge=0, le=2)
    top_p: float | None = declare("OpenAI", "Nucleus sampling.", gt=0, le=1)
    top_logprobs: int | None = declare(
        "OpenAI", f"Alternatives per token; with {LOGPROBS} in include.", ge=0, le=MAX_LOGPROBS
    )
    include: Annotated[list[str] | None, texts("include")] = declare("OpenAI", f"{ENCRYPTED_REASONING}, {LOGPROBS}.")
    stream: bool | None = declare("OpenAI", "Typed events instead of one answer.", means=False)
    stream_options: StreamOptions | None = declare("OpenAI", "Only `include_obfuscation`.")
    store: bool | None = declare("OpenAI", "`false` alone: answers are never stored.", means=False)
    truncation: Literal["auto", "disabled"] | None = declare("OpenAI", "`disabled` alone.", means="disabled")
    metadata: dict[str, Any] | None = declare("OpenAI", "Given back.")
    user: str | None = declare("OpenAI", "Given back.")
    safety_identifier: str | None = declare("OpenAI", "Given back.")
    prompt_cache_key: str | None = declare("OpenAI", "Given back; prefixes are found by their tokens.")
    prompt_cache_retention: str | None = declare("OpenAI", "Accepted: prefixes stay for as long as there is room.")
    prompt_cache_options: dict[str, Any] | None = declare("OpenAI", "Accepted but for prewarm.")
    service_tier: str | None = declare("OpenAI", "Accepted: there is one.")


def read_responses_body(body: Mapping[str, Any]) -> ResponsesBody:
    """Raises InvalidRequestError naming field and value."""
    refuse_given(body, _REFUSED)
    if body.get("tools", ()) is None:
        body = {**body, "tools": []}
    read = read_body(ResponsesBody, body)
    if read.store:
        refuse("store", True, "answers are never stored; leave it out or send false")
    if read.truncation == "auto":
        refuse("truncation", "auto", "an input that is too long is refused, never shortened")
    if read.stream_options is not None and read.stream_options.include_obfuscation:
        refuse("stream_options.include_obfuscation", True, "events are not padded")
    for name in read.include or ():
        if name not in (ENCRYPTED_REASONING, LOGPROBS):
            raise InvalidRequestError(
                f"include {shown(name)} is not supported: only {ENCRYPTED_REASONING} and {LOGPROBS} are",
                param="include",
                code=UNSUPPORTED,
            )
    refuse_given(read.prompt_cache_options or {}, _CACHE_OPTIONS, prefix="prompt_cache_options.")
    _check_reasoning(read.reasoning)
    _check_metadata(read.metadata)
    return read


_CACHE_OPTIONS = {
    "prewarm": "send the request with max_output_tokens 1 instead",
    "comparison_response_id": _NO_STATE,
}


def _check_reasoning(reasoning: Reasoning | None) -> None:
    if reasoning is None:
        return
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) == "concise":
            refuse(f"reasoning.{name}", "concise", "reasoning is given whole or not at all")
    if reasoning.context not in (None, "auto"):
        refuse("reasoning.context", reasoning.context, "the model's template decides which reasoning it repeats")
    if reasoning.mode not in (None, "standard"):
        refuse("reasoning.mode", reasoning.mode, "there is one mode")


def _check_metadata(metadata: Mapping[str, Any] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(
            f"metadata must hold at most {MAX_METADATA} entries, got {len(metadata)}", param="metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS:
            raise InvalidRequestError(
                f"metadata keys must have at most {MAX_METADATA_KEY_CHARS} characters, got {len(key)}", param="metadata"
            )
        if not isinstance(value, str) or len(value) > MAX_METADATA_CHARS:
            invalid(f"metadata.{key}", value, f"a string of at most {MAX_METADATA_CHARS} characters")
