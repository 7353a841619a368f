"""Response objects of the OpenAI endpoints as plain dictionaries, and server-sent events.

Builders only: they hold no state and get everything as arguments. A stream is chunks, then (when asked for) one
chunk with ``usage`` and no choices, then ``SSE_DONE``. A stream that fails after its first byte ends with
``sse_error`` and without ``SSE_DONE``, so that no client takes it for complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from common.openai.errors import error_body
from common.request import FinishReason

Json = dict[str, Any]

SSE_DONE = b"data: [DONE]\n\n"
SSE_MEDIA_TYPE = "text/event-stream"
SSE_AT_WORK = b": at work\n\n"
"""A comment, which clients pass over: tokens come, but none that is shown."""


# --- envelopes --------------------------------------------------------------------------------------------------------


def completion_response(
    *,
    response_id: str,
    model: str,
    created: int,
    choices: Sequence[Json],
    usage: Json,
    kv_transfer_params: Mapping[str, Any] | None = None,
    trace: Json | None = None,
) -> Json:
    """``text_completion`` object; ``created`` in seconds since 1970."""
    body = _envelope("text_completion", response_id, model, created, choices)
    return _finish(body, usage, kv_transfer_params, trace)


def completion_chunk(
    *,
    response_id: str,
    model: str,
    created: int,
    choices: Sequence[Json],
    usage: Json | None = None,
    trace: Json | None = None,
) -> Json:
    """One event of a streamed completion; the same object as the whole response."""
    return _finish(_envelope("text_completion", response_id, model, created, choices), usage, None, trace)


def chat_response(
    *,
    response_id: str,
    model: str,
    created: int,
    choices: Sequence[Json],
    usage: Json,
    kv_transfer_params: Mapping[str, Any] | None = None,
    prompt: Json | None = None,
    trace: Json | None = None,
) -> Json:
    """``chat.completion`` object. ``prompt``: see ``prompt_block``."""
    body = {**_envelope("chat.completion", response_id, model, created, choices), **(prompt or {})}
    return _finish(body, usage, kv_transfer_params, trace)


def chat_chunk(
    *,
    response_id: str,
    model: str,
    created: int,
    choices: Sequence[Json],
    usage: Json | None = None,
    prompt: Json | None = None,
    trace: Json | None = None,
) -> Json:
    """``chat.completion.chunk`` object. ``prompt``: see ``prompt_block``."""
    body = {**_envelope("chat.completion.chunk", response_id, model, created, choices), **(prompt or {})}
    return _finish(body, usage, None, trace)


def _envelope(kind: str, response_id: str, model: str, created: int, choices: Sequence[Json]) -> Json:
    return {"id": response_id, "object": kind, "created": created, "model": model, "choices": list(choices)}


def _finish(body: Json, usage: Json | None, params: Mapping[str, Any] | None, trace: Json | None) -> Json:
    if usage is not None:
        body["usage"] = usage
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    if trace is not None:
        body["tandem"] = trace
    return body


# --- choices ----------------------------------------------------------------------------------------------------------


def completion_choice(
    index: int,
    text: str,
    *,
    finish_reason: FinishReason | None = None,
    stop_reason: int | str | None = None,
    logprobs: Json | None = None,
    token_ids: Sequence[int] | None = None,
    prompt: Json | None = None,
) -> Json:
    """A choice of a completion, whole or one chunk of it. ``stop_reason``: the stop string or stop token id that
    hit. ``prompt``: see ``prompt_block``."""
    return _choice(index, {"text": text}, finish_reason, stop_reason, logprobs, token_ids) | (prompt or {})


def chat_choice(
    index: int,
    text: str,
    *,
    reasoning: str = "",
    tool_calls: Sequence[Json] = (),
    finish_reason: FinishReason | str,
    stop_reason: int | str | None = None,
    logprobs: Json | None = None,
    token_ids: Sequence[int] | None = None,
) -> Json:
    """``finish_reason``: the engine's, or ``tool_calls``."""
    message: Json = {"role": "assistant", "content": text or (None if reasoning or tool_calls else "")}
    message |= _beside_content(reasoning, tool_calls)
    return _choice(index, {"message": message}, finish_reason, stop_reason, logprobs, token_ids)


def chat_chunk_choice(
    index: int,
    text: str | None,
    *,
    reasoning: str = "",
    tool_calls: Sequence[Json] = (),
    is_first: bool = False,
    finish_reason: FinishReason | str | None = None,
    stop_reason: int | str | None = None,
    logprobs: Json | None = None,
    token_ids: Sequence[int] | None = None,
) -> Json:
    """A choice of a chat chunk; the first of each choice carries the role. ``finish_reason``: as of ``chat_choice``."""
    delta: Json = {}
    if is_first:
        delta["role"] = "assistant"
    if text or (text is not None and not (reasoning or tool_calls)):
        delta["content"] = text
    delta |= _beside_content(reasoning, tool_calls)
    return _choice(index, {"delta": delta}, finish_reason, stop_reason, logprobs, token_ids)


def _beside_content(reasoning: str, tool_calls: Sequence[Json]) -> Json:
    """Reasoning under both names that clients read, and calls."""
    fields: Json = {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
    return {**fields, "tool_calls": list(tool_calls)} if tool_calls else fields


def tool_call(call_id: str, name: str, arguments: str) -> Json:
    """A whole call. ``arguments``: JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_call_piece(index: int, arguments: str, *, call_id: str = "", name: str | None = None) -> Json:
    """A piece of call number ``index``; the first has its id and ``name``."""
    if name is not None:
        return {"index": index, **tool_call(call_id, name, arguments)}
    return {"index": index, "function": {"arguments": arguments}}


def _choice(
    index: int,
    content: Json,
    finish_reason: FinishReason | str | None,
    stop_reason: int | str | None,
    logprobs: Json | None,
    token_ids: Sequence[int] | None,
) -> Json:
    choice: Json = {
        "index": index,
        **content,
        "logprobs": logprobs,
        "finish_reason": finish_reason.value if isinstance(finish_reason, FinishReason) else finish_reason,
        "stop_reason": stop_reason,
    }
    if token_ids is not None:
        choice["token_ids"] = list(token_ids)
    return choice


def prompt_block(token_ids: Sequence[int] | None, logprobs: Sequence[Json | None] | None) -> Json:
    """What is told of a prompt, where it is asked for: in each choice of a completion, beside a chat's choices."""
    block: Json = {}
    if token_ids is not None:
        block["prompt_token_ids"] = list(token_ids)
    if logprobs is not None:
        block["prompt_logprobs"] = list(logprobs)
    return block


# --- usage, trace, models ---------------------------------------------------------------------------------------------


def usage_block(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    num_cached_tokens: int,
    num_reasoning_tokens: int | None = None,
) -> Json:
    """``usage``; ``num_cached_tokens``: prompt tokens that no node computed for this request;
    ``num_reasoning_tokens``: None where nobody looked for them."""
    details = {} if num_reasoning_tokens is None else {"reasoning_tokens": num_reasoning_tokens}
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        **({"completion_tokens_details": details} if details else {}),
    }


def trace_block(
    *,
    placement: str,
    prefill_node: str | None = None,
    decode_node: str | None = None,
    prefill_cached_tokens: int = 0,
    decode_cached_tokens: int = 0,
    transferred_bytes: int = 0,
    transferred_blocks: int = 0,
    transferred_states: int = 0,
    draft_tokens: int = 0,
    accepted_tokens: int = 0,
    seconds: Mapping[str, float | None] | None = None,
) -> Json:
    """The ``tandem`` object of a traced response. ``seconds`` by phase; a phase that did not happen is null."""
    given = seconds or {}
    unknown = set(given).difference(TRACE_PHASES)
    assert not unknown, f"unknown trace phases {sorted(unknown)}"
    return {
        "placement": placement,
        "prefill_node": prefill_node,
        "decode_node": decode_node,
        "prefill_cached_tokens": prefill_cached_tokens,
        "decode_cached_tokens": decode_cached_tokens,
        "transferred_bytes": transferred_bytes,
        "transferred_blocks": transferred_blocks,
        "transferred_states": transferred_states,
        "draft_tokens": draft_tokens,
        "accepted_tokens": accepted_tokens,
        "seconds": {phase: given.get(phase) for phase in TRACE_PHASES},
    }


TRACE_PHASES = (
    "proxy_queue",
    "tokenize",
    "prefill_queue",
    "prefill",
    "transfer",
    "decode_queue",
    "first_token",
    "total",
)


def models_response(model: str, *, created: int, max_model_len: int) -> Json:
    """``GET /v1/models``."""
    entry = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "tandem",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
    }
    return {"object": "list", "data": [entry]}


# --- server-sent events -----------------------------------------------------------------------------------------------


def sse_event(data: Mapping[str, Any]) -> bytes:
    """One ``data:`` event. JSON escapes newlines, so one line is always enough."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def sse_error(error: Exception) -> bytes:
    """The last event of a stream that failed after its first byte; no ``SSE_DONE`` follows."""
    return sse_event(error_body(error))
