"""A node below HTTP: looks ready, and answers generation requests with whatever bytes the test puts there."""

from __future__ import annotations

import socket
import struct
import threading
import time
from typing import Any

from common.openai.responses import SSE_DONE

READY = b'{"status":"ready"}'
INFO = b'{"node_name":"raw","served_model_name":"fake","max_model_len":128,"fingerprint":"f00d"}'


def answer(body: bytes, *, status: str = "200 OK", kind: str = "application/json", length: int | None = None) -> bytes:
    """A whole answer; ``length`` other than the body's is a lie."""
    num_bytes = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {num_bytes}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def chunked(*chunks: bytes, is_whole: bool = True, kind: str = "text/event-stream") -> bytes:
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n".encode()
    )
    body = b"".join(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in chunks)
    return head + body + (b"0\r\n\r\n" if is_whole else b"")


GOOD_WHOLE = answer(b'{"node":"raw","object":"text_completion","kv_transfer_params":{"remote_host":"raw"}}')
GOOD_STREAM = chunked(b'data: {"node":"raw"}\n\n', SSE_DONE)

NO_ANSWERS: dict[str, bytes] = {
    "nothing": b"",
    "not HTTP": b"\x16\x03\x01\x02\x00 what?\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-ty",
    "a bad length": b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n{}",
    "cut off": answer(b'{"node":', length=500),
    "a bad chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n{}",
    "an empty body": answer(b""),
    "no JSON": answer(b"<html>oops</html>", kind="text/html"),
    "a list": answer(b"[1,2]"),
    "a redirect": answer(b"", status="302 Found"),
    "a 500 in HTML": answer(b"<html>oops</html>", status="500 Internal Server Error", kind="text/html"),
    "an empty stream": chunked(),
    "a cut stream": chunked(is_whole=False),
}
"""What is no answer to any request."""


class RawNode:
    """Ends with ``close``. ``num_legs`` counts generation requests. ``resets``: the connection is broken, not closed,
    after ``content``; ``lingers``: it is left as it is."""

    def __init__(self, info: bytes = INFO) -> None:
        self.content = b""
        self.resets = self.lingers = False
        self._info = info
        self.num_legs = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            try:
                path = self._read_request(connection)
                is_leg = path.startswith(b"/v1/")
                connection.sendall(self._answer(path))
                if is_leg and self.resets:
                    time.sleep(0.02)  # a reset takes what was sent and not read with it
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                if not (is_leg and self.lingers):
                    connection.shutdown(socket.SHUT_WR)
                connection.recv(1)
            except OSError:
                return

    def _answer(self, path: bytes) -> bytes:
        if path == b"/ready":
            return answer(READY)
        if path == b"/internal/v1/info":
            return answer(self._info)
        if (document := self._document(path)) is not None:
            return answer(document)
        self.num_legs += 1
        return self.content

    def _document(self, path: bytes) -> bytes | None:
        """What else it has, for tests' own nodes."""
        return None

    @staticmethod
    def _read_request(connection: socket.socket) -> bytes:
        raw = b""
        while b"\r\n\r\n" not in raw:
            piece = connection.recv(65536)
            if not piece:
                raise OSError("closed")
            raw += piece
        head, _, body = raw.partition(b"\r\n\r\n")
        fields: dict[str, Any] = dict(
            line.decode().lower().split(": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line
        )
        while len(body) < int(fields.get("content-length", 0)):
            body += connection.recv(65536)
        return head.split(b" ", 2)[1]
