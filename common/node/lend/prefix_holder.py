"""What this node has of a prompt when another node queries it by content (``common.node.pull.sources``).

The deepest prefix that could be resumed here goes out under a lease, whose id the reader chose. Of a stream that is
handed over the proxy chose it, and the lease is there before its reader asks: it need not wait for a step.
"""

from __future__ import annotations

import asyncio
from typing import Any

from common.engine.core import EngineCore
from common.errors import FingerprintMismatchError, InvalidRequestError
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.sharing.leases import LeasedPrefix
from common.node.engine_thread import EngineThread
from common.node.lend.manifest_builder import ManifestBuilder
from common.node.lend.rendezvous import RendezvousTable
from common.wire.pull import ContentQuery, miss_answer


class PrefixHolder:
    """Lives on the event loop. ``max_model_len``: the longest prompt that this node takes, in tokens."""

    def __init__(
        self,
        *,
        manager: KVCacheManager,
        core: EngineCore,
        engine: EngineThread,
        rendezvous: RendezvousTable,
        manifests: ManifestBuilder,
        max_model_len: int,
    ) -> None:
        self._manager = manager
        self._core = core
        self._engine = engine
        self._rendezvous = rendezvous
        self._manifests = manifests
        self._max_model_len = max_model_len
        self._handed_over: dict[str, LeasedPrefix] = {}

    async def hand_over(self, stream_id: str, lease_id: str) -> int:
        """Ends the stream, and keeps what it has computed for the reader that will ask for ``lease_id``; tokens, 0:
        nothing. Raises as ``EngineCore.hand_over``."""
        lease = await self._engine.call(lambda: self._core.hand_over(stream_id, lease_id))
        if lease is None:
            return 0
        self._handed_over = {name: each for name, each in self._handed_over.items() if self._is_leased(name)}
        self._handed_over[lease_id] = lease
        return lease.num_tokens

    def _is_leased(self, lease_id: str) -> bool:
        return self._manager.leases.renew(lease_id, 0.0)

    async def answer(self, query: ContentQuery) -> dict[str, Any]:
        """The body that answers ``query``.

        Raises:
            FingerprintMismatchError: the reader is of another model or layout.
            InvalidRequestError: the prompt is longer than this node's context, its key is another here, the id is in
                use.
        """
        num_tokens, fingerprint = len(query.prompt_token_ids), self._manifests.fingerprint
        if query.fingerprint != fingerprint:
            raise FingerprintMismatchError(
                f"fingerprint {query.fingerprint} is of another model or layout than this node's {fingerprint}",
                param="fingerprint",
            )
        if num_tokens > self._max_model_len:
            raise InvalidRequestError(
                f"prompt_token_ids has {num_tokens} tokens, more than this node's --max-model-len "
                f"{self._max_model_len}",
                param="prompt_token_ids",
            )
        keys = self._manager.prefix_keys(query.prompt_token_ids, query.cache_salt, images=query.images)
        if await asyncio.to_thread(keys.key_at, num_tokens) != query.prefix_key:
            raise InvalidRequestError(
                f"prefix_key {query.prefix_key.hex()} is not the key of prompt_token_ids, images and cache_salt here",
                param="prefix_key",
            )
        lease = self._handed_over.pop(query.id, None)
        if lease is None or not self._is_leased(query.id):
            lease = await self._engine.call(lambda: self._core.lease_prefix(keys, query.id, deeper_than=query.have))
        elif not query.have < lease.num_tokens <= num_tokens or lease.key != keys.key_at(lease.num_tokens):
            self._engine.post(lambda: self._manager.release_lease(query.id))
            lease = None
        if lease is None:
            return miss_answer()
        if self._rendezvous.is_called_off(query.id):
            # The reader's deadline passed before the query was read: no reader would end this lease.
            await self._engine.call(lambda: self._manager.release_lease(query.id))
            return miss_answer()
        try:
            manifest = await self._manifests.leased(lease, lease_id=query.id)
        except BaseException:
            self._engine.post(lambda: self._manager.release_lease(query.id))
            raise
        return manifest.to_params()
