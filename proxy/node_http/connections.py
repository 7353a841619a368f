"""The connections of one node's client: idle ones to take, new ones to make.

An idle connection is taken again for ``KEEP_ALIVE_S``; there is no bound on how many are open, for a request never
waits for another one's connection.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.parse
from typing import Any

import aiohappyeyeballs

from common.config.dns import SystemResolver
from proxy.node_http.connection import NodeConnection
from proxy.node_http.deadlines import ConnectDeadline, Deadlines
from proxy.node_http.errors import NodeBrokenError, NodeRefusedError

KEEP_ALIVE_S = 4.0
"""Seconds that an idle connection may be taken again: less than the 5 s after which a plain uvicorn closes it."""
DNS_CACHE_S = 5.0
"""Seconds that a resolved name is used again."""
LATE_SHARE = 0.25
"""Of the connect timeout: a lookup that takes longer leaves the addresses that are known, as one that fails does."""
NEXT_ADDRESS_S = 0.25
"""Seconds after which the name's next address is tried beside one that does not answer (RFC 8305)."""


class NodeConnections:
    """To the node at ``url``. Made anywhere, used and closed on one event loop."""

    def __init__(self, url: str, deadlines: Deadlines, *, connect_timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host = parts.hostname or ""
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (80 if self._ssl is None else 443)
        self._deadlines = deadlines
        self._connect_timeout_s = connect_timeout_s
        self._resolver = SystemResolver()
        self._addresses: list[Any] = []
        self._resolved_s = float("-inf")
        self._open: set[NodeConnection] = set()
        self._idle: dict[NodeConnection, float] = {}  # since when; the first one longest ago
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False

    def take(self) -> NodeConnection | None:
        """The idle connection that was used last; None: there is none."""
        oldest_s = asyncio.get_running_loop().time() - KEEP_ALIVE_S
        while self._idle:
            connection, since_s = self._idle.popitem()
            if since_s > oldest_s and connection.is_reusable:
                return connection
            connection.abort()
        return None

    def leave(self, connection: NodeConnection) -> None:
        """The request is over. A connection whose answer was not read to its end is closed."""
        connection.deadline.end()
        if not connection.is_reusable or self._is_closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        self._idle[connection] = loop.time()
        if self._sweeper is None:
            self._sweeper = loop.call_later(KEEP_ALIVE_S, self._sweep)

    async def connect(self, timeout_s: float) -> NodeConnection:
        """A new connection.

        Raises:
            NodeRefusedError: there is none within the connect timeout.
            TimeoutError, NodeSilentError: nor within ``timeout_s``; the node was given up.
        """
        self._check_open()
        try:
            async with ConnectDeadline(min(timeout_s, self._connect_timeout_s), self._deadlines):
                connection = await self._connect()
        except (OSError, UnicodeError) as exc:  # TimeoutError is one
            if isinstance(exc, TimeoutError) and timeout_s < self._connect_timeout_s:
                raise
            text = str(exc) or f"no connection within {self._connect_timeout_s:g} s"
            raise NodeRefusedError(f"cannot connect to {self._host}:{self._port}: {text}") from exc
        if self._is_closed:  # meanwhile
            connection.abort()
        self._check_open()
        self._open.add(connection)
        self._deadlines.add(connection.deadline)
        return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise NodeBrokenError("the client is closed")

    async def _connect(self) -> NodeConnection:
        loop = asyncio.get_running_loop()
        if loop.time() - self._resolved_s > DNS_CACHE_S:
            await self._resolve()
            self._resolved_s = loop.time()
        sock = await aiohappyeyeballs.start_connection(self._addresses, happy_eyeballs_delay=NEXT_ADDRESS_S)
        try:
            _, connection = await loop.create_connection(
                lambda: NodeConnection(self._on_lost, self._deadlines),
                sock=sock,
                ssl=self._ssl,
                server_hostname=None if self._ssl is None else self._host,
            )
        except BaseException:
            sock.close()
            raise
        return connection

    async def _resolve(self) -> None:
        """Raises OSError only where no address is known: DNS that is down must not part us from a node that works."""
        try:
            async with asyncio.timeout(LATE_SHARE * self._connect_timeout_s if self._addresses else None):
                self._addresses = await self._resolver.look_up(self._host, self._port)
        except OSError:  # TimeoutError is one
            if not self._addresses:
                raise

    async def close(self) -> None:
        """End all connections, and what waits for them. None can be made again."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._open):
            connection.fail(NodeBrokenError("the client is closed"))
            connection.abort()

    def _on_lost(self, connection: NodeConnection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._deadlines.discard(connection.deadline)

    def _sweep(self) -> None:
        """Close what was idle for too long."""
        self._sweeper = None
        loop = asyncio.get_running_loop()
        for connection, since_s in list(self._idle.items()):
            if since_s > loop.time() - KEEP_ALIVE_S:
                self._sweeper = loop.call_at(since_s + KEEP_ALIVE_S, self._sweep)
                return
            del self._idle[connection]
            connection.abort()
