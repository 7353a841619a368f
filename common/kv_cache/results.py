"""What the cache manager answers: hits, plans, leases and views, as small frozen data.

None of these owns anything. Ids in them are valid until the next call that may free or evict, unless the text says who
pins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.kv_cache.checkpoints.checkpoint import Checkpoint
    from common.kv_cache.keys import PrefixKeys
    from common.kv_cache.sequences.allocation import BlockTable

Tables = tuple[tuple[int, ...], ...]
"""Per attention group, one entry per block."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a local lookup found; nothing is pinned until ``admit`` (which refuses a hit that went stale in between).

    Attributes:
        num_tokens: resume position; the prompt's length only when ``output_row`` is there (then nothing is computed).
        tables: per attention group, the cached full blocks left to right, null where a window does not reach; a
            group that keeps everything may reach beyond ``num_tokens``.
        num_written: per attention group, rows of positions below this are in shared blocks or in the copied tail.
        num_attention_tokens: tokens in cached full blocks, as far as every group that keeps everything has them.
        num_state_tokens: position of the deepest usable-or-not checkpoint of this prefix, whatever attention covers.
        num_windowless_tokens: where the resume would be if sliding windows were no matter.
        junction: block boundary up to which attention matched deeper than the resume (an earlier prompt, where no group
            keeps everything); worth a state save.
        checkpoint: the checkpoint to resume from (or, dense, whose tail is continued).
        output_row: row of the prompt's last position when the hit is exact (``num_tokens`` is the whole prompt).
    """

    num_tokens: int = 0
    tables: tuple[tuple[int, ...], ...] = ()
    num_written: tuple[int, ...] = ()
    num_attention_tokens: int = 0
    num_state_tokens: int = 0
    num_windowless_tokens: int = 0
    junction: int | None = None
    checkpoint: Checkpoint | None = None
    output_row: Any | None = None


@dataclass(frozen=True, slots=True)
class RemoteHit:
    """What of a prefix of N tokens is here when the rest may be pulled; nothing is pinned.

    Attributes:
        num_attention_tokens: tokens of K/V that need not be moved: the left run of full blocks (of every group that
            keeps everything), or N when the exact checkpoint's tail is here as well. Null positions are never counted.
        num_run_tokens: the full blocks' part of that (of every group, where none keeps everything).
        tables: per attention group, the prefix's full blocks that are here, 0 where one must be read or none is needed.
        first_needed: per attention group, index of the first block that is needed at N.
        has_state: the state at exactly N is here (always true without recurrent layers).
        checkpoint: the checkpoint at exactly N, if any.
        num_marked_tokens: deepest block boundary in the left run whose state was once seen on another node only
            ("remote" null entry): this much of the prefix is here without its state.
    """

    num_attention_tokens: int
    num_run_tokens: int
    tables: tuple[tuple[int, ...], ...]
    first_needed: tuple[int, ...]
    has_state: bool
    checkpoint: Checkpoint | None
    num_marked_tokens: int


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Destinations of one pull, held and unpublished until ``commit_remote`` or ``abandon_remote``.

    Attributes:
        num_tokens: length of the prefix.
        pairs: per attention group, (index in the prompt's block table, local block id) to be read, ascending.
        slot_id: slot to read the state into; 0 when no state is needed.
        num_local_tokens: of the prefix, what was found here: its K/V as far as the groups that keep everything have it
            (without attention layers: all or nothing, as its state is here or not). Null positions are never counted.
    """

    num_tokens: int
    pairs: tuple[tuple[tuple[int, int], ...], ...]
    slot_id: int
    num_local_tokens: int

    @property
    def is_empty(self) -> bool:
        return not any(self.pairs) and self.slot_id == 0


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """The state after a prompt's last token. ``slot_id`` 0: not kept, or dense. ``tail_block_ids``: per attention
    group, () on a block boundary. ``is_published``: can be found."""

    num_tokens: int
    key: bytes
    slot_id: int
    tail_block_ids: tuple[int, ...]
    is_published: bool


@dataclass(frozen=True, slots=True)
class LeasedPrefix:
    """A prefix pinned for a remote reader until release or expiry.

    ``tables`` cover ``num_tokens`` positions per attention group, the tail block last, null below a window;
    generations are those at lease time (0 for a null entry). ``output_row``: when the prefix is a whole prompt.
    """

    num_tokens: int
    tables: Tables
    generations: Tables
    slot_id: int
    slot_generation: int
    key: bytes
    output_row: Any | None


@dataclass(frozen=True, slots=True)
class PrefixProgress:
    """The full blocks of a prompt that are computed while the rest still is: ``num_tokens`` tokens from the start, a
    whole number of blocks. Not leased: valid as long as the generations stay."""

    num_tokens: int
    tables: Tables
    generations: Tables


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
