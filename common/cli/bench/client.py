"""One request of ``tandem bench``: a streamed completion, timed as its client sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from common.cli.bench.settings import BenchSettings
from common.cli.bench.workload import Prompt
from common.wire.headers import TRACE_HEADER
from common.wire.routes import COMPLETIONS_ROUTE

TRACE_HEADERS = {TRACE_HEADER: "1"}
CUT = "the stream ended without [DONE]"
MAX_EVENT_BYTES = 16 * 2**20
"""Longest event that can be read, in bytes: an event is one line."""


@dataclass(slots=True)
class Sample:
    """What one request showed; times in seconds. ``error`` None: it was answered to its end.

    ``start_s`` is after the run's begin. ``gaps_s``: between events that brought tokens. ``num_prompt_tokens`` and
    ``num_cached_tokens`` are the server's, None when it does not say. ``trace``: the ``tandem`` object of the answer.
    """

    turn: int = 0
    start_s: float = 0.0
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    e2e_s: float = 0.0
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    trace: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(slots=True)
class Answer:
    """``tokens``: the answer's ids, or its text when the prompt was text."""

    sample: Sample
    token_ids: list[int] = field(default_factory=list)
    text: str = ""


class BenchClient:
    """Sends requests over one connection pool. ``model``: None: not named."""

    def __init__(self, session: aiohttp.ClientSession, settings: BenchSettings, model: str | None) -> None:
        self._session = session
        self._settings = settings
        self._model = model
        self._headers = dict(TRACE_HEADERS) if settings.wants_trace else {}

    async def send(self, prompt: Prompt, max_tokens: int, *, turn: int, run_start_s: float) -> Answer:
        """Never raises but for cancellation: what went wrong is the sample's ``error``."""
        answer = Answer(Sample(turn=turn, error=CUT))
        content = json.dumps(self._body(prompt, max_tokens)).encode()
        start_s = time.perf_counter()
        answer.sample.start_s = start_s - run_start_s
        try:
            async with self._session.post(COMPLETIONS_ROUTE, data=content, headers=self._headers) as response:
                if response.status != 200:
                    answer.sample.error = _refusal(response.status, await response.read())
                else:
                    await _read_stream(response.content, answer, start_s)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as exc:
            answer.sample.error = _reason(exc)
        answer.sample.e2e_s = time.perf_counter() - start_s
        return answer

    def _body(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._model is not None:
            body["model"] = self._model
        if not self._settings.is_text:
            body |= {"ignore_eos": True, "return_token_ids": True}
        return body


async def _read_stream(stream: aiohttp.StreamReader, answer: Answer, start_s: float) -> None:
    sample = answer.sample
    last_s, num_seen = start_s, 0
    async for raw in stream:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            sample.error = None
            break
        event = json.loads(data)
        if "error" in event:
            sample.error = f"error event {_code(event)}".rstrip()
            return
        choices = event.get("choices")
        if choices and (num_new := _take(answer, choices[0])):
            now_s = time.perf_counter()
            if sample.ttft_s is None:
                sample.ttft_s = now_s - start_s
            else:
                sample.gaps_s.append(now_s - last_s)
            last_s = now_s
            num_seen += num_new
        if usage := event.get("usage"):
            sample.num_prompt_tokens = usage["prompt_tokens"]
            sample.num_output_tokens = usage["completion_tokens"]
            sample.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if isinstance(trace := event.get("tandem"), dict):
            sample.trace = trace
    # A server that reports no usage: what was seen, an event for a token where it does not name them.
    sample.num_output_tokens = sample.num_output_tokens or num_seen
    if sample.error is None and sample.ttft_s is None:
        sample.error = "an answer without tokens"


def _take(answer: Answer, choice: Mapping[str, Any]) -> int:
    """Adds what an event brought; how many tokens that was, 0 for none."""
    token_ids, text = choice.get("token_ids") or (), choice.get("text") or ""
    answer.token_ids += token_ids
    answer.text += text
    return len(token_ids) or bool(text)


def _refusal(status: int, body: bytes) -> str:
    try:
        code = _code(json.loads(body))
    except ValueError:
        code = ""
    return f"status {status} {code}".rstrip()


def _code(body: Any) -> str:
    """The stable code of an error, never its message: reasons are counted."""
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") or error.get("type") if isinstance(error, dict) else None
    return str(code) if code is not None else ""


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect ({error.strerror or type(error.os_error).__name__})"
    if isinstance(error, TimeoutError):
        return "silent for longer than --timeout-seconds"
    if isinstance(error, aiohttp.ClientError):
        return f"connection broke ({type(error).__name__})"
    return f"not a stream of completions ({type(error).__name__})"
