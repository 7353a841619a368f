"""A load generator that costs little itself: raw connections, requests made once, answers only looked at for their
end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

ANSWER_TIMEOUT_S = 120.0
END_OF_CHUNKS = b"0\r\n\r\n"


@dataclass(frozen=True)
class Leg:
    """One request, ready to be written, and where to."""

    port: int
    content: bytes


Steps = Sequence[Sequence[Leg]]
"""A user's request: legs of one step are sent together, the next step when all have their answer."""


def make_leg(port: int, route: str, body: bytes, headers: Sequence[str] = ()) -> Leg:
    """``headers``: further ones, a line each."""
    lines = ["host: 127.0.0.1", "content-type: application/json", *headers]
    head = f"POST {route} HTTP/1.1\r\n" + "".join(f"{line}\r\n" for line in lines)
    return Leg(port, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


def make_body(num_prompt_tokens: int, *, is_stream: bool = True) -> bytes:
    prompt = [index * 7 % 1000 for index in range(num_prompt_tokens)]
    return json.dumps({"model": "trivial", "prompt": prompt, "max_tokens": 32, "stream": is_stream}).encode()


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._answered: asyncio.Future[None] | None = None
        self._head = b""
        self._left: int | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError("closed before the answer's end"))

    def send(self, content: bytes) -> asyncio.Future[None]:
        self._head, self._left, self._tail = b"", None, b""
        self._answered = asyncio.get_running_loop().create_future()
        self.transport.write(content)
        return self._answered

    def data_received(self, data: bytes) -> None:
        assert self._answered is not None, "an answer without a request"
        if self._left is None and not self._tail:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self._answered.set_exception(ConnectionError(self._head[:300].decode(errors="replace")))
                return
            lines = head.lower().split(b"\r\n")
            self._left = next((int(line[15:]) for line in lines if line[:15] == b"content-length:"), None)
            self._tail = b"\n"
        if self._left is not None:
            self._left -= len(data)
            is_end = self._left <= 0
        else:
            self._tail = (self._tail + data)[-8:]
            is_end = self._tail.endswith(END_OF_CHUNKS)
        if is_end and not self._answered.done():
            self._answered.set_result(None)


class User:
    """Sends one request after the other, each leg on a connection of its own that is kept."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._connections: dict[Leg, _Connection] = {}

    async def ask(self) -> float:
        """One request; the seconds it took."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            for leg in {leg for step in self._steps for leg in step} - set(self._connections):
                loop = asyncio.get_running_loop()
                _, self._connections[leg] = await loop.create_connection(_Connection, "127.0.0.1", leg.port)
            started_s = time.perf_counter()
            for step in self._steps:
                for answer in [self._connections[leg].send(leg.content) for leg in step]:
                    await answer
            return time.perf_counter() - started_s

    def close(self) -> None:
        for connection in self._connections.values():
            connection.transport.close()


async def latencies(steps: Steps, num_requests: int) -> list[float]:
    """Seconds of each of ``num_requests``, one after the other."""
    user = User(steps)
    try:
        return [await user.ask() for _ in range(num_requests)]
    finally:
        user.close()


async def throughput(steps: Steps, num_users: int, seconds: float) -> tuple[float, int]:
    """Requests a second of ``num_users`` at once, and how many there were."""
    end_s = time.perf_counter() + seconds

    async def work(user: User) -> int:
        num_done = 0
        while time.perf_counter() < end_s:
            await user.ask()
            num_done += 1
        return num_done

    users = [User(steps) for _ in range(num_users)]
    started_s = time.perf_counter()
    try:
        num_requests = sum(await asyncio.gather(*(work(user) for user in users)))
    finally:
        for user in users:
            user.close()
    return num_requests / (time.perf_counter() - started_s), num_requests
