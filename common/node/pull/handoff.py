"""What a decode leg brings along of a prefill leg: from ``kv_transfer_params`` to something the engine can pull.

A manifest: 1 check it, 2 is its holder a peer of this node, 3 connect to the holder in the life that made it, 4 ask the
holder whether it is as it was made (while it is read: whoever sends a request could have written it, and its output row
would be sampled from, and kept for others), 5 hold the lease (renewed from here on). One that is not read after all is
given back: 4, 5, and its lease is released. A rendezvous: 1 is it a peer, 2 poll it for what is finished, 3 when the
whole prompt is here already, call its leg off; else wait until it is begun: a prompt that queues at the prefill node
holds no memory here, and one that is finished does not wait for memory, or a step, before it is read. Then the engine
pulls; everything is given up as soon as the pull has ended, and on every way out. Leaves by: a prefix to pull, nothing
(recompute, or all of it is here), an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PrefillLegAbortedError,
    PrefillLegRejectedError,
    TransferError,
)
from common.images.span import ImageSpan
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import KVCacheManager
from common.metrics.metrics import Metrics
from common.models.loading.loader import LoadedModel
from common.node.engine_thread import EngineThread
from common.node.peers.directory import HANDSHAKE_TIMEOUT_S, PeerDirectory
from common.node.pull.manifest_stream import (
    OWN_ABORT_WAIT_S,
    ROW_PARAM,
    FixedManifestStream,
    ManifestStream,
    ReadablePrefix,
    RendezvousManifestStream,
)
from common.node.pull.metrics import UNPROVEN_CODE, failure_label
from common.node.pull.pull_task import RemotePrefix
from common.node.pull.remote_leases import RemoteLeases
from common.transfer.codes import TransferCode
from common.transfer.jobs import PullReason
from common.wire.handoff import Rendezvous
from common.wire.manifest import Manifest, ManifestShape, PartialManifest, PrefillReport
from common.wire.pull import ManifestCheck, read_check_answer
from common.wire.routes import MANIFEST_CHECK_ROUTE

logger = logging.getLogger(__name__)

CHECKS_AT_ONCE = 32
"""Manifests that their holders are asked about at a time: a request may bring 2,048, and what a connection costs grows
with those that are open."""

Handoff = Manifest | Rendezvous
"""A finished prompt's manifest (carried by any proxy), or the name under which a peer computes it right now."""


@dataclass(frozen=True, slots=True)
class HandoffResult:
    """What a handoff came to.

    ``prefix``: to be pulled; None: nothing is. ``is_lost``: nothing is pulled because the prefix cannot be had, not
    because all of it is here. ``known_report``: what is known of the prefill leg without pulling.
    """

    prefix: RemotePrefix | None = None
    is_lost: bool = False
    known_report: PrefillReport | None = None

    @property
    def report(self) -> PrefillReport | None:
        """What the prefill leg did; None: it never said."""
        final = self.prefix.manifests.final if self.prefix is not None else None
        return self.known_report if final is None else final.report

    @property
    def ready_s(self) -> float | None:
        """When this node heard that the prefill leg had finished the prompt, on ``time.monotonic``; None: it never
        did."""
        final = self.prefix.manifests.final if self.prefix is not None else None
        return None if final is None else final.known_s

    @property
    def is_remote(self) -> bool:
        """Whether a prefill leg finished this prompt, or would have had nothing to do."""
        return self.known_report is not None or (self.prefix is not None and self.prefix.manifests.final is not None)


class HandoffReader:
    """How a node pulls what a prefill leg computed. ``fingerprint``: of this node's model and layout, which the
    holder's must equal. ``fails_when_lost``: whether a prefix that cannot be had is an error
    (``--kv-load-failure-policy fail``) and not recomputed."""

    def __init__(
        self,
        *,
        manager: KVCacheManager,
        engine: EngineThread,
        peers: PeerDirectory,
        leases: RemoteLeases,
        loaded: LoadedModel,
        metrics: Metrics,
        fingerprint: str,
        fails_when_lost: bool,
    ) -> None:
        self._manager = manager
        self._engine = engine
        self._peers = peers
        self._leases = leases
        self._loaded = loaded
        self._metrics = metrics
        self._fingerprint = fingerprint
        self._fails_when_lost = fails_when_lost
        self._checking = asyncio.Semaphore(CHECKS_AT_ONCE)
        geometry = manager.config.geometry
        self._shape = ManifestShape(
            num_block_groups=len(geometry.attention_groups),
            has_state=bool(geometry.state_layers),
            vocab_size=geometry.vocab_size,
        )

    def parse(self, params: Mapping[str, Any], *, is_from_peer: bool) -> Handoff:
        """Raises InvalidRequestError naming the key that is missing, malformed or does not fit this node's model, or an
        address that this caller may not name."""
        handoff = Rendezvous.from_params(params) or Manifest.from_params(params, self._shape)
        self._peers.check_allowed(_url_of(handoff), is_from_peer=is_from_peer)
        return handoff

    @contextlib.asynccontextmanager
    async def read(
        self, handoff: Handoff, token_ids: Sequence[int], cache_salt: str | None, images: Sequence[ImageSpan] = ()
    ) -> AsyncIterator[HandoffResult]:
        """Holds what the peer has of this prompt while the block runs, or until its pull has ended.

        Raises:
            InvalidRequestError: a manifest is of another model or layout.
            PrefillLegRejectedError: the prefill node refuses the prompt for a reason that is the client's to hear.
            TransferError: it cannot be used and the policy is to fail.
        """
        url = _url_of(handoff)
        keys = self._manager.prefix_keys(token_ids, cache_salt, images=images)
        manifests: ManifestStream
        if isinstance(handoff, Manifest):
            try:
                self._check_compatible(handoff)
                manifests = fixed = self._fixed_stream(handoff)
            except InvalidRequestError:
                self.give_back(handoff)
                raise
            read = partial(self._read_manifest, handoff, url, keys, fixed)
        else:
            manifests = stream = self._rendezvous_stream(handoff, url, keys)
            read = partial(self._read_rendezvous, handoff, url, keys, stream)
        try:
            try:
                # 128,000 tokens are hashed in 16 ms, in which no stream would get a token.
                await asyncio.to_thread(keys.key_at, keys.num_tokens)
                result = await read()
            except PrefillLegRejectedError:
                raise
            except TransferError as exc:
                if isinstance(exc, PrefillLegAbortedError):
                    await asyncio.sleep(OWN_ABORT_WAIT_S)
                result = self._lose(exc)
                manifests.close()
            yield result
        finally:
            manifests.close()

    def give_back(self, handoff: Handoff) -> None:
        """Nobody will read it. A manifest's lease is released, once its holder has said that the manifest is its own; a
        leg that is followed ends with whoever sent it. Does not wait."""
        if isinstance(handoff, Manifest):
            self._leases.give_back(handoff.lease_id, partial(self._check_with_holder, handoff, _url_of(handoff)))

    def _lose(self, error: TransferError) -> HandoffResult:
        """The prefix cannot be had. Raises TransferError, with one code for all reasons, when the policy is to fail."""
        self._metrics.transfer_failed(failure_label(error.code))
        logger.warning("handoff unusable: %s", error.message)
        if self._fails_when_lost:
            raise TransferError(f"the prompt could not be had from its prefill node: {error.message}") from error
        return HandoffResult(is_lost=True)

    # --- a finished prompt

    def _fixed_stream(self, manifest: Manifest) -> FixedManifestStream:
        """Its lease is not held yet. Raises InvalidRequestError when the output row is missing or not one of this
        model."""
        if manifest.output_row is None:
            raise InvalidRequestError(f"{ROW_PARAM} is missing", param=ROW_PARAM)
        prefix = ReadablePrefix.of(manifest, self._loaded)
        return FixedManifestStream(prefix, self._leases, manifest.lease_id, partial(self.give_back, manifest))

    async def _read_manifest(
        self, manifest: Manifest, url: str, keys: PrefixKeys, manifests: FixedManifestStream
    ) -> HandoffResult:
        await self._peers.connect(url, manifest.engine_id, manifest.epoch)
        manifests.confirm(self._check_with_holder(manifest, url))
        prefix = RemotePrefix(
            url=url,
            lease_id=manifest.lease_id,
            prefix_key=manifest.prefix_key,
            num_tokens=manifest.num_tokens,
            keys=keys,
            manifests=manifests,
        )
        return HandoffResult(prefix)

    async def _check_with_holder(self, manifest: Manifest, url: str) -> None:
        """From here on the lease is held. Raises TransferError when ``url`` did not make this manifest, or not like
        this, or does not say."""
        assert manifest.proof is not None
        async with self._checking:
            check = ManifestCheck(await asyncio.to_thread(manifest.digest), manifest.proof)
            answer = await self._peers.query(url, MANIFEST_CHECK_ROUTE, check.to_body(), HANDSHAKE_TIMEOUT_S)
        if not read_check_answer(answer):
            raise TransferError(f"{url} did not make this manifest, or not like this", code=UNPROVEN_CODE)
        self._leases.hold(manifest.lease_id, url, manifest.lease_seconds)

    def _check_compatible(self, manifest: Manifest | PartialManifest) -> None:
        block_size = self._manager.config.block_size
        if manifest.block_size != block_size:
            raise InvalidRequestError(
                f"kv_transfer_params.tandem_block_size {manifest.block_size} differs from this node's --block-size "
                f"{block_size}",
                param="kv_transfer_params.tandem_block_size",
            )
        if manifest.fingerprint != self._fingerprint:
            raise InvalidRequestError(
                f"kv_transfer_params.tandem_fingerprint {manifest.fingerprint} is of another model or layout than this "
                f"node's {self._fingerprint}",
                param="kv_transfer_params.tandem_fingerprint",
            )

    # --- a prompt that is being computed

    def _rendezvous_stream(self, rendezvous: Rendezvous, url: str, keys: PrefixKeys) -> RendezvousManifestStream:
        num_tokens = keys.num_tokens  # hashed by the time that anything is read

        def read(manifest: Manifest | PartialManifest) -> ReadablePrefix:
            try:
                self._check_compatible(manifest)
            except InvalidRequestError as exc:
                raise TransferError(f"{url}: {exc.message}", code=TransferCode.FINGERPRINT_MISMATCH) from exc
            if isinstance(manifest, Manifest) and manifest.prefix_key != keys.key_at(num_tokens):
                raise TransferError(
                    f"{url} computed another prompt of {manifest.num_tokens} tokens than this one of {num_tokens}",
                    code=PullReason.WRONG_CONTENT,
                )
            if manifest.num_tokens > num_tokens:
                raise TransferError(
                    f"{url} has {manifest.num_tokens} tokens of a prompt of {num_tokens}",
                    code=PullReason.WRONG_CONTENT,
                )
            return ReadablePrefix.of(manifest, self._loaded)

        return RendezvousManifestStream(self._peers, self._leases, url, rendezvous.rendezvous_id, self._shape, read)

    async def _read_rendezvous(
        self, rendezvous: Rendezvous, url: str, keys: PrefixKeys, manifests: RendezvousManifestStream
    ) -> HandoffResult:
        num_tokens = keys.num_tokens
        first = asyncio.create_task(self._first_part(url, manifests))
        try:
            if await self._is_here(keys):
                manifests.close()
                return HandoffResult(known_report=PrefillReport("", cached_tokens=num_tokens, computed_tokens=0))
            await first
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        prefix = RemotePrefix(
            url=url,
            lease_id=rendezvous.rendezvous_id,
            prefix_key=keys.key_at(num_tokens),
            num_tokens=num_tokens,
            keys=keys,
            manifests=manifests,
        )
        return HandoffResult(prefix)

    async def _is_here(self, keys: PrefixKeys) -> bool:
        """Whether all of the prompt is known to be."""
        num_tokens = keys.num_tokens
        try:
            # Costs nothing: the request would wait for the running step anyway, and the poll goes on meanwhile.
            hit = await self._engine.call(lambda: self._manager.lookup(keys, num_tokens))
        except DeadlineExceededError:  # in a long step
            return False
        return hit.num_tokens == num_tokens and hit.output_row is not None

    async def _first_part(self, url: str, manifests: RendezvousManifestStream) -> None:
        """Returns when the prompt is being computed. That may take as long as it queues, so the wait has no deadline of
        its own: it ends with the leg, which its caller's patience (--prefill-timeout-seconds) bounds, with the peer's
        beats, or with our own caller."""
        await self._peers.meet(url)
        manifests.start()
        prefix = await manifests.beyond(-1)
        await self._peers.connect(url, prefix.engine_id, prefix.epoch)


def _url_of(handoff: Handoff) -> str:
    host = f"[{handoff.host}]" if ":" in handoff.host else handoff.host
    return f"http://{host}:{handoff.port}"
