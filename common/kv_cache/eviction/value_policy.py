"""Eviction by value: expected returns per time and byte, states and the blocks below them together, leaf first.

The value of a checkpoint is the tokens it saves, times how likely and how soon checkpoints of its class and age are
asked for (``reuse``). A class is why it was kept, how often its line of prefixes was continued before, and how many
new tokens it came with: a short addition to a known prefix is a conversation, a long one seldom is.

When a slot is wanted, the least valuable checkpoint goes; blocks that led to no other are dead ends from then on. When
a block is wanted, dead ends go first (oldest first), then a *leaf*: a block on which checkpoints hang, with none after
it that leads to another. Of the leaves that one goes whose branch is worth least per byte: a cheap state at the end of
a long worthless branch must not keep the branch, so a leaf counts as the worst stretch of its branch that could go with
it. What each part brings is measured in docs/cache.md.

Life of a record: 1 stored with its checkpoint, 2 aged from bin to bin, 3 the checkpoint is evicted: a ghost, which
still learns, 4 asked for again, by a prompt whose deepest known prefix it is: counted, and at age 0 again, in another
class; or forgotten, the longest unused ghost first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.eviction.base import EvictionOrder, EvictionPolicy, LruOrder, Outlook
from common.kv_cache.eviction.block_tree import BlockTree, Record
from common.kv_cache.eviction.reuse import EDGES, NUM_BINS, ReuseStatistics, age_bin
from common.kv_cache.eviction.value_orders import BlockOrder, SlotOrder
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.layout import make_layout
from common.kv_cache.spec import KVCacheConfig

MIN_GHOSTS = 8192
GHOSTS_PER_SLOT = 16
"""Evicted checkpoints remembered: MIN_GHOSTS and GHOSTS_PER_SLOT for each slot. In a small pool what returns was
evicted long before: with one a slot instead, the hit rate at 40 GiB falls from 11.3 to 7.9 % (docs/cache.md)."""
REFRESH_INTERVAL = 64
"""Admissions between two looks at the statistics (more when there are many checkpoints: each look values all anew)."""
AGEING_INTERVAL = 4
"""Admissions between two looks at who left its age bin: less than the narrowest bin is wide."""
HALVING_INTERVAL = 8192
"""Admissions after which all counts are halved, so that the last few thousand requests decide."""
MAX_DEPTH = 3
NEW_TOKENS_UNIT = 512
MAX_NEW_BITS = 7
"""Classes: depth 0, 1, 2, 3 or more; new tokens below 512, 1,024, 2,048 and so on, 32,768 or more in the last."""


class ValuePolicy(EvictionPolicy):
    def __init__(self, config: KVCacheConfig) -> None:
        layout = make_layout(config.geometry, config.block_size)
        self.slot_bytes = max(1, layout.slot_bytes)
        self.block_bytes = layout.group_block_bytes[0] if layout.group_block_bytes else 0
        self._block_size = config.block_size
        self._max_ghosts = MIN_GHOSTS + GHOSTS_PER_SLOT * config.num_slots
        self._statistics = ReuseStatistics()
        self._records: OrderedDict[bytes, Record] = OrderedDict()  # longest unused first
        self._positions: dict[bytes, Counter[int]] = {}  # of the records behind each boundary
        self._resident: dict[bytes, Record] = {}
        self._ageing: list[deque[tuple[Record, int]]] = [deque() for _ in range(NUM_BINS)]
        self._now = 0
        self._next_refresh = 0
        self.tree = BlockTree(config.num_blocks[0] if config.num_blocks else 1)
        self._slots = SlotOrder(self)
        self._blocks = BlockOrder(self)

    @property
    def num_ghosts(self) -> int:
        return len(self._records) - len(self._resident)

    def order(self, pool_name: str) -> EvictionOrder:
        if pool_name == "slots":
            return self._slots
        return self._blocks if pool_name == "blocks" else LruOrder()

    # -- what happens -------------------------------------------------------------------------------------------------

    def admitted(self, keys: PrefixKeys, num_tokens: int) -> None:
        if keys.is_counted:
            keys.is_counted = False
            return
        self._now += 1
        if self._now % AGEING_INTERVAL == 0:
            self._age()
        if self._now >= self._next_refresh:
            self._refresh()
        known = self._deepest_known(keys, num_tokens)
        if known is None:
            keys.history = (0, 0)
            return
        keys.history = (known.position, known.depth + 1)
        self._statistics.count_return(known.reuse_class, max(known.bin, age_bin(self._now - known.age_start)))
        self._records.move_to_end(known.key)
        self._restart_age(known)
        if known.checkpoint is not None:
            self._revalue(known)

    def blocks_stored(self, pool_name: str, parent_id: int, block_ids: Sequence[int]) -> None:
        if pool_name == "blocks":
            self.tree.store(parent_id, block_ids)

    def blocks_removed(self, pool_name: str, block_ids: Sequence[int]) -> None:
        if pool_name != "blocks":
            return
        for block_id in self.tree.remove(block_ids):
            for record in self.tree.hanging.get(block_id, ()):
                record.block_id = 0
            self._mark_dead_ends(*self.tree.remove_leading(block_id))

    def checkpoint_stored(self, checkpoint: Checkpoint, block_id: int) -> None:
        record = self._records.get(checkpoint.key)
        if record is None:
            record = self._make_record(checkpoint)
        record.checkpoint = checkpoint
        record.block_id = block_id
        self._resident[record.key] = record
        for tail_id in checkpoint.tail_block_ids[:1]:  # in the pool ``blocks``: the tree knows no other
            self.tree.add_tail(tail_id, record)
        if block_id:
            leading, before = self.tree.hang(block_id, record)
            self._blocks.mark_leading(leading)
            self._appraise(before)
            self._appraise(block_id)
        else:
            self._revalue(record)

    def checkpoint_removed(self, checkpoint: Checkpoint) -> None:
        record = self._resident.pop(checkpoint.key)
        block_id, record.block_id = record.block_id, 0
        record.checkpoint = None
        record.version += 1
        for tail_id in checkpoint.tail_block_ids[:1]:
            self.tree.remove_tail(tail_id, record)
            if not self.tree.leads_to_checkpoint(tail_id):
                self._blocks.mark_dead_ends((tail_id,))
        if block_id:
            self._mark_dead_ends(*self.tree.unhang(block_id, record))
            self._appraise(block_id)

    def next_checkpoints(self, num_slots: int, num_blocks: int) -> Sequence[Checkpoint]:
        going = (*self._slots.first(num_slots), *self._blocks.first(num_blocks))
        found = {record.key: record for record in going}
        return [record.checkpoint for record in found.values() if record.checkpoint is not None]

    def outlook(self, key: bytes) -> Outlook | None:
        record = self._records.get(key)
        if record is None:
            return None
        probability = self._statistics.return_probabilities(record.reuse_class)[record.bin]
        late = self._statistics.late_probabilities(record.reuse_class)[record.bin]
        return Outlook(probability, self.expected_tokens(record), late)

    def remember(self, checkpoint: Checkpoint) -> None:
        if checkpoint.key not in self._records:
            self._make_record(checkpoint)

    # -- value --------------------------------------------------------------------------------------------------------

    def expected_tokens(self, record: Record) -> float:
        """Tokens expected to be saved per request waited."""
        return self._statistics.index(record.reuse_class)[record.bin] * record.position

    def resident(self) -> Iterator[Record]:
        return iter(self._resident.values())

    def _appraise(self, block_id: int) -> None:
        """What follows the block has changed: it may be a leaf now."""
        for record in self.tree.hanging.get(block_id, ()):
            self._revalue(record)

    def _revalue(self, record: Record) -> None:
        record.version += 1
        self._slots.push(record)
        self._blocks.push(record)

    def _mark_dead_ends(self, dead_ends: list[int], leaf: int) -> None:
        self._blocks.mark_dead_ends(dead_ends)
        self._appraise(leaf)

    # -- records ------------------------------------------------------------------------------------------------------

    def _make_record(self, checkpoint: Checkpoint) -> Record:
        num_known, depth = checkpoint.history
        num_new = checkpoint.position - (num_known if num_known < checkpoint.position else 0)
        record = Record(checkpoint.key, checkpoint.boundary_key, checkpoint.position, checkpoint.origin, depth, num_new)
        self._records[record.key] = record
        self._positions.setdefault(record.boundary_key, Counter())[record.position] += 1
        self._restart_age(record)
        while self.num_ghosts > self._max_ghosts:
            self._forget_oldest()
        return record

    def _forget_oldest(self) -> None:
        oldest = next(iter(self._records.values()))
        if oldest.checkpoint is not None:
            self._records.move_to_end(oldest.key)
            return
        del self._records[oldest.key]
        oldest.age_start = -1
        positions = self._positions[oldest.boundary_key]
        positions -= Counter((oldest.position,))
        if not positions:
            del self._positions[oldest.boundary_key]

    def _restart_age(self, record: Record) -> None:
        """Age 0 from now on, in the class that fits by now."""
        new_bits = min(MAX_NEW_BITS, (record.num_new_tokens // NEW_TOKENS_UNIT).bit_length())
        record.reuse_class = (record.origin, min(record.depth, MAX_DEPTH), new_bits)
        record.reached = self._statistics.reached(record.reuse_class)
        record.reached[0] += 1
        record.age_start = self._now
        record.bin = 0
        self._ageing[0].append((record, self._now))

    def _age(self) -> None:
        """Move on the records that left their bin. A record passes each bin once, so this is O(bins) per record."""
        now = self._now
        for age, queue in enumerate(self._ageing):
            limit = now - EDGES[age + 1]
            while queue and queue[0][1] <= limit:
                entry = queue.popleft()
                record = entry[0]
                if record.age_start != entry[1]:
                    continue  # used again, or forgotten
                record.bin = age + 1
                record.reached[age + 1] += 1
                if age + 1 < NUM_BINS:
                    self._ageing[age + 1].append(entry)
                if record.checkpoint is not None:
                    self._revalue(record)

    def _refresh(self) -> None:
        self._next_refresh = self._now + max(REFRESH_INTERVAL, len(self._resident) // 8)
        if self._next_refresh // HALVING_INTERVAL > self._now // HALVING_INTERVAL:
            self._statistics.halve()
        self._statistics.refresh()
        self._slots.rebuild()
        self._blocks.rebuild()

    def _deepest_known(self, keys: PrefixKeys, num_tokens: int) -> Record | None:
        num_blocks = num_tokens // self._block_size
        chain, positions = keys.boundary_keys(num_blocks), self._positions
        for index in range(num_blocks, -1, -1):
            # Behind a common beginning there may be thousands of records, but at ``block_size`` positions at most:
            # with 4,170 of them an admission took 5.8 ms when each was compared, and takes 0.05.
            for position in sorted(positions.get(chain[index], ()), reverse=True):
                if position <= num_tokens and (record := self._records.get(keys.key_at(position))) is not None:
                    return record
        return None
