"""Taking in a prompt that a peer computed or is computing: from ``kv_transfer_params`` to something the engine can
pull.

A manifest: 1 check it, 2 is its holder a peer of this node, 3 hold the lease (renewed from here on), 4 connect to the
holder in the life that made it. A rendezvous: 1 is it a peer, 2 ask it again and again what is finished, 3 when the
whole prompt is here already, call its leg off; else wait for the first part, so that a prompt that queues at the
prefill node holds no memory here. Then the engine pulls; everything is given up as soon as the pull has ended, and on
every way out. Leaves by: a prefix to pull, nothing (recompute, or all of it is here), an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from common.errors import InvalidRequestError, PrefillLegAbortedError, PrefillLegRejectedError, TransferError
from common.kv_cache.keys import PrefixKeys
from common.node.node import Node
from common.node.pull.handoff import Handover, Taken
from common.node.pull.manifest_stream import OWN_ABORT_WAIT_S, ROW_PARAM, FixedOffers, Offer, Offers, RendezvousOffers
from common.node.pull.pull_task import RemotePrefix
from common.node.serving.metrics import failure_label
from common.transfer.codes import TransferCode
from common.transfer.jobs import PullReason
from common.wire.handoff import Rendezvous
from common.wire.manifest import Manifest, ManifestShape, PartialManifest, PrefillReport

logger = logging.getLogger(__name__)


class Intake:
    """``common.node.pull.handoff.Intake`` of a decode node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        geometry = node.model.cache_config.geometry
        self._shape = ManifestShape(
            num_block_groups=len(geometry.attention_groups),
            has_state=bool(geometry.state_layers),
            vocab_size=geometry.vocab_size,
        )

    def parse(self, params: Mapping[str, Any]) -> Handover:
        """Raises InvalidRequestError naming the key that is missing, malformed or does not fit this node's model."""
        return Rendezvous.from_params(params) or Manifest.from_params(params, self._shape)

    @contextlib.asynccontextmanager
    async def take(self, handover: Handover, token_ids: Sequence[int], cache_salt: str | None) -> AsyncIterator[Taken]:
        """Holds what the peer has of this prompt while the block runs, or until its pull has ended.

        Raises:
            InvalidRequestError: the holder is not an allowed peer, or a manifest is of another model or layout.
            PrefillLegRejectedError: the prefill node refuses the prompt for a reason that is the client's to hear.
            TransferError: it cannot be used and the policy is to fail.
        """
        host = f"[{handover.host}]" if ":" in handover.host else handover.host
        url = f"http://{host}:{handover.port}"
        self._node.peers.check_allowed(url)
        keys = self._node.model.manager.prefix_keys(token_ids, cache_salt)
        if isinstance(handover, Manifest):
            self._check_compatible(handover)
            offers = self._fixed_offers(handover, url)
            taking = self._take_manifest(handover, url, keys, offers)
            known_report = handover.prefill
        else:
            offers = self._rendezvous_offers(handover, url, keys)
            taking = self._take_rendezvous(handover, url, keys, offers)
            known_report = None
        try:
            try:
                taken = await taking
            except PrefillLegRejectedError:
                raise
            except TransferError as exc:
                if isinstance(exc, PrefillLegAbortedError):
                    await asyncio.sleep(OWN_ABORT_WAIT_S)
                taken = self._lose(exc, known_report)
                offers.close()
            yield taken
        finally:
            offers.close()

    def _lose(self, error: TransferError, known_report: PrefillReport | None) -> Taken:
        """The prefix cannot be had. Raises TransferError, with one code for all reasons, when the policy is to fail."""
        node = self._node
        node.metrics.transfer_failed(failure_label(error.code))
        logger.warning("handoff unusable: %s", error.message)
        if node.config.kv_load_failure_policy == "fail":
            raise TransferError(f"the prompt could not be had from its prefill node: {error.message}") from error
        return Taken(is_lost=True, known_report=known_report)

    # --- a finished prompt

    def _fixed_offers(self, manifest: Manifest, url: str) -> FixedOffers:
        """Raises InvalidRequestError when the output row is missing or not one of this model."""
        node = self._node
        if manifest.output_row is None:
            raise InvalidRequestError(f"{ROW_PARAM} is missing", param=ROW_PARAM)
        offer = Offer.of(manifest, node.model.loaded)
        node.remote_leases.hold(manifest.lease_id, url, manifest.lease_seconds)
        return FixedOffers(offer, node.remote_leases, manifest.lease_id)

    async def _take_manifest(self, manifest: Manifest, url: str, keys: PrefixKeys, offers: Offers) -> Taken:
        await self._node.peers.connect(url, manifest.engine_id, manifest.epoch)
        prefix = RemotePrefix(
            url=url,
            lease_id=manifest.lease_id,
            prefix_key=manifest.prefix_key,
            num_tokens=manifest.num_tokens,
            keys=keys,
            offers=offers,
        )
        return Taken(prefix, known_report=manifest.prefill)

    def _check_compatible(self, manifest: Manifest | PartialManifest) -> None:
        block_size = self._node.model.cache_config.block_size
        if manifest.block_size != block_size:
            raise InvalidRequestError(
                f"kv_transfer_params.tandem_block_size {manifest.block_size} differs from this node's --block-size "
                f"{block_size}",
                param="kv_transfer_params.tandem_block_size",
            )
        if manifest.fingerprint != self._node.backend.fingerprint:
            raise InvalidRequestError(
                f"kv_transfer_params.tandem_fingerprint {manifest.fingerprint} is of another model or layout than this "
                f"node's {self._node.backend.fingerprint}",
                param="kv_transfer_params.tandem_fingerprint",
            )

    # --- a prompt that is being computed

    def _rendezvous_offers(self, rendezvous: Rendezvous, url: str, keys: PrefixKeys) -> RendezvousOffers:
        node = self._node
        prefix_key = keys.key_at(keys.num_tokens)  # hashed here, so that no thread hashes later

        def read(manifest: Manifest | PartialManifest) -> Offer:
            try:
                self._check_compatible(manifest)
            except InvalidRequestError as exc:
                raise TransferError(f"{url}: {exc.message}", code=TransferCode.FINGERPRINT_MISMATCH) from exc
            if isinstance(manifest, Manifest) and manifest.prefix_key != prefix_key:
                raise TransferError(
                    f"{url} computed another prompt of {manifest.num_tokens} tokens than this one of {keys.num_tokens}",
                    code=PullReason.WRONG_CONTENT,
                )
            if manifest.num_tokens > keys.num_tokens:
                raise TransferError(
                    f"{url} has {manifest.num_tokens} tokens of a prompt of {keys.num_tokens}",
                    code=PullReason.WRONG_CONTENT,
                )
            return Offer.of(manifest, node.model.loaded)

        return RendezvousOffers(node.peers, node.remote_leases, url, rendezvous.rendezvous_id, self._shape, read)

    async def _take_rendezvous(
        self, rendezvous: Rendezvous, url: str, keys: PrefixKeys, offers: RendezvousOffers
    ) -> Taken:
        num_tokens = keys.num_tokens
        first = asyncio.create_task(self._first_offer(url, offers))
        try:
            # Costs nothing: the request would wait for the running step anyway, and the poll goes on meanwhile.
            hit = await self._node.engine.call(lambda: self._node.model.manager.lookup(keys, num_tokens))
            if hit.num_tokens == num_tokens and hit.output_row is not None:
                offers.close()
                return Taken(known_report=PrefillReport("", cached_tokens=num_tokens, computed_tokens=0))
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
            offers=offers,
        )
        return Taken(prefix)

    async def _first_offer(self, url: str, offers: RendezvousOffers) -> None:
        """Returns when something of the prompt can be read. That may take as long as the prompt queues and computes, so
        the wait ends with what it waits for: with the leg, which its caller's patience (--prefill-timeout-seconds)
        bounds, with the peer's beats, or with our own caller."""
        await self._node.peers.meet(url)
        offers.start()
        offer = await offers.beyond(0)
        await self._node.peers.connect(url, offer.engine_id, offer.epoch)
