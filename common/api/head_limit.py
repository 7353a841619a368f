"""A bound on the head of a request: what a client may send before anything has looked at it.

Two places, because of who holds it when. httptools keeps the headers of a request that has not ended them yet, without
a bound of its own: ``BoundedHttpTools`` counts bytes and hangs up. A head that came whole is refused by
the gate (``check_head``), with an answer like any other. h11, where httptools is not installed, has its own bound.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from starlette.types import Scope

from common.errors import HeadTooLargeError

if TYPE_CHECKING:
    import asyncio

MAX_HEAD_BYTES = 64 * 2**10
_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def check_head(scope: Scope) -> HeadTooLargeError | None:
    """The refusal of a head of more than ``MAX_HEAD_BYTES``: path, query, names and values."""
    num_bytes = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    num_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
    if num_bytes <= MAX_HEAD_BYTES:
        return None
    return HeadTooLargeError(f"the request's head must be at most {MAX_HEAD_BYTES} bytes, got {num_bytes}")


def http_protocol() -> type[asyncio.Protocol] | str:
    """What uvicorn is to speak HTTP with."""
    if importlib.util.find_spec("httptools") is None:
        return "h11"
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedHttpTools(HttpToolsProtocol):
        _head_bytes: int | None = 0
        """Of the head that is being received; None between a head's end and the next message."""

        def on_message_begin(self) -> None:
            self._head_bytes = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._head_bytes = None
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._head_bytes is None:
                return
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_REFUSAL)
                self.transport.close()

    return BoundedHttpTools
