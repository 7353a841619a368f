"""Values of fields that are more than a number or a word: each has a validator of its own, whose cost is bounded.

They raise ``InvalidRequestError`` in the words of ``common.wire.fields``, which pydantic lets through. A prompt of
500,000 ids is checked in milliseconds this way; pydantic would make an error object for each that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from common.errors import InvalidRequestError
from common.openai.bodies.base import Body, declare, read_body
from common.openai.messages import CACHE_CONTROL, ROLES
from common.wire.fields import MAX_TOKEN_ID, check_int_list, check_number, invalid, is_int, shown

MAX_PROMPTS = 2048
"""Prompts of one completion request."""
MAX_TOKENS_TOGETHER = 500_000
"""Tokens of all prompts of a request with several: what the nodes tell each other of a prompt names them again."""
MAX_TEMPLATE_KWARGS = 256
"""Variables that a chat may give its template: each rendering copies the table of them."""
MAX_TOOLS = 1024
"""Of one chat: a template prints them all."""
MAX_DOCUMENTS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
"""Characters of one stop string; both bounds keep the search in the text cheap."""
MAX_BAD_WORDS = 128
"""Of up to ``MAX_STOP_CHARS`` characters each; each step of the engine looks for them all."""
MAX_LOGIT_BIAS = 1024
"""Tokens with a bias of their own; each step of the engine adds them all."""
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
"""Tokens whose log-probabilities are told with each token."""
MAX_ALLOWED_TOKEN_IDS = 300_000
"""More than any vocabulary has."""

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ToolName:
    """``tool_choice`` that names the one function to call."""

    name: str


ToolChoiceValue = Literal["none", "auto", "required"] | ToolName


# --- prompts ----------------------------------------------------------------------------------------------------------


def parse_prompts(value: object) -> tuple[Prompt, ...]:
    """``prompt`` as one entry per prompt: text, token ids, a list of texts, or a list of token id lists.

    Raises:
        InvalidRequestError: absent, empty, mixed or negative; ``param`` is ``prompt``.
    """
    if value is None:
        raise InvalidRequestError("prompt is required", param="prompt")
    if isinstance(value, str):
        return (_one_prompt("prompt", value),)
    if not isinstance(value, list | tuple):
        invalid("prompt", value, "a string, a list of token ids, or a list of either")
    if not value:
        raise InvalidRequestError("prompt must not be empty, got an empty list", param="prompt")
    if is_int(value[0]):
        return (_one_prompt("prompt", value),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(value)}", param="prompt")
    prompts = tuple(_one_prompt(f"prompt[{index}]", item) for index, item in enumerate(value))
    check_tokens_together(sum(len(prompt) for prompt in prompts if not isinstance(prompt, str)), len(prompts))
    return prompts


def check_tokens_together(num_tokens: int, num_prompts: int) -> None:
    """Raises InvalidRequestError for several prompts that have too many tokens together."""
    if num_prompts > 1 and num_tokens > MAX_TOKENS_TOGETHER:
        raise InvalidRequestError(
            f"{num_prompts} prompts must have at most {MAX_TOKENS_TOGETHER} tokens together, got {num_tokens}",
            param="prompt",
        )


def _one_prompt(where: str, value: object) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise InvalidRequestError(f"{where} must not be empty, got an empty string", param="prompt")
        return value
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(
            f"{where} must be a string or a list of token ids, got {shown(value)}", param="prompt"
        )
    if not value:
        raise InvalidRequestError(f"{where} must not be empty, got an empty list", param="prompt")
    try:
        return check_int_list(where, value, le=MAX_TOKEN_ID)
    except InvalidRequestError as exc:
        raise InvalidRequestError(exc.message, param="prompt") from exc


# --- what a template reads --------------------------------------------------------------------------------------------


class Function(Body):
    """What a tool calls, of chats and of Responses."""

    name: str = declare("OpenAI", "The function's name.", default=..., min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = declare("OpenAI", "Arguments follow the schema.", means=False)


def _tools(value: object) -> tuple[dict[str, Any], ...] | None:
    tools = _objects("tools", value, MAX_TOOLS)
    for index, tool in enumerate(tools):
        _check_tool(f"tools[{index}]", tool)
    # Templates print tools whole: a mark in one must not change the prompt. Their end is a boundary anyway.
    return tuple({key: item for key, item in tool.items() if key != CACHE_CONTROL} for tool in tools) or None


def _check_tool(name: str, tool: Mapping[str, Any]) -> None:
    kind, function = tool.get("type"), tool.get("function")
    if kind not in (None, "function"):
        raise InvalidRequestError(
            f"{name}.type {shown(kind)} is not supported: only functions are",
            param=f"{name}.type",
            code="unsupported_parameter",
        )
    if not isinstance(function, Mapping):
        invalid(f"{name}.function", function, "an object")
    read_body(Function, function, prefix=f"{name}.function.")


def _documents(value: object) -> tuple[dict[str, Any], ...] | None:
    return tuple(map(dict, _objects("documents", value, MAX_DOCUMENTS))) or None


def _objects(name: str, value: object, most: int) -> Sequence[Mapping[str, Any]]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        invalid(name, value, "a list")
    if len(value) > most:
        raise InvalidRequestError(f"{name} must hold at most {most} {name}, got {len(value)}", param=name)
    for item in value:
        if not isinstance(item, dict):
            invalid(name, item, "a list of objects")
    return value


def _template_kwargs(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        invalid("chat_template_kwargs", value, "an object")
    if len(value) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequestError(
            f"chat_template_kwargs must hold at most {MAX_TEMPLATE_KWARGS} variables, got {len(value)}",
            param="chat_template_kwargs",
        )
    return dict(value)


def _tool_choice(value: object) -> ToolChoiceValue | None:
    if value is None or value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        invalid("tool_choice", value, 'none, auto, required, or {"type": "function", "function": {"name": ...}}')
    return ToolName(name)


# --- what the answer is made by ---------------------------------------------------------------------------------------


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, str | list | tuple):
        invalid("stop", value, "a string or a list of strings")
    return _strings("stop", [value] if isinstance(value, str) else value, MAX_STOP_STRINGS)


def _bad_words(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        invalid("bad_words", value, "a list of strings")
    return _strings("bad_words", value, MAX_BAD_WORDS)


def _strings(name: str, value: Sequence[object], most: int) -> tuple[str, ...]:
    if len(value) > most:
        raise InvalidRequestError(f"{name} must hold at most {most} strings, got {len(value)}", param=name)
    for item in value:
        if not isinstance(item, str) or not 1 <= len(item) <= MAX_STOP_CHARS:
            invalid(name, item, f"strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(item for item in value if isinstance(item, str))


def _stop_token_ids(value: object) -> frozenset[int]:
    return frozenset(_token_ids("stop_token_ids", value, MAX_STOP_TOKEN_IDS) or ())


def _allowed_token_ids(value: object) -> frozenset[int] | None:
    given = _token_ids("allowed_token_ids", value, MAX_ALLOWED_TOKEN_IDS)
    if given is not None and not given:
        invalid("allowed_token_ids", value, "a list of at least one id")
    return None if given is None else frozenset(given)


def _logprob_token_ids(value: object) -> tuple[int, ...] | None:
    given = _token_ids("logprob_token_ids", value, MAX_LOGPROB_TOKEN_IDS)
    if given is not None and not given:
        invalid("logprob_token_ids", value, "a list of at least one id")
    return None if given is None else tuple(dict.fromkeys(given))


def _token_ids(name: str, value: object, most: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    token_ids = check_int_list(name, value, le=MAX_TOKEN_ID)
    if len(token_ids) > most:
        raise InvalidRequestError(f"{name} must hold at most {most} ids, got {len(token_ids)}", param=name)
    return token_ids


def _logit_bias(value: object) -> Mapping[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        invalid("logit_bias", value, "an object")
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias must hold at most {MAX_LOGIT_BIAS} tokens, got {len(value)}", param="logit_bias"
        )
    bias: dict[int, float] = {}
    for key, each in value.items():
        # One spelling per id, so that two entries cannot name the same token.
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise InvalidRequestError(f"logit_bias keys must be token ids, got {shown(key)}", param="logit_bias")
        try:
            bias[int(key)] = check_number(f"logit_bias[{key}]", each, ge=-100, le=100)
        except InvalidRequestError as exc:
            raise InvalidRequestError(exc.message, param="logit_bias") from exc
    return bias


# --- what the schema says of them -------------------------------------------------------------------------------------


class _Shape(BaseModel):
    """Describes a value that a function checks; never made."""

    model_config = ConfigDict(extra="allow")


class CacheControl(_Shape):
    """The prompt up to here will be used again."""

    type: Literal["ephemeral"] = "ephemeral"


class TextPart(_Shape):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class RefusalPart(_Shape):
    type: Literal["refusal"]
    refusal: str
    cache_control: CacheControl | None = None


class ImageUrl(_Shape):
    url: str


class ImagePart(_Shape):
    type: Literal["image_url"]
    image_url: ImageUrl | str
    cache_control: CacheControl | None = None


class CalledFunction(_Shape):
    name: str
    arguments: str | dict[str, Any]


class ToolCall(_Shape):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Shape):
    role: Literal[ROLES]  # type: ignore[valid-type]
    content: str | list[TextPart | RefusalPart | ImagePart | str] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    cache_control: CacheControl | None = None


class Tool(_Shape):
    type: Literal["function"] = "function"
    function: Function


class JsonSchema(_Shape):
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Shape):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class StructuredOutputs(_Shape):
    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None


class ChosenFunction(_Shape):
    name: str


class ToolChoice(_Shape):
    type: Literal["function"]
    function: ChosenFunction


Prompts = Annotated[
    tuple[Prompt, ...] | None,
    PlainValidator(parse_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Tools = Annotated[tuple[dict[str, Any], ...] | None, PlainValidator(_tools, json_schema_input_type=list[Tool] | None)]
Choice = Annotated[
    ToolChoiceValue | None,
    PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | ToolChoice | None),
]
Documents = Annotated[
    tuple[dict[str, Any], ...] | None,
    PlainValidator(_documents, json_schema_input_type=list[dict[str, Any]] | None),
]
TemplateKwargs = Annotated[
    dict[str, Any], PlainValidator(_template_kwargs, json_schema_input_type=dict[str, Any] | None)
]
Stop = Annotated[tuple[str, ...], PlainValidator(_stop, json_schema_input_type=str | list[str] | None)]
BadWords = Annotated[tuple[str, ...], PlainValidator(_bad_words, json_schema_input_type=list[str] | None)]
StopTokenIds = Annotated[frozenset[int], PlainValidator(_stop_token_ids, json_schema_input_type=list[int] | None)]
AllowedTokenIds = Annotated[
    frozenset[int] | None, PlainValidator(_allowed_token_ids, json_schema_input_type=list[int] | None)
]
LogprobTokenIds = Annotated[
    tuple[int, ...] | None, PlainValidator(_logprob_token_ids, json_schema_input_type=list[int] | None)
]
LogitBias = Annotated[Mapping[int, float], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float] | None)]
