"""Names of the memory that a node registers for its peers, and the pool that each region is. Both ends of a transfer
use these names.

Every attention group has a region of blocks and one of their generations; the state slots have one region, and their
generations another. The first group's names carry no number.
"""

from __future__ import annotations

SLOTS, SLOT_GENERATIONS = "slots", "slot_generations"


def block_region(group_id: int) -> str:
    """Blocks of an attention group; also the name of its pool in the generation tables."""
    return f"blocks_{group_id}" if group_id else "blocks"


def block_generations_region(group_id: int) -> str:
    return f"block_generations_{group_id}" if group_id else "block_generations"
