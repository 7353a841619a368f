"""The evictable slots and blocks of ``value_policy``, worst first, in heaps whose superseded entries are dropped when
they come up."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from typing import Protocol

from common.kv_cache.eviction.base import EvictionOrder
from common.kv_cache.eviction.block_tree import BlockTree, Record


class Valuer(Protocol):
    slot_bytes: int
    block_bytes: int
    tree: BlockTree

    def expected_tokens(self, record: Record) -> float: ...

    def resident(self) -> Iterator[Record]: ...


class SlotOrder(EvictionOrder):
    """Each slot belongs to a checkpoint; the least valuable one is first."""

    def __init__(self, valuer: Valuer) -> None:
        self._valuer = valuer
        self._units: OrderedDict[int, None] = OrderedDict()
        self._record_of: dict[int, Record] = {}
        self._heap: list[tuple[float, int, int, Record]] = []
        self._count = 0

    def push(self, record: Record) -> None:
        """The record's value has changed."""
        assert record.checkpoint is not None
        slot_id = record.checkpoint.slot_id
        self._record_of[slot_id] = record
        if slot_id in self._units:
            self._enter(record)

    def _enter(self, record: Record) -> None:
        self._count += 1
        heappush(self._heap, (self._valuer.expected_tokens(record), self._count, record.version, record))

    def rebuild(self) -> None:
        value = self._valuer.expected_tokens
        records = (self._record_of[slot_id] for slot_id in self._units)
        self._heap = [(value(record), number, record.version, record) for number, record in enumerate(records)]
        self._count = len(self._heap)
        heapify(self._heap)

    def add(self, unit_id: int) -> None:
        self._units[unit_id] = None
        self._enter(self._record_of[unit_id])

    def discard(self, unit_id: int) -> None:
        self._units.pop(unit_id, None)

    def victim(self) -> int:
        heap = self._heap
        while heap:
            _, _, version, record = heap[0]
            if version == record.version and record.checkpoint is not None:
                slot_id = record.checkpoint.slot_id
                if slot_id in self._units:
                    return slot_id
            heappop(heap)
        return next(iter(self._units))

    def first(self, num_units: int) -> list[Record]:
        """Whose slots go first when that many are wanted."""
        value, record_of = self._valuer.expected_tokens, self._record_of
        return nsmallest(num_units, (record_of[slot_id] for slot_id in self._units), key=value)

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[int]:
        value, record_of = self._valuer.expected_tokens, self._record_of
        return iter(sorted(self._units, key=lambda slot_id: value(record_of[slot_id])))

    def __contains__(self, unit_id: object) -> bool:
        return unit_id in self._units


class BlockOrder(EvictionOrder):
    """Dead ends (blocks that lead to no checkpoint), oldest first, then the leaves of the least valuable branches."""

    def __init__(self, valuer: Valuer) -> None:
        self._valuer = valuer
        self._tree = valuer.tree
        self._dead_ends: OrderedDict[int, None] = OrderedDict()
        self._leading: OrderedDict[int, None] = OrderedDict()
        self._heap: list[tuple[float, int, int, Record]] = []
        self._count = 0

    def push(self, record: Record) -> None:
        """The record's value has changed."""
        if self._target(record):
            self._count += 1
            heappush(self._heap, (self._branch_value(record), self._count, record.version, record))

    def rebuild(self) -> None:
        records = (record for record in self._valuer.resident() if self._target(record))
        self._heap = [
            (self._branch_value(record), number, record.version, record) for number, record in enumerate(records)
        ]
        self._count = len(self._heap)
        heapify(self._heap)

    def mark_leading(self, block_ids: Iterable[int]) -> None:
        """A checkpoint hangs on these or after them now."""
        dead_ends, leading = self._dead_ends, self._leading
        for block_id in block_ids:
            if block_id in dead_ends:
                del dead_ends[block_id]
                leading[block_id] = None

    def mark_dead_ends(self, block_ids: Iterable[int]) -> None:
        """Nothing follows these, nothing hangs on them any more."""
        dead_ends, leading, tails = self._dead_ends, self._leading, self._tree.tails
        for block_id in block_ids:
            if block_id in leading and block_id not in tails:
                del leading[block_id]
                dead_ends[block_id] = None

    def add(self, unit_id: int) -> None:
        tree = self._tree
        if not tree.leads_to_checkpoint(unit_id):
            self._dead_ends[unit_id] = None
            return
        self._leading[unit_id] = None
        for records in (tree.hanging.get(unit_id), tree.tails.get(unit_id)):
            for record in records or ():
                self.push(record)

    def add_all(self, unit_ids: Iterable[int]) -> None:
        dead_ends, leading, tree = self._dead_ends, self._leading, self._tree
        num_followers, hanging, tails = tree.num_followers, tree.hanging, tree.tails
        for unit_id in unit_ids:
            if unit_id in hanging or unit_id in tails:
                self.add(unit_id)
            elif num_followers[unit_id]:
                leading[unit_id] = None
            else:
                dead_ends[unit_id] = None

    def discard(self, unit_id: int) -> None:
        self.discard_all((unit_id,))

    def discard_all(self, unit_ids: Iterable[int]) -> None:
        dead_ends, leading = self._dead_ends, self._leading
        for unit_id in unit_ids:
            if unit_id in leading:
                del leading[unit_id]
            elif unit_id in dead_ends:
                del dead_ends[unit_id]

    def victims(self, num_units: int) -> Sequence[int]:
        return list(islice(self._dead_ends, num_units)) or (self.victim(),)

    def victim(self) -> int:
        if self._dead_ends:
            return next(iter(self._dead_ends))
        heap = self._heap
        while heap:
            _, _, version, record = heap[0]
            target = self._target(record) if version == record.version else 0
            if target:
                return target
            heappop(heap)
        return next(iter(self._leading))

    def _target(self, record: Record) -> int:
        """The block to evict so that this leaf goes; 0 when it is no leaf, or in use."""
        checkpoint = record.checkpoint
        if checkpoint is None or checkpoint.num_pins or checkpoint.num_leases:
            return 0
        if record.block_id and self._tree.num_followers[record.block_id]:
            return 0
        target = checkpoint.tail_block_ids[0] if checkpoint.tail_block_ids else record.block_id
        return target if target in self._leading else 0

    def _branch_value(self, record: Record) -> float:
        """The least value per byte of the stretches of the branch that end with this leaf."""
        tree, valuer = self._tree, self._valuer
        block_id = record.block_id
        if not block_id:
            return valuer.expected_tokens(record) / valuer.slot_bytes
        num_tokens, num_bytes, least = 0.0, 0, float("inf")
        while block_id:
            num_own, before = tree.own_stretch(block_id)
            for other in tree.hanging.get(block_id, ()):
                num_tokens += valuer.expected_tokens(other)
                num_bytes += valuer.slot_bytes
            num_bytes += num_own * valuer.block_bytes
            least = min(least, num_tokens / num_bytes)
            block_id = before if tree.num_followers[before] == 1 and num_own else 0
        return least

    def first(self, num_units: int) -> list[Record]:
        """What hangs on the branches that go first when that many blocks are wanted."""
        tree, num_missing = self._tree, num_units - len(self._dead_ends)
        entries = [entry for entry in self._heap if entry[2] == entry[3].version and self._target(entry[3])]
        heapify(entries)
        found: list[Record] = []
        num_gone: Counter[int] = Counter()  # block -> branches after it that would be gone
        while entries and num_missing > 0:
            leaf = heappop(entries)[3]
            num_own, before = tree.own_stretch(leaf.block_id)
            num_missing -= max(1, num_own)
            found += tree.hanging.get(leaf.block_id, (leaf,))
            num_gone[before] += 1
            if before in tree.hanging and num_gone[before] == tree.num_followers[before]:
                next_leaf = tree.hanging[before][0]
                heappush(entries, (self._branch_value(next_leaf), -len(found), next_leaf.version, next_leaf))
        return found

    def __len__(self) -> int:
        return len(self._leading) + len(self._dead_ends)

    def __iter__(self) -> Iterator[int]:
        yield from self._dead_ends
        yield from self._leading

    def __contains__(self, unit_id: object) -> bool:
        return unit_id in self._leading or unit_id in self._dead_ends
