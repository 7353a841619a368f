"""Which published block follows which, and which checkpoints hang on them: what leads to a checkpoint, what nowhere.

A block leads to a checkpoint while one hangs on it or on a block after it. Else it is a dead end: nothing can be
resumed from it.

A run of blocks gets consecutive serial numbers, so the block before is one number less; only a run's first block needs
a link. Serial numbers are never used twice: a link to an evicted block finds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.eviction.reuse import ReuseClass


@dataclass(slots=True, eq=False)
class Record:
    """What is remembered of a checkpoint, also after it was evicted.

    Attributes:
        depth: how often the line of prefixes it ends was continued before.
        num_new_tokens: tokens beyond the deepest prefix known when its request came.
        age_start: admission count when it was stored or last used; -1 when forgotten.
        reached: its class's live counts by age.
        block_id: the full block its checkpoint hangs on, 0: none.
        version: of its newest entry among the slots; older entries are void.
    """

    key: bytes
    boundary_key: bytes
    position: int
    origin: str
    depth: int
    num_new_tokens: int
    age_start: int = 0
    bin: int = 0
    reuse_class: ReuseClass = ()
    reached: list[float] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    block_id: int = 0
    version: int = 0


class BlockTree:
    """
    Attributes:
        num_followers: by block: how many of the blocks right after it lead to a checkpoint.
        hanging: block -> the checkpoints that hang on it.
        tails: block -> the checkpoints whose tail it holds.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_followers = [0] * num_blocks
        self.hanging: dict[int, list[Record]] = {}
        self.tails: dict[int, list[Record]] = {}
        self._serial = [0] * num_blocks
        self._block_at: dict[int, int] = {}
        self._first_link: dict[int, int] = {}
        self._stretch: dict[int, tuple[int, int]] = {}  # where something hung: own blocks, serial of the one before
        self._next_serial = 1

    def store(self, parent_id: int, block_ids: Sequence[int]) -> None:
        """A run of consecutive blocks was published, after ``parent_id`` (0: at the start)."""
        first = self._next_serial
        self._next_serial = end = first + len(block_ids)
        self._first_link[first] = self._serial[parent_id]
        numbers = range(first, end)
        self._block_at.update(zip(numbers, block_ids, strict=True))
        serial = self._serial
        for number, block_id in zip(numbers, block_ids, strict=True):
            serial[block_id] = number

    def remove(self, block_ids: Sequence[int]) -> list[int]:
        """Forget evicted blocks. Returns those that lead to a checkpoint: they must be removed one by one."""
        serials, block_at, first_link = self._serial, self._block_at, self._first_link
        num_followers, hanging = self.num_followers, self.hanging
        leading: list[int] = []
        for block_id in block_ids:
            if num_followers[block_id] or block_id in hanging:
                leading.append(block_id)
                continue
            serial = serials[block_id]
            serials[block_id] = 0
            del block_at[serial]
            if serial in first_link:
                del first_link[serial]
        return leading

    def remove_leading(self, block_id: int) -> tuple[list[int], int]:
        """Forget an evicted block that leads to a checkpoint. Returns the blocks before it that are dead ends now,
        deepest first, and the block before them, which may be a leaf now (0: nothing changed)."""
        self.hanging.pop(block_id, None)
        self.num_followers[block_id] = 0
        dead_ends, leaf = self._collect_dead_ends(block_id)
        self.remove((block_id,))
        return dead_ends[1:], leaf

    def leads_to_checkpoint(self, block_id: int) -> bool:
        """Whether a checkpoint hangs on it or after it, or has its tail in it."""
        return self.num_followers[block_id] > 0 or block_id in self.hanging or block_id in self.tails

    def before(self, block_id: int) -> int:
        """The block right before it, 0 at the start or when it was evicted."""
        serial = self._serial[block_id]
        link = self._first_link.get(serial)
        return self._block_at.get(serial - 1 if link is None else link, 0)

    def own_stretch(self, block_id: int) -> tuple[int, int]:
        """How many blocks lead only to this one, and the block before them. Of a block that leads to a checkpoint, and
        where one hangs or hung."""
        num_own, number = self._stretch.get(block_id, (0, 0))
        return num_own, self._block_at.get(number, 0)

    def add_tail(self, block_id: int, record: Record) -> None:
        self.tails.setdefault(block_id, []).append(record)

    def remove_tail(self, block_id: int, record: Record) -> None:
        _discard(self.tails, block_id, record)

    def hang(self, block_id: int, record: Record) -> tuple[list[int], int]:
        """Returns the blocks that lead to a checkpoint only now, and the block before them, which is no leaf any more
        (0: none)."""
        records = self.hanging.get(block_id)
        if records is not None:
            records.append(record)
            return [], 0
        self.hanging[block_id] = [record]
        if self.num_followers[block_id]:
            count, before = self._measure(block_id)
            self._stretch[block_id] = count, self._serial[before]
            return [], 0
        leading = [block_id]
        num_followers, hanging = self.num_followers, self.hanging
        serials, block_at, first_link = self._serial, self._block_at, self._first_link
        number = serials[block_id]
        while True:
            number = first_link[number] if number in first_link else number - 1
            before = block_at.get(number, 0)
            if not before:
                break
            num_followers[before] += 1
            if num_followers[before] > 1 or before in hanging:
                break
            leading.append(before)
        self._stretch[block_id] = (len(leading), self._serial[before])
        return leading, before

    def unhang(self, block_id: int, record: Record) -> tuple[list[int], int]:
        """Returns the blocks that are dead ends now, deepest first, and the block before them, which may be a leaf."""
        _discard(self.hanging, block_id, record)
        return ([], 0) if block_id in self.hanging else self._collect_dead_ends(block_id)

    def _measure(self, block_id: int) -> tuple[int, int]:
        count, before = 1, self.before(block_id)
        while before and self.num_followers[before] == 1 and before not in self._stretch:
            count, before = count + 1, self.before(before)
        return count, before

    def _collect_dead_ends(self, block_id: int) -> tuple[list[int], int]:
        """From the block backwards: what leads to no checkpoint any more, and the block before."""
        dead_ends: list[int] = []
        num_followers, hanging, stretch = self.num_followers, self.hanging, self._stretch
        block_at, first_link = self._block_at, self._first_link
        number = self._serial[block_id]
        while block_id and not num_followers[block_id] and block_id not in hanging:
            dead_ends.append(block_id)
            if block_id in stretch:
                del stretch[block_id]
            number = first_link[number] if number in first_link else number - 1
            block_id = block_at.get(number, 0)
            num_followers[block_id] -= 1
        num_followers[0] = 0
        return dead_ends, block_id if dead_ends else 0


def _discard(index: dict[int, list[Record]], block_id: int, record: Record) -> None:
    records = index[block_id]
    records.remove(record)
    if not records:
        del index[block_id]
