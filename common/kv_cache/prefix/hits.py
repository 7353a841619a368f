"""What a lookup found of a prefix, as plain data.

A hit owns nothing: its ids are valid until the next call that may free or evict. Nothing is pinned before ``admit`` or
``accept_remote``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.kv_cache.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a local lookup found; nothing is pinned until ``admit`` (which refuses a hit that went stale in between).

    Attributes:
        num_tokens: resume position; the prompt's length only when ``output_row`` is there (then nothing is computed).
        tables: per attention group, the cached full blocks left to right, null where a window does not reach; a
            group that keeps everything may reach beyond ``num_tokens``.
        num_written: per attention group, rows of positions below this are in shared blocks or in the copied tail.
        num_attention_tokens: tokens in cached full blocks, as far as every group that keeps everything has them.
        num_state_tokens: position of the deepest checkpoint of this prefix, also where attention does not reach it.
        num_windowless_tokens: where the resume would be if the sliding windows had all their blocks.
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
