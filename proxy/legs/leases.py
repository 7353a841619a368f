"""Leases on prefill nodes between two legs.

A prefill node pins a finished prompt until its lease is released or runs out. From the prefill leg's answer (or, when
both legs are sent at once, from its start: the lease will have the rendezvous' name) until the decode node has taken
over, the proxy owns the lease: every way out in between (client gone, decode node gone, another prompt of the request
refused) releases it. A decode node that fails afterwards, or that is left because the client was, may have ended before
it released what it was given: then the lease is the proxy's again. The lease of a stream that a node hands over is the
proxy's from when the node is asked to. Releasing is best effort: a lease that is not released ends by its own deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterator, Mapping

from common.telemetry.context import current_request_id
from common.wire.headers import REQUEST_ID_HEADER
from common.wire.resume import HandOver
from common.wire.routes import HAND_OVER_ROUTE, LEASE_RELEASE_ROUTE
from proxy.legs.bodies import encode
from proxy.node_http.errors import NodeClientError, describe
from proxy.nodes.node import Node

logger = logging.getLogger(__name__)

HAND_OVER_TIMEOUT_S = 5.0
"""Seconds for a node to end a stream, which it does between two steps."""
RELEASE_TIMEOUT_S = 2.0
"""Seconds for a node's answer to a release; a lease that is not released ends by its own deadline."""


class LeaseGuard:
    """The leases of one request."""

    def __init__(self) -> None:
        self._held: list[tuple[Node, str]] = []
        self._handed_over: list[tuple[Node, str]] = []
        self._taken_back: list[tuple[Node, str]] = []
        self.is_handed_over = False

    def hold(self, node: Node, lease_id: str) -> None:
        self._held.append((node, lease_id))

    def hand_over(self) -> None:
        """The decode node owns them from here on; what it was to read may be gone when it fails."""
        self.is_handed_over = True
        self._handed_over += self._held
        self._held.clear()

    def take_back(self) -> None:
        """The decode leg did not come to its end: whether the node has released them nobody knows, and releasing twice
        does no harm."""
        self._taken_back += self._handed_over
        self._handed_over.clear()

    def take(self) -> dict[tuple[Node, bool], list[str]]:
        """What is still held, by node, and whether a leg of these whose connection was closed may still be on its way
        into it: not of those that a decode node has answered to. Held no longer."""
        by_node: dict[tuple[Node, bool], list[str]] = {}
        for leases, may_come in ((self._held, True), (self._taken_back, False)):
            for node, lease_id in leases:
                by_node.setdefault((node, may_come), []).append(lease_id)
            leases.clear()
        return by_node


class LeaseReleaser:
    """Sends releases in the background, so that a cancelled request need not wait for them."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = {**headers, "content-type": "application/json"}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def guard(self) -> Iterator[LeaseGuard]:
        """Leases held at the end of the block, however it ends, are released."""
        guard = LeaseGuard()
        try:
            yield guard
        finally:
            self.release(guard)

    def release(self, guard: LeaseGuard) -> None:
        """``guard``: of the request that the caller works for."""
        headers = self._own_headers()
        for (node, may_come), lease_ids in guard.take().items():
            task = asyncio.create_task(self._send(node, lease_ids, headers, may_come=may_come))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def hand_over(self, node: Node, stream_id: str, leases: LeaseGuard) -> str | None:
        """Have ``node`` end a stream that it generates, and lease what it has of it: the lease's name, held in
        ``leases`` from now on. None: it does not say that it did."""
        lease_id = f"stream-{secrets.token_hex(16)}"
        leases.hold(node, lease_id)
        content, headers = encode(HandOver(stream_id, lease_id).to_body()), self._own_headers()
        try:
            answer = await node.client.request(
                "POST", HAND_OVER_ROUTE, content=content, headers=headers, timeout_s=HAND_OVER_TIMEOUT_S
            )
        except NodeClientError as exc:
            logger.warning("stream not handed over node=%s: %s", node.name, describe(exc))
            return None
        return lease_id if answer.status == 200 else None

    async def close(self) -> None:
        """Wait for releases that are in progress; each has its own deadline."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own_headers(self) -> Mapping[str, str]:
        """With the id of the request that the caller works for."""
        request_id = current_request_id()
        return self._headers if request_id is None else {**self._headers, REQUEST_ID_HEADER: request_id}

    async def _send(self, node: Node, lease_ids: list[str], headers: Mapping[str, str], *, may_come: bool) -> None:
        try:
            answer = await node.client.request(
                "POST",
                LEASE_RELEASE_ROUTE,
                content=encode({"lease_ids": lease_ids, "may_come": may_come}),
                headers=headers,
                timeout_s=RELEASE_TIMEOUT_S,
            )
            logger.info("leases released node=%s num=%d status=%d", node.name, len(lease_ids), answer.status)
        except NodeClientError as exc:
            logger.warning("leases left to expire node=%s num=%d: %s", node.name, len(lease_ids), describe(exc))
