"""The trivial nodes behind the measured proxies: ``python -m benchmarks.proxy.upstream PREFILL_PORT DECODE_PORT``.

A prefill leg is answered at once with made-up ``kv_transfer_params``, every other generation request with a stream of
``--chunks``, one write per turn of the event loop, or in one piece when it asks for no stream. With ``--pull`` the
nodes say that both legs may be sent at once, as ours do. ``--pause``: seconds between chunks, to keep streams open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from functools import partial
from typing import cast

import uvloop

NUM_CHUNKS = 32
"""Chunks of a stream, unless told otherwise."""
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def make_chunk(index: int) -> bytes:
    choice = {"index": 0, "text": f" word{index}", "logprobs": None, "finish_reason": None, "stop_reason": None}
    event = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1_700_000_000, "model": "trivial"}
    data = f"data: {json.dumps({**event, 'choices': [choice]})}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST_CHUNK = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def make_answer(body: object, status: bytes = b"200 OK") -> bytes:
    content = json.dumps(body).encode()
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(content))
    return head + content


PREFILLED = make_answer(
    {
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "prefill",
            "remote_block_ids": [list(range(64))],
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tandem_lease_id": "lease",
        }
    }
)


WHOLE = make_answer(
    {
        "id": "cmpl-0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "trivial",
        "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {"prompt_tokens": 256, "completion_tokens": 1, "total_tokens": 257},
    }
)


class Node(asyncio.Protocol):
    """One connection. Requests come one after the other and are small."""

    def __init__(self, info: bytes, chunks: list[bytes], pause_s: float) -> None:
        self._info = info
        self._chunks = chunks
        self._pause_s = pause_s
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0)
        if len(body) < length:
            return
        self._buffer = b""
        if head.startswith(b"GET /internal/v1/info"):
            self._transport.write(self._info)
        elif head.startswith(b"GET /internal"):
            self._transport.write(make_answer({}, b"404 Not Found"))
        elif head.startswith(b"GET") or b"/leases/" in head[:60]:
            self._transport.write(make_answer({}))
        elif b'"do_remote_decode":true' in (compact := body.replace(b" ", b"")):
            self._transport.write(PREFILLED)
        elif b'"stream":true' not in compact:
            self._transport.write(WHOLE)
        else:
            self._transport.write(STREAM_HEAD)
            self._loop.call_soon(self._stream, 0)

    def _stream(self, index: int) -> None:
        if index == len(self._chunks):
            self._transport.write(LAST_CHUNK)
            return
        self._transport.write(self._chunks[index])
        if self._pause_s:
            self._loop.call_later(self._pause_s, self._stream, index + 1)
        else:
            self._loop.call_soon(self._stream, index + 1)


async def serve(ports: dict[str, int], pull: bool, num_chunks: int, pause_s: float) -> None:
    loop = asyncio.get_running_loop()
    chunks = [make_chunk(index) for index in range(num_chunks)]
    for name, port in ports.items():
        info = {"node_name": name, "served_model_name": "trivial", "max_model_len": 4096, "fingerprint": "trivial"}
        if pull:
            info |= {"pull": True, "host": "127.0.0.1", "port": port, "epoch": "1"}
        await loop.create_server(partial(Node, make_answer(info), chunks, pause_s), "127.0.0.1", port, backlog=2048)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prefill_port", type=int)
    parser.add_argument("decode_port", type=int)
    parser.add_argument("--pull", action="store_true")
    parser.add_argument("--chunks", type=int, default=NUM_CHUNKS)
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    uvloop.run(serve({"prefill": args.prefill_port, "decode": args.decode_port}, args.pull, args.chunks, args.pause))


if __name__ == "__main__":
    main()
