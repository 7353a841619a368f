"""Reads prefixes of tiers: a pull whose source is a folder of this node.

1 the engine found memory for a prefix, 2 each object that is wanted of it is read on a thread into memory of its own
and checked there, whole, 3 only then it is delivered into the pools, 4 one outcome when every object has one. So a read
that hangs holds no memory of the pools, and nothing that is damaged was ever in them. What was bad is told before the
outcome, so that the engine does not find it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import torch

from common.kv_cache.sharing.remote_prefix import PullPlan
from common.kv_cache.tiers.stored_prefix import StoredPrefix
from common.metrics.metrics import Metrics
from common.node.pull.prefix_reader import FinishedPull
from common.node.tiers.node_tier import NodeTier
from common.node.tiers.prefix_objects import PrefixObjects, ReadableObject
from common.tiers.object_header import ObjectHeader, ObjectKind
from common.tiers.store import ObjectReadError
from common.tiers.timed_reads import TimedReads
from common.transfer.jobs import PullReason

BadObjects = Sequence[tuple[ObjectHeader, str]]


class TierPrefix:
    """``common.node.pull.prefix_reader.PulledPrefix`` and ``common.engine.scheduler.TierPrefix``. ``chain``: keys of
    its block boundaries, the root first. ``num_hit_tokens``: of the prompt, what memory had. ``on_begin`` is called on
    the engine thread, ``on_close`` on the event loop, both once."""

    def __init__(
        self,
        tier: NodeTier,
        prefix: StoredPrefix,
        chain: Sequence[bytes],
        num_hit_tokens: int,
        on_begin: Callable[[TierPrefix], None],
        on_close: Callable[[TierPrefix], None],
    ) -> None:
        self.tier = tier
        self.prefix = prefix
        self.chain = chain
        self.num_hit_tokens = num_hit_tokens
        self.is_being_read = False
        self._on_begin = on_begin
        self._on_close = on_close
        self._is_closed = False

    @property
    def prefix_key(self) -> bytes:
        return self.prefix.key

    @property
    def num_tokens(self) -> int:
        return self.prefix.position

    def begin(self) -> None:
        self.is_being_read = True
        self._on_begin(self)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._on_close(self)


class TierReader:
    """``common.node.pull.prefix_reader.PrefixReader`` of ``TierPrefix``. ``on_bad``: told, on the event loop, of
    objects that could not be read, with the reason."""

    def __init__(
        self,
        objects: PrefixObjects,
        reads: TimedReads,
        timeout_s: float,
        on_bad: Callable[[TierPrefix, BadObjects], None],
        metrics: Metrics,
    ) -> None:
        self._objects = objects
        self._reads = reads
        self._timeout_s = timeout_s
        self._on_bad = on_bad
        self._metrics = metrics

    def begin(self, seq_id: str, prefix: TierPrefix, plan: PullPlan, on_terminal: Callable[[], None]) -> TierPull:
        """Its outcome is always terminal."""
        return TierPull(
            prefix,
            self._objects.readable(prefix.prefix, prefix.chain, plan),
            self._reads,
            self._timeout_s,
            lambda bad: self._on_bad(prefix, bad),
        )

    def ended(self, prefix: TierPrefix, result: FinishedPull) -> None:
        metrics, kind = self._metrics, prefix.tier.kind
        metrics.inc("tier_bytes_total", result.num_bytes, tier=kind, op="read")
        if result.ok:
            metrics.observe("tier_read_seconds", result.seconds, tier=kind)
            metrics.inc("tier_hit_tokens_total", max(0, prefix.num_tokens - prefix.num_hit_tokens), tier=kind)
            if result.num_bytes:
                prefix.tier.read_times.observe(result.num_bytes, result.seconds)


class TierPull:
    """``common.node.pull.prefix_reader.Pull``."""

    def __init__(
        self,
        prefix: TierPrefix,
        objects: Sequence[ReadableObject],
        reads: TimedReads,
        timeout_s: float,
        on_bad: Callable[[BadObjects], None],
    ) -> None:
        self._store = prefix.tier.store
        self._objects = objects
        self._reads = reads
        self._timeout_s = timeout_s
        self._on_bad = on_bad
        self._loop = asyncio.get_running_loop()
        self._stopped = ""  # why no further object is read
        self._row: torch.Tensor | None = None
        self._num_bytes = 0
        self._started_s = time.monotonic()

    async def run(self) -> FinishedPull:
        reasons = await asyncio.gather(*map(self._read, self._objects))
        bad = [
            (each.header, reason)
            for each, reason in zip(self._objects, reasons, strict=True)
            if reason and reason != PullReason.CANCELLED
        ]
        if bad:
            self._on_bad(bad)
        if self._stopped:
            return self.failed(self._stopped)
        return FinishedPull(
            ok=True,
            terminal=True,
            num_bytes=self._num_bytes,
            output_row=self._row,
            seconds=time.monotonic() - self._started_s,
        )

    def cancel(self) -> None:
        self._stop(PullReason.CANCELLED)

    def failed(self, reason: str) -> FinishedPull:
        seconds = time.monotonic() - self._started_s
        return FinishedPull(ok=False, terminal=True, reason=reason, num_bytes=self._num_bytes, seconds=seconds)

    def _stop(self, reason: str) -> None:
        self._stopped = self._stopped or reason

    def _read(self, each: ReadableObject) -> asyncio.Future[str]:
        """Empty, or why it was not delivered; within the deadline."""
        arrived: asyncio.Future[str] = self._loop.create_future()

        def on_outcome(reason: str) -> None:
            if reason:
                self._stop(reason)  # the others are not read any more
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_arrive, arrived, reason)

        self._reads.submit(lambda: self._fetch(each), self._timeout_s, on_outcome)
        return arrived

    def _fetch(self, each: ReadableObject) -> Callable[[], None]:
        """On a thread of the reads."""
        if self._stopped:
            raise ObjectReadError(PullReason.CANCELLED)
        payload = torch.empty(each.header.payload_bytes, dtype=torch.uint8)
        self._store.get(each.header, [memoryview(payload.numpy())])
        if each.header.kind is ObjectKind.STATE:
            with contextlib.suppress(OSError):
                self._store.touch(each.header)

        def deliver() -> None:
            row = each.deliver(payload)
            if each.header.kind is ObjectKind.STATE:
                self._row = row
            self._num_bytes += each.header.payload_bytes

        return deliver


def _arrive(future: asyncio.Future[str], reason: str) -> None:
    if not future.done():
        future.set_result(reason)
