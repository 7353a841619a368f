"""Prefixes by content: what other nodes happen to have of a prompt, and what this one has when they ask.

Reader: 1 what is here already, 2 ask the hinted nodes in turn, a short deadline each, 3 the first usable answer is
leased to us, 4 the engine pulls it and computes the rest. Every way that fails leaves the prompt to be computed here,
as if nobody had been asked. Holder: the deepest prefix that could be resumed here goes out under a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from common.errors import FingerprintMismatchError, InvalidRequestError, TandemError, TransferError
from common.kv_cache.keys import PrefixKeys
from common.node.lend.manifests import leased_manifest
from common.node.pull.manifest_stream import FixedOffers, Offer
from common.node.pull.pull_task import RemotePrefix
from common.wire.manifest import Manifest, ManifestShape
from common.wire.pull import ContentQuery, miss_answer, read_answer
from common.wire.routes import PULL_ROUTE
from common.wire.source_hints import SourceHint

if TYPE_CHECKING:
    from common.node.node import Node

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 0.2
MIN_MISSING_BLOCKS = 2
"""Less than this is computed sooner than asked for."""


class PrefixSources:
    """The reader's side. Lives on the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        geometry = node.model.cache_config.geometry
        self._shape = ManifestShape(
            num_block_groups=len(geometry.attention_groups), has_state=bool(geometry.state_layers)
        )

    @contextlib.asynccontextmanager
    async def prefix(
        self, token_ids: Sequence[int], cache_salt: str | None, hints: Sequence[SourceHint]
    ) -> AsyncIterator[RemotePrefix | None]:
        """The longest prefix that one of the hinted nodes has beyond what is here, leased while the block runs or until
        its pull has ended. None: nothing worth pulling. Raises nothing but what the block raises."""
        found = await self._find(token_ids, cache_salt, hints)
        try:
            yield found
        finally:
            if found is not None:
                found.offers.close()

    async def _find(
        self, token_ids: Sequence[int], cache_salt: str | None, hints: Sequence[SourceHint]
    ) -> RemotePrefix | None:
        node, cache = self._node, self._node.model.cache_config
        min_missing = MIN_MISSING_BLOCKS * cache.block_size
        if not (hints and cache.caches_states and len(token_ids) > min_missing):
            return None
        keys = node.model.manager.prefix_keys(token_ids, cache_salt)
        await asyncio.to_thread(keys.key_at, keys.num_tokens)
        try:
            # The request would wait for the running step anyway.
            num_local = await node.engine.call(lambda: node.core.num_local_tokens(keys))
        except TimeoutError:
            return None
        if keys.num_tokens - num_local < min_missing:
            return None
        for hint in hints:
            prefix, result = await self._ask(hint, keys, cache_salt, num_local)
            node.metrics.inc("source_queries_total", result=result)
            if prefix is not None:
                logger.info("prefix found url=%s tokens=%d of %d", hint.url, prefix.num_tokens, keys.num_tokens)
                return prefix
        return None

    async def _ask(
        self, hint: SourceHint, keys: PrefixKeys, cache_salt: str | None, num_local: int
    ) -> tuple[RemotePrefix | None, str]:
        """What one node has, leased, and how it went: hit, miss, refused, timeout, failed, mismatch."""
        node = self._node
        try:
            node.peers.check_allowed(hint.url)
            node.peers.liveness.check(hint.url)
        except TandemError as exc:
            logger.warning("source not asked: %s", exc.message)
            return None, "refused"
        query = ContentQuery(
            id=f"content-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(keys.token_ids(0, keys.num_tokens)),
            cache_salt=cache_salt,
            fingerprint=node.backend.fingerprint,
            prefix_key=keys.key_at(keys.num_tokens),
            have=num_local,
        )
        prefix, may_be_leased = None, True
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                answer = await node.peers.ask(hint.url, PULL_ROUTE, query.to_body(), ASK_TIMEOUT_S)
            manifest = read_answer(answer, shape=self._shape)
            if manifest is None:
                may_be_leased = False
                return None, "miss"
            prefix = self._accept(manifest, hint, query, keys, num_local)
            return prefix, "hit"
        except (TimeoutError, TransferError) as exc:
            logger.info("source gave nothing url=%s: %s", hint.url, str(exc) or type(exc).__name__)
            return None, "timeout" if isinstance(exc, TimeoutError) else "failed"
        except InvalidRequestError as exc:
            logger.warning("source is of no use url=%s: %s", hint.url, exc.message)
            return None, "mismatch"
        finally:
            if prefix is None and may_be_leased:
                node.remote_leases.call_off(query.id, hint.url)

    def _accept(
        self, manifest: object, hint: SourceHint, query: ContentQuery, keys: PrefixKeys, num_local: int
    ) -> RemotePrefix:
        """Raises InvalidRequestError naming what of the answer is not what was asked for."""
        node = self._node
        if not isinstance(manifest, Manifest):
            raise InvalidRequestError("final must be true, got false")
        num_tokens = manifest.num_tokens
        if not num_local < num_tokens <= keys.num_tokens:
            raise InvalidRequestError(
                f"remote_num_tokens must be above {num_local} and at most {keys.num_tokens}, got {num_tokens}"
            )
        for name, value, expected in (
            ("tandem_lease_id", manifest.lease_id, query.id),
            ("tandem_epoch", manifest.epoch, hint.epoch),
            ("tandem_block_size", manifest.block_size, keys.block_size),
            ("tandem_fingerprint", manifest.fingerprint, query.fingerprint),
            ("tandem_prefix_key", manifest.prefix_key.hex(), keys.key_at(num_tokens).hex()),
        ):
            if value != expected:
                raise InvalidRequestError(f"{name} must be {expected}, got {value}")
        offer = Offer.of(manifest, node.model.loaded)
        node.remote_leases.hold(query.id, hint.url, manifest.lease_seconds)
        return RemotePrefix(
            url=hint.url,
            lease_id=query.id,
            prefix_key=manifest.prefix_key,
            num_tokens=num_tokens,
            keys=keys,
            offers=FixedOffers(offer, node.remote_leases, query.id),
        )


async def answer_content(node: Node, query: ContentQuery) -> dict[str, Any]:
    """The holder's side: the body that answers ``query``.

    Raises:
        FingerprintMismatchError: the reader is of another model or layout.
        InvalidRequestError: the prompt is longer than this node's context, its key is another here, the id is in use.
    """
    num_tokens, limit = len(query.prompt_token_ids), node.model.max_model_len
    if query.fingerprint != node.backend.fingerprint:
        raise FingerprintMismatchError(
            f"fingerprint {query.fingerprint} is of another model or layout than this node's "
            f"{node.backend.fingerprint}",
            param="fingerprint",
        )
    if num_tokens > limit:
        raise InvalidRequestError(
            f"prompt_token_ids has {num_tokens} tokens, more than this node's --max-model-len {limit}",
            param="prompt_token_ids",
        )
    keys = node.model.manager.prefix_keys(query.prompt_token_ids, query.cache_salt)
    if await asyncio.to_thread(keys.key_at, num_tokens) != query.prefix_key:
        raise InvalidRequestError(
            f"prefix_key {query.prefix_key.hex()} is not the key of prompt_token_ids and cache_salt here",
            param="prefix_key",
        )
    lease = await node.engine.call(lambda: node.core.lease_prefix(keys, query.id, deeper_than=query.have))
    if lease is None:
        return miss_answer()
    if node.rendezvous.is_called_off(query.id):
        # The reader's deadline passed before the question was read: nobody would end this lease.
        await node.engine.call(lambda: node.model.manager.release_lease(query.id))
        return miss_answer()
    try:
        manifest = await leased_manifest(node, lease, lease_id=query.id)
    except BaseException:
        node.engine.post(lambda: node.model.manager.release_lease(query.id))
        raise
    return manifest.to_params()
