"""What the clients of the benchmark make of an answer: each event with the time of its last byte, or an error."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest

from benchmarks.goodput.streaming import post_stream

PAUSE_S = 0.05
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def answer_to(*pieces: bytes) -> tuple[list[tuple[float, dict[str, Any]]], bytes, list[float]]:
    """What comes of these, a pause after each; the request that led to them; when they were sent."""
    sent: list[float] = []
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        requests.append(head + await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0])))
        for piece in pieces:
            sent.append(time.perf_counter())
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(PAUSE_S)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        events = await post_stream(f"http://127.0.0.1:{port}/v1/completions", {"n": 1}, {"x-target": "7"})
    return events, requests[0], sent


def test_an_event_has_the_time_of_its_last_byte() -> None:
    whole = (
        chunk(b'data: {"a": 1}\n\n')
        + chunk(b'data: {"b": 2}\n\n')
        + chunk(b": comment\n\ndata: [DONE]\n\n")
        + b"0\r\n\r\n"
    )
    begins_second = whole.index(b'"b"')
    events, request, sent = asyncio.run(answer_to(HEAD, whole[:begins_second], whole[begins_second:]))
    assert [event for _, event in events] == [{"a": 1}, {"b": 2}]
    assert request.startswith(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nx-target: 7\r\n" in request
    assert request.endswith(b'\r\n\r\n{"n": 1}')
    for (time_s, _), (sent_s, next_s) in zip(events, itertools.pairwise((*sent[1:], time.perf_counter())), strict=True):
        assert sent_s <= time_s < next_s


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ((b'HTTP/1.1 429 Too Many Requests\r\ncontent-length: 6\r\n\r\n{"e":1',), 'status 429: {"e":1'),
        ((HEAD, chunk(b'data: {"a": 1}\n\n')), "broke off"),
        ((HEAD[:20],), "broke off"),
        ((b"SSH-2.0-x\r\n\r\n",), "not HTTP"),
        ((), "broke off"),
    ],
)
def test_an_answer_that_is_none(pieces: tuple[bytes, ...], why: str) -> None:
    with pytest.raises(ConnectionError, match=why):
        asyncio.run(answer_to(*pieces))


def test_nobody_listens() -> None:
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        asyncio.run(post_stream("http://127.0.0.1:9/v1/completions", {}, {}))
