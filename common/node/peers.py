"""The nodes this one may pull from: who is allowed, how to reach them, what was shaken hands on.

A peer is known by its base URL. Its transfer announcement is fetched once per life of the peer (its epoch) and again
when the epoch differs or a read said that it is gone. Nothing of an announcement is used before fingerprints were
compared.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from common.errors import InvalidRequestError, TransferError
from common.transfer.backend import Peer, TransferBackend

logger = logging.getLogger(__name__)

CLUSTER_KEY_HEADER = "X-Tandem-Cluster-Key"
HANDSHAKE_TIMEOUT_S = 5.0


class PeerDirectory:
    """Lives on the event loop. ``close`` ends its connections."""

    def __init__(self, backend: TransferBackend, allowed: Sequence[str], cluster_key: str | None) -> None:
        headers = {CLUSTER_KEY_HEADER: cluster_key} if cluster_key else {}
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
        self._http = httpx.AsyncClient(headers=headers, timeout=HANDSHAKE_TIMEOUT_S, limits=limits, trust_env=False)
        self._backend = backend
        self._allowed = frozenset(url.rstrip("/") for url in allowed)
        self._peers: dict[str, Peer] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def close(self) -> None:
        await self._http.aclose()

    def check_allowed(self, url: str) -> None:
        """Raises InvalidRequestError: the address comes from a request, and this node calls and reads only its peers.

        Without configured peers only loopback addresses are accepted.
        """
        if self._allowed:
            if url in self._allowed:
                return
            raise InvalidRequestError(
                f"kv_transfer_params.remote_host/remote_port: {url} is not among the peers of this node (--peers)",
                param="kv_transfer_params.remote_host",
            )
        if not _is_loopback(urlsplit(url).hostname or ""):
            raise InvalidRequestError(
                f"kv_transfer_params.remote_host/remote_port: {url} is not a loopback address and there are no --peers",
                param="kv_transfer_params.remote_host",
            )

    async def connect(self, url: str, engine_id: str, epoch: int) -> Peer:
        """The transfer peer behind ``url`` in the life that made a manifest; shakes hands when it is not known yet.

        Raises:
            TransferError: unreachable, another life or engine than the manifest's, another model or layout.
        """
        peer = self._peers.get(url)
        if peer is None or (peer.engine_id, peer.epoch) != (engine_id, epoch):
            async with self._locks.setdefault(url, asyncio.Lock()):
                peer = self._peers.get(url)
                if peer is None or (peer.engine_id, peer.epoch) != (engine_id, epoch):
                    peer = await self._shake_hands(url)
        if (peer.engine_id, peer.epoch) != (engine_id, epoch):
            raise TransferError(
                f"{url} is engine {peer.engine_id} in epoch {peer.epoch}, the manifest names {engine_id} in {epoch}",
                code="peer_restarted",
            )
        return peer

    def forget(self, url: str) -> None:
        """The next ``connect`` shakes hands again."""
        self._peers.pop(url, None)

    async def post(self, url: str, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """POST to an internal route of a peer. Raises TransferError on anything but a JSON object with status 200."""
        try:
            response = await self._http.post(url + path, json=body, timeout=timeout_s)
            response.raise_for_status()
            answer = response.json()
        except (httpx.HTTPError, ValueError) as exc:
            raise TransferError(f"POST {url}{path}: {type(exc).__name__}: {exc}", code="peer_unreachable") from exc
        return answer if isinstance(answer, dict) else {}

    async def _shake_hands(self, url: str) -> Peer:
        try:
            response = await self._http.get(url + "/internal/v1/transfer")
            response.raise_for_status()
        except httpx.HTTPError as exc:
            raise TransferError(f"handshake with {url}: {type(exc).__name__}: {exc}", code="peer_unreachable") from exc
        peer = await asyncio.to_thread(self._backend.add_peer, response.content)
        self._peers[url] = peer
        logger.info("peer connected url=%s engine_id=%s epoch=%d", url, peer.engine_id, peer.epoch)
        return peer


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
