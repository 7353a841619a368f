"""A named state at an exact token position: from here a sequence can go on as if it had computed everything before.

Life cycle: 1 made from a slot that was written (a planned save, a running slot, a pulled slot), 2 published (found by
others) or private (only its makers know it), 3 pinned by those who read its slot or tail, 4 unpinned, 5 evicted; a
private one vanishes with its last pin. A pin holds the slot and the tail block, never the full blocks below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Checkpoint:
    """
    Attributes:
        key: key of the prefix of ``position`` tokens.
        boundary_key: key of the last full block boundary at or below ``position`` (the chain's root at 0).
        tail_tokens: the tokens from that boundary to ``position``, as ``PrefixKeys.content`` compares them.
        slot_id: the state; 0 for dense models.
        tail_block_ids: per attention group, the block whose first ``len(tail_tokens)`` rows are the tail; () on a
            boundary.
        origin: why it was kept: prompt_end, semantic, junction, grid, donated, pulled (or save).
        output_row: hidden vector after the final norm of position - 1, when ``position`` ended a prompt.
        num_pins, num_leases: users, by sequences and by leases.
        last_use: the index's use counter at the last hit.
        history: of the prompt it was made from, as in ``PrefixKeys``.
    """

    key: bytes
    position: int
    boundary_key: bytes
    tail_tokens: tuple[int, ...]
    slot_id: int
    tail_block_ids: tuple[int, ...]
    origin: str
    output_row: Any | None = None
    num_pins: int = 0
    num_leases: int = 0
    last_use: int = 0
    is_published: bool = False
    history: tuple[int, int] = (0, 0)

    @property
    def is_pinned(self) -> bool:
        return self.num_pins > 0 or self.num_leases > 0
