"""What the cache manager answers: hits, plans, leases and views, as small frozen data.

None of these owns anything. Ids in them are valid until the next call that may free or evict, unless the text says who
pins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.kv_cache.checkpoint import Checkpoint
    from common.kv_cache.keys import PrefixKeys


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a local lookup found; nothing is pinned until ``admit`` (which refuses a hit that went stale in between).

    Attributes:
        num_tokens: resume position; the prompt's length only when ``output_row`` is there (then nothing is computed).
        num_written_tokens: K/V of positions below this is in shared blocks or in the copied tail: ``write_from``.
        block_ids: cached full blocks, left to right; may reach beyond ``num_tokens``.
        num_attention_tokens: tokens in ``block_ids``.
        num_state_tokens: position of the deepest usable-or-not checkpoint of this prefix, whatever attention covers.
        junction: block boundary up to which attention matched deeper than the resume; worth a state save.
        checkpoint: the checkpoint to resume from (or, dense, whose tail is continued).
        output_row: row of the prompt's last position when the hit is exact (``num_tokens`` is the whole prompt).
    """

    num_tokens: int = 0
    num_written_tokens: int = 0
    block_ids: tuple[int, ...] = ()
    num_attention_tokens: int = 0
    num_state_tokens: int = 0
    junction: int | None = None
    checkpoint: Checkpoint | None = None
    output_row: Any | None = None


@dataclass(frozen=True, slots=True)
class RemoteHit:
    """What of a prefix of N tokens is here when the rest may be pulled; nothing is pinned.

    Attributes:
        num_attention_tokens: tokens of K/V that need not be moved: the left run of full blocks, or N when the exact
            checkpoint's tail is here as well. Null positions are never counted.
        num_block_tokens: the full blocks' part of that.
        block_ids: those full blocks.
        has_state: the state at exactly N is here (always true without recurrent layers).
        checkpoint: the checkpoint at exactly N, if any.
        num_marked_tokens: deepest block boundary in the left run whose state was once seen on another node only
            ("remote" null entry): this much of the prefix is here without its state.
    """

    num_attention_tokens: int
    num_block_tokens: int
    block_ids: tuple[int, ...]
    has_state: bool
    checkpoint: Checkpoint | None
    num_marked_tokens: int


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Destinations of one pull, held and unpublished until ``commit_remote`` or ``abandon_remote``.

    Attributes:
        num_tokens: length of the prefix.
        block_pairs: (index in the prompt's block table, local block id) to be read, ascending.
        slot_id: slot to read the state into; 0 when no state is needed.
        num_cached_blocks: real blocks found here, null padding not counted.
    """

    num_tokens: int
    block_pairs: tuple[tuple[int, int], ...]
    slot_id: int
    num_cached_blocks: int

    @property
    def is_empty(self) -> bool:
        return not self.block_pairs and self.slot_id == 0


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """The state after a prompt's last token. ``slot_id`` 0: not kept, or dense. ``is_published``: can be found."""

    num_tokens: int
    key: bytes
    slot_id: int
    tail_block_id: int
    is_published: bool


@dataclass(frozen=True, slots=True)
class LeasedPrefix:
    """A prompt pinned for a remote reader until release or expiry.

    ``block_ids`` cover ``num_tokens`` positions, the tail block last; generations are those at lease time.
    """

    num_tokens: int
    block_ids: tuple[int, ...]
    block_generations: tuple[int, ...]
    slot_id: int
    slot_generation: int
    key: bytes
    output_row: Any | None


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence as the scheduler sees it, at the moment of the call.

    ``block_ids`` is the live table (do not mutate; copy it if kept across calls). ``src_slot`` is the checkpoint's (or
    null) slot before the first step, then the running slot; ``dst_slot`` is the running slot.
    """

    block_ids: Sequence[int]
    write_from: int
    src_slot: int
    dst_slot: int
    num_computed_tokens: int
    num_prompt_tokens: int
    keys: PrefixKeys
