"""Which states are kept: the modes of ``--mamba-cache-mode`` as functions from a prompt, or a step, to exact positions.

- ``none``: no state is published; a sequence holds exactly its running slot.
- ``align``: the block-aligned end of each step; prompt chunks are cut so that they end there (``chunk_size``).
- ``all``: every block boundary a step passes, in one forward.
- ``auto``: a handful of positions that will be asked for again: the prompt's end, semantic boundaries on first
  sighting, the junction where attention matched deeper than any state; a sparse grid when a retention interval is set.

In ``all`` and ``align`` the retention interval declines boundaries: one per interval stays, plus the prompt's latest
replay boundary (the last one below its last token) and the junction. It never adds any.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from common.kv_cache.spec import KVCacheConfig

MAX_SEMANTIC_SAVES = 8
"""Semantic boundaries of one prompt that get a state: states are large, and earlier turns got theirs when they were
new."""


class SavePolicy:
    def __init__(self, config: KVCacheConfig) -> None:
        self._mode = config.mamba_cache_mode
        self._block_size = config.block_size
        self._interval = config.retention_interval
        self._saves_states = config.has_state and config.caches_states

    @property
    def is_by_block(self) -> bool:
        """Whether states are kept at block boundaries only."""
        return self._saves_states and self._mode in ("all", "align")

    def replay_boundary(self, num_prompt_tokens: int) -> int:
        """Deepest block boundary from which the prompt's last token is still computed."""
        return max(0, num_prompt_tokens - 1) // self._block_size * self._block_size

    def keeps_end(self, num_prompt_tokens: int) -> bool:
        """Whether a state at the prompt's exact end is worth a slot of its own."""
        if self.is_by_block:
            return num_prompt_tokens % self._block_size == 0 and self._retains(num_prompt_tokens, num_prompt_tokens)
        return True

    def prompt_positions(
        self, num_prompt_tokens: int, resume: int, junction: int | None, boundaries: Sequence[int] = ()
    ) -> dict[int, str]:
        """Position -> why, for what of the prompt is still to be computed: what lies behind ``resume``. ``junction``:
        as in ``PrefixHit``. ``boundaries``: most valuable first."""
        if not self._saves_states:
            return {}
        wanted: dict[int, str] = {}
        if self.is_by_block:
            size = self._block_size
            step = self._interval or size
            for position in range(resume // step * step + step, num_prompt_tokens + 1, step):
                wanted[position] = "grid"
            replay = self.replay_boundary(num_prompt_tokens)
            if replay > resume:
                wanted.setdefault(replay, "grid")
        else:
            if self._interval:
                for position in range(resume // self._interval * self._interval, num_prompt_tokens, self._interval):
                    wanted[position] = "grid"
            inside = [position for position in dict.fromkeys(boundaries) if resume < position < num_prompt_tokens]
            wanted.update(dict.fromkeys(inside[:MAX_SEMANTIC_SAVES], "semantic"))
            wanted[num_prompt_tokens] = "prompt_end"
        if junction is not None:
            wanted.setdefault(junction, "junction")
        return {position: origin for position, origin in wanted.items() if position > resume}

    def step_positions(
        self, num_prompt_tokens: int, start: int, end: int, wanted: Mapping[int, str] | Collection[int]
    ) -> dict[int, str]:
        """Of ``wanted``, what the step (start, end] can keep, and the boundaries it passes while generating.

        Deepest first: when slots are short it is the deep ones that stay.
        """
        if not self._saves_states and not wanted:
            return {}
        origins = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted, "save")
        positions = {position: origin for position, origin in origins.items() if start < position <= end}
        if self.is_by_block:
            step = self._interval or self._block_size
            for position in range(max(start, num_prompt_tokens) // step * step + step, end + 1, step):
                positions.setdefault(position, "grid")
            if self._mode == "align":
                aligned = end if end % self._block_size == 0 else 0
                positions = {position: origin for position, origin in positions.items() if position == aligned}
        return dict(sorted(positions.items(), reverse=True))

    def chunk_size(self, start: int, num_tokens: int, num_known_tokens: int) -> int:
        """How many of the next ``num_tokens`` tokens to run in one step, when ``num_known_tokens`` are there to run;
        at least 1.

        ``align``: every chunk but the last ends on a multiple of the block size, the one before the last at the replay
        boundary. A budget that reaches no boundary is used as it is (a prompt never waits for a larger budget); that
        chunk leaves no state, and the next one ends on a boundary again. Other modes never cut.
        """
        if self._mode != "align" or not self._saves_states:
            return num_tokens
        end = min(start + num_tokens, num_known_tokens)
        replay = self.replay_boundary(num_known_tokens)
        if end == num_known_tokens:
            return (replay if start < replay else end) - start
        aligned = end // self._block_size * self._block_size
        return (aligned if aligned > start else end) - start

    def max_drafts(self, num_known_tokens: int, num_drafts: int) -> int:
        """How many of ``num_drafts`` may run behind ``num_known_tokens``. ``align``: none of them behind a boundary,
        whose state is that at the end of a step."""
        if self._mode != "align" or not self._saves_states:
            return num_drafts
        return min(num_drafts, -num_known_tokens % self._block_size)

    def window_positions(self, start: int, end: int, num_prompt_tokens: int) -> list[int] | None:
        """Positions in (start, end] at which a sliding window stays resumable, besides those of checkpoints; None:
        all."""
        if self._interval is None:
            return None
        first = start // self._interval * self._interval + self._interval
        positions = list(range(first, end + 1, self._interval))
        replay = self.replay_boundary(num_prompt_tokens)
        return [*positions, replay] if start < replay <= end else positions

    def _retains(self, position: int, num_prompt_tokens: int) -> bool:
        if self._interval is None or position % self._interval == 0:
            return True
        return position == self.replay_boundary(num_prompt_tokens)
