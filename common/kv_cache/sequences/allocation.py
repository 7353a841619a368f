"""The cache's record of one running sequence: what it holds and how far it has got.

Every id in ``tables`` is held once, the running slot ``dst_slot`` and ``other_slot`` once, each planned save slot once,
and each slot of ``rollback`` too; ``src_checkpoint`` and ``prompt_end`` are pinned once each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.keys import PrefixKeys


@dataclass(slots=True)
class BlockTable:
    """One attention group's part.

    Attributes:
        block_ids: by block index; null (0) below a window.
        write_from: rows of positions below this exist already and are not written again.
        num_published: full blocks whose content is final and tagged: published, found, declined, or lost to a first
            publisher. Real blocks only: null padding never counts.
        first_block: entries below this are null: the window has left them.
    """

    block_ids: list[int] = field(default_factory=list)
    write_from: int = 0
    num_published: int = 0
    first_block: int = 0


@dataclass(slots=True)
class Allocation:
    """
    Attributes:
        tables: one per attention group.
        other_slot: of a sequence with steps that are launched ahead, which read one of its two slots and write the
            other: the one that does not hold the state after ``num_computed_tokens``. 0: it had no such step.
        src_checkpoint: what the next step reads its state from, until that step completed.
        prompt_end: kept end of the prompt, until the first step beyond it completed.
        saves: planned position -> slot and why.
        rollback: of a step that runs drafted tokens: position -> slot of the state that it can go back to.
        pull: set while the sequence waits for a remote prefix.
        is_sealed: its running memory became the prompt's end; it runs no further step.
    """

    seq_id: str
    keys: PrefixKeys
    num_prompt_tokens: int
    tables: tuple[BlockTable, ...]
    num_computed_tokens: int = 0
    src_slot: int = 0
    dst_slot: int = 0
    other_slot: int = 0
    src_checkpoint: Checkpoint | None = None
    prompt_end: Checkpoint | None = None
    saves: dict[int, Save] = field(default_factory=dict)
    rollback: dict[int, int] = field(default_factory=dict)
    pull: Pull | None = None
    is_sealed: bool = False

    @property
    def owns_state(self) -> bool:
        """Whether the running slot holds the state after ``num_computed_tokens`` (false before the first step)."""
        return self.src_slot == self.dst_slot


@dataclass(frozen=True, slots=True)
class Save:
    """A slot that a step writes the state at some position to, and why it is kept."""

    slot_id: int
    origin: str


@dataclass(frozen=True, slots=True)
class Pull:
    """Destinations of a read in progress: table indices of the blocks per attention group, and the slot (0: none)."""

    indices: tuple[tuple[int, ...], ...]
    slot_id: int


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence as the scheduler sees it, at the moment of the call.

    ``tables`` are the live block tables, one per attention group (do not mutate; copy them if kept across calls), null
    where a window does not reach; rows of positions below ``write_from`` are there already. ``src_slot`` is the
    checkpoint's (or null) slot before the first step, then the running slot; ``dst_slot`` is the running slot.
    """

    tables: Sequence[BlockTable]
    src_slot: int
    dst_slot: int
    num_computed_tokens: int
    num_prompt_tokens: int
    keys: PrefixKeys
