"""All tiers of a node: what is written of what leaves the pools, what is found for a prompt that is admitted.

On the engine thread, between steps: 1 a look at what the pools will evict (and, for tiers that nodes share, at what
was published), 2 what the policy takes in is leased with its closure and given to the tier's writer, 3 written: the
lease ends, and the prefix can be found; 4 ``find`` for a prompt that is admitted, 5 read as a pull, by the reader. An
eviction that comes before 2 is counted and never waits. An idle node looks at all it has, a draining one too, and ends
when that is written. On the event loop: who asks for looks, and what the reader tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

from common.engine.core import EngineCore
from common.errors import DeadlineExceededError, NodeUnavailableError
from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.prefix.hits import PrefixHit
from common.kv_cache.tiers.stack import TierStack, Write
from common.kv_cache.tiers.stored_prefix import Extent, StoredPrefix
from common.metrics.labels import label_values
from common.metrics.metrics import Metrics, Samples
from common.node.engine_thread import EngineThread
from common.node.tiers.node_tier import NodeTier
from common.node.tiers.prefix_objects import PrefixObjects, WritableObject
from common.node.tiers.scanner import POLL_S, TierScanner
from common.node.tiers.tier_reader import BadObjects, TierPrefix, TierReader
from common.node.tiers.writer import TierWriter, WriteJob
from common.tiers.catalogue import Catalogue
from common.tiers.host_memory import HostMemory
from common.tiers.object_header import ObjectHeader, ObjectKind, has_room
from common.tiers.store import ObjectReadError, Watch
from common.tiers.timed_reads import TimedReads
from common.wire.cache_events import TIER_PREFIX

logger = logging.getLogger(__name__)

LOOK_S = 0.1
LOOK_SHARE = 50
"""Looks come at least every ``LOOK_S`` seconds, and take one fiftieth of the engine's time at most."""
IDLE_S = 1.0
"""A node without work for so long looks at all that it has."""
IDLE_LOOK_S = 0.5
"""Between the looks of such a node, once all is written."""
MIN_SLOTS = 8
"""States that a look goes through at least, and for each prompt that waits."""
MAX_WRITES = 4
"""Prefixes that are leased to be written at a time, for each tier: they cannot be evicted meanwhile."""
WRITE_HANG_S = 10.0
"""A tier that writes no object for so long is not waited for until it does: what is above it goes on without."""
MAX_OFFERS = 16
"""Prefixes whose closure one look finds at most."""
WRITE_LEASE_S = 60.0
"""Longest time that memory is kept for a write: a disk that hangs must not keep it for ever."""
LOOK_TIMEOUT_S = 2.0
CLOSE_S = 5.0
"""Longest waits for a write that has begun, and for a tier's files to be closed, when the node ends."""
LEARNT_AT_ONCE = 256
"""Prefixes of a folder that are taken in between two steps: 3 ms."""
MAX_REMEMBERED = 8192
"""Prefixes of a folder, the latest used ones, that the eviction policy is told of: it keeps as many in mind."""
UNTOUCHED = ("deadline", "stuck", "io")
"""Reasons of a read that say nothing of the object."""


class NodeTiers:
    """``start`` and ``close`` it on the event loop. ``reads`` is closed with it."""

    def __init__(
        self,
        tiers: Sequence[NodeTier],
        *,
        manager: KVCacheManager,
        core: EngineCore,
        engine: EngineThread,
        objects: PrefixObjects,
        read_timeout_s: float,
        step_tokens: int,
        metrics: Metrics,
    ) -> None:
        self._tiers = {id(each.tier): each for each in tiers}
        self._manager = manager
        self._core = core
        self._engine = engine
        self._objects = objects
        self._metrics = metrics
        self._step_tokens = step_tokens
        self._leaving = manager.leaving_prefixes(self._on_evict, objects.own_bytes)
        for each in tiers:
            each.tier.index.on_change = partial(self._tell, TIER_PREFIX + each.kind)
        self._stack = TierStack([each.tier for each in tiers], self._leaving.read_bytes)
        self._reads = TimedReads()
        self.reader = TierReader(objects, self._reads, read_timeout_s, self._on_bad, metrics)
        self._writers = {key: TierWriter(each.store, each.kind) for key, each in self._tiers.items()}
        self._scanners = [self._scanner(each, each.watch) for each in tiers if each.watch is not None]
        self._writing: Counter[int] = Counter()
        self._num_writes = 0
        self._num_remembered = 0
        self._reading: dict[bytes, TierPrefix] = {}
        self._is_idle_since_s = time.monotonic()
        self._looking: asyncio.Task[None] | None = None
        for name, each in itertools.product(("tier_read_errors_total", "tier_write_errors_total"), tiers):
            for reason in label_values(name, "reason"):
                # Of a series that begins with its first error nobody sees that it grew.
                metrics.inc(name, 0, tier=each.kind, reason=reason)

    def start(self) -> None:
        for writer in self._writers.values():
            writer.start()
        for scanner in self._scanners:
            scanner.start()
        self._looking = asyncio.create_task(self._look_forever(), name="tier-looks")

    async def close(self) -> None:
        """After the engine has ended. What was submitted is written, for a while."""
        if self._looking is not None:
            self._looking.cancel()
        for scanner in self._scanners:
            scanner.close()
        self._reads.close()
        for writer in self._writers.values():
            await asyncio.to_thread(writer.close, CLOSE_S)
        for each in self._tiers.values():
            if each.use is not None:
                # A daemon thread: the filesystem may hang, and Python waits for a thread pool's threads at exit.
                thread = threading.Thread(target=each.use.close, name="tier-close", daemon=True)
                thread.start()
                await asyncio.to_thread(thread.join, CLOSE_S)

    def _scanner(self, each: NodeTier, watch: Watch) -> TierScanner:
        catalogue = Catalogue(self._manager.config.block_size, self._leaving.first_needed)

        def on_useless(found: Counter[str]) -> None:
            for reason, count in found.items():
                self._metrics.inc("tier_read_errors_total", count, tier=each.kind, reason=reason)

        def on_change(whole: Sequence[StoredPrefix], gone: Sequence[bytes]) -> None:
            learn = self._learn if scanner.has_looked else self._learn_first
            self._engine.post(lambda: self._forget(each, gone))
            for start in range(0, len(whole), LEARNT_AT_ONCE):
                self._engine.post(partial(learn, each, whole[start : start + LEARNT_AT_ONCE]))

        scanner = TierScanner(each.store, watch, self._objects, catalogue, on_change, on_useless)
        return scanner

    @property
    def is_scanned(self) -> bool:
        """Whether all that the folders held at the start is known, or about to be."""
        return all(scanner.has_looked for scanner in self._scanners)

    # --- what leaves the pools; engine thread

    async def flush(self) -> int:
        """Begins to write all that is worth it; how many writes have not ended. Event loop."""
        try:
            return await self._engine.call(self._look_at_all, timeout_s=LOOK_TIMEOUT_S)
        except (DeadlineExceededError, NodeUnavailableError):
            return 0 if self._engine.death is not None else 1

    async def _look_forever(self) -> None:
        interval_s = LOOK_S
        while True:
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            if self._core.num_running or self._core.num_waiting:
                self._is_idle_since_s = now
            is_idle = now - self._is_idle_since_s > IDLE_S
            try:
                seconds = await self._engine.call(partial(self._look, is_whole=is_idle), timeout_s=LOOK_TIMEOUT_S)
                is_done = is_idle and not self._writing.total()
                interval_s = max(IDLE_LOOK_S if is_done else LOOK_S, LOOK_SHARE * seconds)
            except (DeadlineExceededError, NodeUnavailableError):
                continue  # in a long step, or ended
            except Exception:  # the next look may go well; the node serves without
                logger.exception("a look at what leaves the cache raised")

    def _look(self, *, is_whole: bool) -> float:
        """How long it took. ``is_whole``: at all that is cached, not only at what goes next."""
        started_s = time.monotonic()
        for key, each in self._tiers.items():
            each.tier.is_hung = self._writing[key] > 0 and started_s - self._writers[key].moved_s > WRITE_HANG_S
        if self._stack.has_shared and self._has_room(is_shared=True):
            for prefix in self._leaving.fresh(self._may_go):
                self._begin(self._stack.publish(prefix))
                if not self._has_room(is_shared=True):
                    break
        if self._stack.has_own and self._has_room(is_shared=False):
            num_slots, num_blocks = self._far(is_whole=is_whole)
            for number, prefix in enumerate(self._leaving.next(num_slots, num_blocks, self._is_wanted), start=1):
                self._begin(self._stack.offer(prefix))
                if number == MAX_OFFERS or not self._has_room(is_shared=False):
                    break
        return time.monotonic() - started_s

    def _far(self, *, is_whole: bool) -> tuple[int, int]:
        """Slots and blocks that may be wanted before the next look."""
        config, core = self._manager.config, self._core
        if is_whole:
            return config.num_slots, max(config.num_blocks, default=config.max_checkpoints)
        num_tokens = 2 * self._step_tokens + core.num_uncomputed_prompt_tokens
        return MIN_SLOTS * (1 + core.num_waiting), num_tokens // config.block_size

    def _may_go(self, checkpoint: Checkpoint) -> bool:
        """What was pulled is kept by who computed it, or is in a tier."""
        return checkpoint.origin != "pulled" and has_room(checkpoint.tail_tokens)

    def _is_wanted(self, checkpoint: Checkpoint) -> bool:
        return self._may_go(checkpoint) and self._stack.wants(checkpoint.key)

    def _has_room(self, *, is_shared: bool) -> bool:
        """Whether a further write may begin: a tier that is busy is waited for, one that rests stops no other."""
        writable = [
            key for key, each in self._tiers.items() if each.tier.settings.is_shared == is_shared and each.may_write
        ]
        return bool(writable) and all(self._writing[key] < MAX_WRITES for key in writable)

    def _look_at_all(self) -> int:
        """With what is in host memory, which this node's end takes with it. How many writes have not ended."""
        self._look(is_whole=True)
        if self._has_room(is_shared=False):
            for write in self._stack.sink():
                self._write(write)
                if not self._has_room(is_shared=False):
                    break
        return self._writing.total()

    def _begin(self, writes: Sequence[Write]) -> None:
        for write in reversed(writes):  # what a tier lets go is taken from there before it is deleted there
            self._write(write)

    def _write(self, write: Write) -> None:
        key, prefix, index = id(write.tier), write.prefix, write.tier.index
        each = self._tiers[key]
        deletes = [header for other in write.dropped for header in self._unneeded(each, other)]
        self._num_writes += 1
        lease_id = f"tier write {self._num_writes}"  # with blanks, which no name has that a caller may send
        objects = self._source(write, lease_id)
        if objects is None:
            index.drop(prefix)
            self._writers[key].delete(deletes)
            return
        index.pin(prefix.key)
        index.unwritten.add(prefix.key)
        if not self._writing[key]:
            self._writers[key].moved_s = time.monotonic()
        self._writing[key] += 1

        def on_done(num_bytes: int, reason: str) -> None:
            self._engine.post(lambda: self._end_write(write, lease_id, num_bytes, reason))

        self._writers[key].submit(WriteJob(deletes, objects, on_done))

    def _source(self, write: Write, lease_id: str) -> list[WritableObject] | None:
        """Where the bytes are: in host memory above the tier, whose objects stay as long as they are looked at; else in
        the pools, leased. None: nowhere any more."""
        above = self._stack.above(write.tier)
        store = self._tiers[id(above)].store if above is not None else None
        if isinstance(store, HostMemory):
            with contextlib.suppress(ObjectReadError):
                return self._objects.copies(write.prefix, store.stored)
        lease = self._manager.lease_closure(write.prefix.key, lease_id, time.monotonic() + WRITE_LEASE_S)
        return list(self._objects.writable(write.prefix, lease)) if lease is not None else None

    def _end_write(self, write: Write, lease_id: str, num_bytes: int, reason: str) -> None:
        each, prefix, index = self._tiers[id(write.tier)], write.prefix, write.tier.index
        self._manager.release_lease(lease_id)
        self._writing[id(write.tier)] -= 1
        index.unpin(prefix.key)
        index.unwritten.discard(prefix.key)
        self._metrics.inc("tier_bytes_total", num_bytes, tier=each.kind, op="write")
        if not reason:
            return
        index.drop(prefix)
        self._writers[id(write.tier)].delete(self._unneeded(each, prefix))
        if reason == "others":
            write.tier.refuse(prefix.key)
            each.rest_from_writes(POLL_S)
            return
        self._metrics.inc("tier_write_errors_total", tier=each.kind, reason=reason)
        logger.warning("tier %s: a prefix of %d tokens was not written: %s", each.kind, prefix.position, reason)
        if reason != "stale":
            each.rest_from_writes()

    def _on_evict(self, checkpoint: Checkpoint) -> None:
        if self._may_go(checkpoint):
            self._stack.evicted(checkpoint.key)

    # --- what is told of the tiers; engine thread

    def stored(self) -> dict[str, Sequence[StoredPrefix]]:
        """By kind, the longest unused first."""
        return {each.kind: tuple(each.tier.index) for each in self._tiers.values()}

    def _tell(self, group: str, prefix: StoredPrefix, is_stored: bool) -> None:
        events, checkpoint = self._manager.events, prefix.checkpoint
        if events is None:
            return
        if is_stored:
            events.checkpoint_stored(
                group, checkpoint.boundary_key, prefix.key, prefix.position, has_row=prefix.has_row
            )
        else:
            events.checkpoint_removed(group, prefix.key, prefix.position)

    # --- what the folders hold; engine thread

    def _forget(self, each: NodeTier, gone: Sequence[bytes]) -> None:
        index = each.tier.index
        for key in gone:
            prefix = index.get(key)
            if prefix is not None and key not in index.unwritten:
                index.drop(prefix)

    def _learn(self, each: NodeTier, whole: Sequence[StoredPrefix]) -> None:
        """What others have written; what is too much with it goes, the longest unused first."""
        index = each.tier.index
        dropped: list[StoredPrefix] = []
        for prefix in whole:
            if prefix.key in index:
                continue
            gone = index.make_room(prefix, is_choosy=False)
            if gone is not None:
                dropped += gone
                index.add(prefix)
                self._manager.remember(prefix.checkpoint)
        self._writers[id(each.tier)].delete([header for other in dropped for header in self._unneeded(each, other)])

    def _learn_first(self, each: NodeTier, whole: Sequence[StoredPrefix]) -> None:
        """What was there at the start, the latest used first; what does not fit is deleted."""
        index = each.tier.index
        surplus: list[StoredPrefix] = []
        for prefix in whole:
            if prefix.key in index:
                continue
            if index.used_bytes + index.missing(prefix) > index.size_bytes:
                surplus.append(prefix)
                continue
            index.add(prefix, is_oldest=True)
            if self._num_remembered < MAX_REMEMBERED:
                self._num_remembered += 1
                self._manager.remember(prefix.checkpoint)
        self._writers[id(each.tier)].delete([header for other in surplus for header in self._unneeded(each, other)])

    def _unneeded(self, each: NodeTier, prefix: StoredPrefix) -> list[ObjectHeader]:
        """The objects of a prefix that is not in the tier's index which no prefix in it needs."""
        unused = [extent for extent in prefix.extents if not each.tier.index.has_extent(extent)]
        return self._objects.unshared(prefix, unused)

    # --- prompts that are admitted; engine thread

    def find(self, keys: PrefixKeys, num_tokens: int, hit: PrefixHit) -> TierPrefix | None:
        """``common.engine.scheduler.LowerTiers``."""
        if hit.checkpoint is not None:
            self._stack.touch(hit.checkpoint.key)
        s_per_token = self._s_per_token()
        for each in self._tiers.values():
            each.measure(s_per_token)
        found = self._stack.find(keys, num_tokens, hit)
        if found is None:
            return None
        prefix, each = found.prefix, self._tiers[id(found.tier)]
        reading = self._reading.get(prefix.key)
        if reading is not None:
            return reading
        num_blocks = prefix.position // keys.block_size
        chain = keys.boundary_keys(num_blocks)[: num_blocks + 1]
        return TierPrefix(each, prefix, chain, hit.num_tokens, self._begin_read, self._close_read)

    def _s_per_token(self) -> float:
        """Of computing a prompt here; nothing is known of it before the first one, and then reading is tried."""
        line = self._core.step_model.prompt_line
        return float("inf") if line is None else line.unit_s + line.fixed_s / self._step_tokens

    def _begin_read(self, found: TierPrefix) -> None:
        self._reading[found.prefix_key] = found
        found.tier.tier.index.pin(found.prefix_key)

    def _close_read(self, found: TierPrefix) -> None:
        self._engine.post(lambda: self._end_read(found))

    def _end_read(self, found: TierPrefix) -> None:
        index = found.tier.tier.index
        index.unpin(found.prefix_key)
        del self._reading[found.prefix_key]
        if (prefix := index.get(found.prefix_key)) is not None:
            index.touch(prefix)

    def _on_bad(self, found: TierPrefix, bad: BadObjects) -> None:
        """Event loop."""
        kind = found.tier.kind
        for header, reason in bad:
            self._metrics.inc("tier_read_errors_total", tier=kind, reason=reason)
            logger.warning("tier %s: %s of a prefix could not be read: %s", kind, header.kind.name.lower(), reason)
        self._engine.post(lambda: self._drop_bad(found.tier, bad))

    def _drop_bad(self, each: NodeTier, bad: BadObjects) -> None:
        index, deletes = each.tier.index, []
        for header, reason in bad:
            if reason in UNTOUCHED:
                each.rest_from_reads()
                continue
            if header.kind is ObjectKind.EXTENT:
                extent = Extent(header.group_id, header.start, header.num_blocks, header.key)
                users = index.users_of(extent)
            else:
                known = index.get(header.key)
                users = [known] if known is not None else []
            dropped = [prefix for prefix in users if prefix.key not in index.unwritten]
            for prefix in dropped:
                index.drop(prefix)
            if reason == "failing" and each.tier.settings.is_shared:
                continue  # other nodes may read it; whoever computes it again writes it anew
            deletes += [header, *(other for prefix in dropped for other in self._unneeded(each, prefix))]
        self._writers[id(each.tier)].delete(deletes)

    # --- metrics

    def read_rates(self) -> dict[str, tuple[float, float]]:
        """By kind, seconds of a read and of each byte, of the tiers that are read now. Readable from any thread."""
        return {each.kind: each.rates for each in self._tiers.values() if each.may_read}

    def samples(self) -> Samples:
        """Readable from any thread."""
        tiers = list(self._tiers.values())
        return {
            "tier_objects": {(each.kind,): len(each.tier.index) + each.tier.index.num_extents for each in tiers},
            "tier_used_bytes": {(each.kind,): each.tier.index.used_bytes for each in tiers},
            "tier_size_bytes": {(each.kind,): each.tier.index.size_bytes for each in tiers},
            "tier_skipped_total": {
                (each.kind, reason): count for each in tiers for reason, count in dict(each.tier.skipped).items()
            },
        }
