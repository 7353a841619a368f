"""The nodes this one may pull from: which are allowed, how to reach them, which have shaken hands.

A peer is known by its base URL. Its transfer announcement is fetched once per life of the peer (its epoch) and again
when the epoch differs or a read said that it is gone. Nothing of an announcement is used before fingerprints were
compared. From the handshake on its liveness is watched.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from common.config.values import is_loopback_host
from common.errors import (
    InvalidRequestError,
    PrefillLegAbortedError,
    PrefillLegFailedError,
    PrefillLegRejectedError,
    RequestAbortedError,
    TransferError,
)
from common.node.peers.liveness import Liveness
from common.node.peers.names import PeerNames
from common.telemetry.context import current_request_id
from common.transfer.regions import Peer
from common.wire.headers import CLUSTER_KEY_HEADER, LEG_FAILED, LEG_HEADER, REQUEST_ID_HEADER
from common.wire.json_text import dump_json
from common.wire.routes import TRANSFER_ROUTE

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 1.5
"""How long a peer has to answer a handshake: as long as it may be silent before it is suspect."""

CONNECT_TIMEOUT_S = 1.5
"""How long a connection for a query may take; its answer may take longer."""

OWN_CODES = ("unknown_pull", "fingerprint_mismatch")
"""Error codes of the pull route itself that a pull's failure keeps; all others become ``transfer_failed``."""


class Agents(Protocol):
    """What reads from peers: a ``TransferBackend``, or several."""

    def add_peer(self, metadata: bytes) -> Peer: ...


class PeerDirectory:
    """Used on the event loop only. ``close`` ends its connections."""

    def __init__(self, agents: Agents, allowed: Sequence[str], cluster_key: str | None) -> None:
        headers = {CLUSTER_KEY_HEADER: cluster_key} if cluster_key else {}
        # Connections are not limited: each long poll and each liveness stream keeps one.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(headers=headers, timeout=HANDSHAKE_TIMEOUT_S, limits=limits, trust_env=False)
        self.liveness = Liveness(self._http, self.forget)
        self._agents = agents
        self._allowed = frozenset(url.rstrip("/") for url in allowed)
        self.names = PeerNames(allowed)
        self._peers: dict[str, Peer] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._failures: dict[str, TransferError] = {}  # of the last handshake that failed

    async def close(self) -> None:
        await self.names.close()
        await self.liveness.close()
        await self._http.aclose()

    def check_allowed(self, url: str, *, is_from_peer: bool) -> None:
        """Raises InvalidRequestError: the address comes from a request, and this node calls and reads only its peers.

        Without configured peers only loopback addresses are accepted. Those, and hosts below a name of several peers,
        only from a caller that counts as a process of this service (``is_from_peer``): what this node asks there
        carries the cluster key.
        """
        if self._allowed:
            if url in self._allowed or url in self.names or (is_from_peer and self.names.have_below(url)):
                return
            raise InvalidRequestError(
                f"kv_transfer_params.remote_host/remote_port: {url} is not among the peers of this node (--peers)",
                param="kv_transfer_params.remote_host",
            )
        if not _is_loopback(url):
            raise InvalidRequestError(
                f"kv_transfer_params.remote_host/remote_port: {url} is not a loopback address and there are no --peers",
                param="kv_transfer_params.remote_host",
            )
        if not is_from_peer:
            raise InvalidRequestError(
                f"kv_transfer_params.remote_host/remote_port: {url}: without --peers of this node only a caller with "
                f"the header {CLUSTER_KEY_HEADER} may name an address",
                param="kv_transfer_params.remote_host",
            )

    async def meet(self, url: str) -> Peer:
        """The transfer peer behind ``url`` in whatever life it is; shakes hands when it is not known yet.

        Raises:
            TransferError: unreachable, silent, or of another model or layout.
        """
        self.liveness.check(url)
        return await self._known_or_new(url, None)

    async def connect(self, url: str, engine_id: str, epoch: int) -> Peer:
        """The transfer peer behind ``url`` in the life that made a manifest; shakes hands when it is not known yet.

        Raises:
            TransferError: unreachable, silent, another life or engine than the manifest's, another model or layout.
        """
        self.liveness.check(url)
        peer = self._peers.get(url)
        if peer is None or (peer.engine_id, peer.epoch) != (engine_id, epoch):
            peer = await self._known_or_new(url, (engine_id, epoch))
        if (peer.engine_id, peer.epoch) != (engine_id, epoch):
            raise TransferError(
                f"{url} is engine {peer.engine_id} in epoch {peer.epoch}, the manifest names {engine_id} in {epoch}",
                code="peer_restarted",
            )
        return peer

    def forget(self, url: str) -> None:
        """The next ``connect`` to it shakes hands again."""
        self._peers.pop(url, None)

    def forget_all(self) -> None:
        """This node's transfer agent is a new one: no peer is connected to it."""
        self._peers.clear()

    async def post(
        self, url: str, path: str, body: dict[str, Any], timeout_s: float, request_id: str | None = None
    ) -> dict[str, Any]:
        """POST to an internal route of a peer. ``request_id``: of the one request that it is for.

        Raises TransferError on anything but a JSON object with status 200.
        """
        try:
            headers = _headers(request_id)
            response = await self._http.post(url + path, json=body, headers=headers, timeout=timeout_s)
            response.raise_for_status()
            answer = response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
            raise TransferError(f"POST {url}{path}: {type(exc).__name__}: {exc}", code="peer_unreachable") from exc
        return answer if isinstance(answer, dict) else {}

    async def query(self, url: str, path: str, body: dict[str, Any] | bytes, timeout_s: float) -> dict[str, Any]:
        """POST a query for the request that the caller works for, which may be answered late; it is sent once more when
        the connection breaks under it. ``body``: an object, or its JSON, which callers make off the event loop where it
        may be long.

        Raises:
            TransferError: no answer, or another one than a JSON object with status 200.
            PrefillLegFailedError: the leg that the query is about has failed; PrefillLegRejectedError when its client
                should hear why, PrefillLegAbortedError when its caller left.
        """
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        headers = {**_headers(current_request_id()), "content-type": "application/json"}
        content = body if isinstance(body, bytes) else dump_json(body)
        for attempt in range(2):
            try:
                response = await self._http.post(url + path, content=content, headers=headers, timeout=timeout)
                break
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as exc:
                if attempt:
                    raise _unreachable(url, path, exc) from exc
            except (httpx.HTTPError, httpx.InvalidURL) as exc:
                raise _unreachable(url, path, exc) from exc
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code == 200 and isinstance(answer, dict):
            return answer
        raise _failure(url + path, response, answer)

    async def _known_or_new(self, url: str, life: tuple[str, int] | None) -> Peer:
        """The peer as it is known in ``life`` (None: in any), else after a handshake; there is one at a time.

        All that waited for a handshake fail with it: if each tried in turn, the last would wait for a silent peer as
        often as there are callers before it.
        """
        before = self._failures.get(url)
        async with self._locks.setdefault(url, asyncio.Lock()):
            peer = self._peers.get(url)
            if peer is not None and life in (None, (peer.engine_id, peer.epoch)):
                return peer
            failure = self._failures.get(url)
            if failure is not None and failure is not before:
                raise TransferError(failure.message, code=failure.code)
            try:
                return await self._shake_hands(url)
            except TransferError as exc:
                self._failures[url] = TransferError(exc.message, code=exc.code)  # without what its traceback keeps
                raise

    async def _shake_hands(self, url: str) -> Peer:
        try:
            response = await self._http.get(url + TRANSFER_ROUTE)
            response.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise TransferError(f"handshake with {url}: {type(exc).__name__}: {exc}", code="peer_unreachable") from exc
        try:
            peer = await asyncio.to_thread(self._agents.add_peer, response.content)
        except TransferError as exc:
            last = self._failures.get(url)
            if last is None or last.message != exc.message:  # not with each request that comes
                logger.warning("peer refused url=%s code=%s: %s", url, exc.code, exc.message)
            raise
        self._peers[url] = peer
        self.liveness.watch(url, peer.engine_id, peer.epoch)
        logger.info("peer connected url=%s engine_id=%s epoch=%d", url, peer.engine_id, peer.epoch)
        return peer


def _headers(request_id: str | None) -> dict[str, str]:
    return {} if request_id is None else {REQUEST_ID_HEADER: request_id}


def _unreachable(url: str, path: str, exc: Exception) -> TransferError:
    return TransferError(f"POST {url}{path}: {type(exc).__name__}: {exc}", code="peer_unreachable")


def _failure(where: str, response: httpx.Response, answer: object) -> TransferError:
    """What an answer with another status than 200 means."""
    status = response.status_code
    error = answer.get("error") if isinstance(answer, dict) else None
    error = error if isinstance(error, dict) else {}
    code, message = str(error.get("code") or ""), f"{where} answers {status} {error.get('message') or ''}".rstrip()
    if response.headers.get(LEG_HEADER) != LEG_FAILED:
        return TransferError(message, code=code if code in OWN_CODES else "transfer_failed")
    if status == RequestAbortedError.status:
        return PrefillLegAbortedError(message)
    if 400 <= status < 500:
        param = error.get("param")
        return PrefillLegRejectedError(
            str(error.get("message") or message),
            status=status,
            type=str(error.get("type")),
            code=code,
            param=param if isinstance(param, str) else None,
            retry_after_s=_retry_after_s(response),
        )
    return PrefillLegFailedError(message)


def _retry_after_s(response: httpx.Response) -> int:
    """A value that is no number of seconds, such as a date, counts as one second."""
    given = response.headers.get("retry-after", "")
    return int(given) if re.fullmatch(r"[0-9]{1,6}", given) else 1


def _is_loopback(url: str) -> bool:
    """False as well for what is no URL: the host comes from a request, and ``[`` or ``::1]`` break parsers."""
    try:
        httpx.URL(url)
        return is_loopback_host(urlsplit(url).hostname or "")
    except (httpx.InvalidURL, ValueError):
        return False
