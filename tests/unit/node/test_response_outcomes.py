"""How a node counts each way in which a stream ends, and what its reader gets."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from common.engine.outputs import RequestOutput
from common.errors import QueueFullError, TandemError, TransferError
from common.metrics.metrics import Metrics
from common.metrics.table import Role
from common.node.serving.choices import ChoiceDelta
from common.node.serving.request_record import RequestRecord
from common.node.serving.response_builder import EventStream, ResponseBuilder
from common.openai.protocol import parse_completion
from common.request import FinishReason
from common.server import stall
from common.server.gate import install_middleware
from tests.support.http_server import serving, wait_for

IN_MEMORY = HttpRequest({"type": "http", "headers": [], "state": {"request_id": "r"}})


class FakeChoice:
    """``num_looks``: how often somebody asked for its number of tokens."""

    num_reasoning_tokens = None

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.num_looks = self._num_tokens = 0

    @property
    def num_completion_tokens(self) -> int:
        self.num_looks += 1
        return self._num_tokens

    def add(self, output: RequestOutput) -> ChoiceDelta:
        self._num_tokens += 1
        self.finish_reason = output.finish_reason
        return ChoiceDelta(self.index, "a" * 1024, [1], None, output.finish_reason, None, False, True, [1])


def streaming(
    metrics: Metrics,
    script: Iterable[RequestOutput | BaseException],
    n: int = 1,
    http: HttpRequest = IN_MEMORY,
    choices: Sequence[FakeChoice] | None = None,
    **fields: Any,
) -> AsyncGenerator[bytes, None]:
    """The events of one prompt whose engine gives ``script``."""

    async def run(request: object, job: Any) -> AsyncGenerator[tuple[Any, RequestOutput], None]:
        for each in script:
            if isinstance(each, BaseException):
                raise each
            yield job, each
            await asyncio.sleep(0)

    result = SimpleNamespace(report=None, ready_s=None)
    job: Any = SimpleNamespace(
        index=0,
        request_id="r",
        token_ids=[1],
        num_resumed=0,
        choices=choices or [FakeChoice(index) for index in range(n)],
        handoff_result=result,
    )
    request = parse_completion({"prompt": [1], "stream": True, "n": n, **fields})
    record = RequestRecord(metrics, "completions")
    builder = ResponseBuilder("m", run, lambda request_id, fork: None, http, request, [job], None, record)
    return builder.events()


def output(index: int = 0, finish_reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("r", index, [1], finish_reason=finish_reason)


def counted(metrics: Metrics) -> list[str]:
    text = metrics.render()[0].decode()
    return [line.split('outcome="')[1].split('"')[0] for line in text.splitlines() if "requests_total{" in line]


STOP, LENGTH, ERROR = output(0, FinishReason.STOP), output(1, FinishReason.LENGTH), output(0, FinishReason.ERROR)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("script", "n", "outcome"),
    [
        ([output(), STOP], 1, "stop"),
        ([output(0, FinishReason.LENGTH)], 1, "length"),
        ([STOP, LENGTH], 2, "length"),
        ([output(), ERROR], 1, "error"),
        ([output(), TandemError("the engine failed on this request")], 1, "error"),
        ([output(), TransferError("lost")], 1, "error"),
        ([output(), RuntimeError("a bug")], 1, "error"),
        ([output(), QueueFullError("no memory")], 1, "capacity"),
    ],
)
async def test_stream_when_it_ends_then_is_counted_by_whose_fault(
    script: list[RequestOutput | Exception], n: int, outcome: str
) -> None:
    metrics = Metrics(Role.DECODE)
    events = [event async for event in streaming(metrics, script, n)]
    assert counted(metrics) == [outcome]
    if isinstance(script[-1], Exception):
        assert "error" in json.loads(events[-1].removeprefix(b"data: "))
        assert not any(b"[DONE]" in event for event in events)
    else:
        assert events[-1] == b"data: [DONE]\n\n"


@pytest.mark.asyncio
async def test_usage_when_each_event_tells_it_then_costs_the_same_for_any_number_of_answers() -> None:
    n = 50
    choices = [FakeChoice(index) for index in range(n)]
    script = [output(index, reason) for reason in (None, FinishReason.STOP) for index in range(n)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = streaming(Metrics(Role.DECODE), script, n, choices=choices, stream_options=options)
    *told, _ = [json.loads(event.removeprefix(b"data: ")) async for event in events if b"[DONE]" not in event]
    assert [event["usage"]["completion_tokens"] for event in told] == list(range(1, 2 * n + 1))
    assert sum(choice.num_looks for choice in choices) <= 3 * len(script)


@pytest.mark.asyncio
async def test_stream_when_its_reader_leaves_then_is_an_abort() -> None:
    metrics = Metrics(Role.DECODE)
    stream = streaming(metrics, [output(), STOP])
    await anext(stream)
    await stream.aclose()
    assert counted(metrics) == ["abort"]


@pytest.mark.asyncio
async def test_stream_when_its_task_is_cancelled_then_is_an_abort() -> None:
    metrics = Metrics(Role.DECODE)
    stream = streaming(metrics, [output(), asyncio.CancelledError()])
    await anext(stream)
    with pytest.raises(asyncio.CancelledError):
        await anext(stream)
    assert counted(metrics) == ["abort"]


def test_reader_when_it_stops_reading_then_is_disconnected_and_the_prompt_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node called directly, on real sockets."""
    monkeypatch.setattr(stall, "STALL_S", 0.5)
    metrics = Metrics(Role.DECODE)
    endless = itertools.repeat(output())

    async def serve(request: HttpRequest) -> Response:
        events = streaming(metrics, endless, http=request)
        return EventStream(await anext(events), events, {})

    app = Starlette(routes=[Route("/", serve)])
    install_middleware(app, max_body_bytes=100, api_keys=())
    with serving(app) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert sock.recv(12) == b"HTTP/1.1 200"
        wait_for(lambda: counted(metrics), "the stream to be given up")
        assert counted(metrics) == ["stall"]
