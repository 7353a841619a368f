"""Prefixes by content: what other nodes happen to have of a prompt that this one is about to compute.

1 look up what is here already, 2 query the named sources in turn, each with a deadline by what it may save, 3 the first
usable answer is leased to us, 4 the engine pulls it and computes the rest. After every failure the prompt is computed
here, as if no source had been named. The holder's side is ``common.node.lend.prefix_holder``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Sequence

from common.engine.core import EngineCore
from common.errors import (
    DeadlineExceededError,
    FingerprintMismatchError,
    InvalidRequestError,
    TandemError,
    TransferError,
)
from common.images.span import ImageSpan
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import KVCacheManager
from common.metrics.metrics import Metrics
from common.models.loading.loader import LoadedModel
from common.node.engine_thread import EngineThread
from common.node.peers.directory import PeerDirectory
from common.node.pull.manifest_stream import FixedManifestStream, ReadablePrefix
from common.node.pull.pull_task import RemotePrefix
from common.node.pull.remote_leases import RemoteLeases
from common.wire.manifest import Manifest, ManifestShape
from common.wire.pull import ContentQuery, read_answer, with_id
from common.wire.pull_sources import PullSource
from common.wire.routes import PULL_ROUTE

logger = logging.getLogger(__name__)

MIN_QUERY_TIMEOUT_S, MAX_QUERY_TIMEOUT_S = 0.2, 2.0
"""Bounds, in seconds, of how long one source has to answer; the request waits meanwhile."""
WAIT_SHARE = 0.5
"""Of the time that it takes to compute what is missing: a source may wait that long. It answers between two steps, and
where it computes prompts these are long."""

MIN_MISSING_BLOCKS = 2
"""A prompt with fewer blocks to compute than this is computed at once: that is sooner done than a query."""


class PrefixSources:
    """Queries sources and leases what they have. Lives on the event loop. ``fingerprint``: of this node's model and
    layout."""

    def __init__(
        self,
        *,
        manager: KVCacheManager,
        core: EngineCore,
        engine: EngineThread,
        peers: PeerDirectory,
        leases: RemoteLeases,
        loaded: LoadedModel,
        metrics: Metrics,
        fingerprint: str,
    ) -> None:
        self._manager = manager
        self._core = core
        self._engine = engine
        self._peers = peers
        self._leases = leases
        self._loaded = loaded
        self._metrics = metrics
        self._fingerprint = fingerprint
        geometry = manager.config.geometry
        self._shape = ManifestShape(
            num_block_groups=len(geometry.attention_groups), has_state=bool(geometry.state_layers)
        )

    @contextlib.asynccontextmanager
    async def prefix(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None,
        sources: Sequence[PullSource],
        images: Sequence[ImageSpan] = (),
    ) -> AsyncIterator[RemotePrefix | None]:
        """The prefix that the first useful source has beyond what is here, leased while the block runs or until its
        pull has ended. None: nothing worth pulling. Raises nothing but what the block raises."""
        found: RemotePrefix | None = None
        try:
            found = await self._find(token_ids, cache_salt, sources, images)
        finally:
            self._end_unused(sources, found)
        try:
            yield found
        finally:
            if found is not None:
                found.close()

    def _end_unused(self, sources: Sequence[PullSource], found: RemotePrefix | None) -> None:
        """Of leases that sources hold for this request already."""
        for source in sources:
            if source.lease_id is not None and (found is None or found.lease_id != source.lease_id):
                with contextlib.suppress(TandemError):
                    self._peers.check_allowed(source.url, is_from_peer=True)
                    self._leases.call_off(source.lease_id, source.url)

    def keys(self, token_ids: Sequence[int], cache_salt: str | None, images: Sequence[ImageSpan]) -> PrefixKeys:
        """A prompt's, as this node's cache has them."""
        return self._manager.prefix_keys(token_ids, cache_salt, images=images)

    async def _find(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None,
        sources: Sequence[PullSource],
        images: Sequence[ImageSpan],
    ) -> RemotePrefix | None:
        cache = self._manager.config
        min_missing = MIN_MISSING_BLOCKS * cache.block_size
        if not (sources and cache.caches_states and len(token_ids) > min_missing):
            return None
        keys = self.keys(token_ids, cache_salt, images)
        await asyncio.to_thread(keys.key_at, keys.num_tokens)
        try:
            # The request would wait for the running step anyway.
            num_local = await self._engine.call(lambda: self._core.num_local_tokens(keys))
        except DeadlineExceededError:
            return None
        if keys.num_tokens - num_local < min_missing:
            return None
        content = await asyncio.to_thread(self._content, keys, cache_salt, num_local)
        for source in sources:
            prefix, result = await self._query(source, content, keys, num_local)
            self._metrics.inc("source_queries_total", result=result)
            if prefix is not None:
                logger.info("prefix found url=%s tokens=%d of %d", source.url, prefix.num_tokens, keys.num_tokens)
                return prefix
        return None

    def _content(self, keys: PrefixKeys, cache_salt: str | None, num_local: int) -> bytes:
        """The query to all sources, each of which gets it under an id of its own."""
        return ContentQuery(
            id="",
            prompt_token_ids=tuple(keys.token_ids(0, keys.num_tokens)),
            cache_salt=cache_salt,
            fingerprint=self._fingerprint,
            prefix_key=keys.key_at(keys.num_tokens),
            have=num_local,
            images=keys.images,
        ).to_json()

    async def _query(
        self, source: PullSource, content: bytes, keys: PrefixKeys, num_local: int
    ) -> tuple[RemotePrefix | None, str]:
        """What one source has, leased, and how it went: hit, miss, refused, timeout, failed, mismatch."""
        try:
            self._peers.check_allowed(source.url, is_from_peer=True)  # from anybody else they are not read
            self._peers.liveness.check(source.url)
        except TandemError as exc:
            logger.warning("source not asked: %s", exc.message)
            return None, "refused"
        query_id = source.lease_id or f"content-{uuid.uuid4().hex}"
        prefix, may_be_leased = None, source.lease_id is None
        timeout_s = self._timeout_s(source, keys.num_tokens - num_local)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._peers.query(source.url, PULL_ROUTE, with_id(content, query_id), timeout_s)
            manifest = read_answer(answer, shape=self._shape)
            if manifest is None:
                may_be_leased = False
                return None, "miss"
            prefix = self._accept(manifest, source, query_id, keys, num_local)
            return prefix, "hit"
        except (TimeoutError, TransferError) as exc:
            logger.info("source gave nothing url=%s: %s", source.url, str(exc) or type(exc).__name__)
            if isinstance(exc, TimeoutError):
                return None, "timeout"
            return None, "mismatch" if exc.code == FingerprintMismatchError.code else "failed"
        except InvalidRequestError as exc:
            logger.warning("source is of no use url=%s: %s", source.url, exc.message)
            return None, "mismatch"
        finally:
            if prefix is None and may_be_leased:
                self._leases.call_off(query_id, source.url)

    def _timeout_s(self, source: PullSource, num_missing: int) -> float:
        if source.lease_id is not None:  # it has it, and waits for no step
            return MAX_QUERY_TIMEOUT_S
        line = self._core.step_model.prompt_line
        saved_s = 0.0 if line is None else line.unit_s * num_missing
        return min(max(WAIT_SHARE * saved_s, MIN_QUERY_TIMEOUT_S), MAX_QUERY_TIMEOUT_S)

    def _accept(
        self, manifest: object, source: PullSource, query_id: str, keys: PrefixKeys, num_local: int
    ) -> RemotePrefix:
        """Raises InvalidRequestError naming what of the answer is not what was asked for."""
        if not isinstance(manifest, Manifest):
            raise InvalidRequestError("final must be true, got false")
        num_tokens = manifest.num_tokens
        if not num_local < num_tokens <= keys.num_tokens:
            raise InvalidRequestError(
                f"remote_num_tokens must be above {num_local} and at most {keys.num_tokens}, got {num_tokens}"
            )
        for name, value, expected in (
            ("tandem_lease_id", manifest.lease_id, query_id),
            ("tandem_epoch", manifest.epoch, source.epoch),
            ("tandem_block_size", manifest.block_size, keys.block_size),
            ("tandem_fingerprint", manifest.fingerprint, self._fingerprint),
            ("tandem_prefix_key", manifest.prefix_key.hex(), keys.key_at(num_tokens).hex()),
        ):
            if value != expected:
                raise InvalidRequestError(f"{name} must be {expected}, got {value}")
        prefix = ReadablePrefix.of(manifest, self._loaded)
        self._leases.hold(query_id, source.url, manifest.lease_seconds)
        return RemotePrefix(
            url=source.url,
            lease_id=query_id,
            prefix_key=manifest.prefix_key,
            num_tokens=num_tokens,
            keys=keys,
            manifests=FixedManifestStream(prefix, self._leases, query_id),
        )
