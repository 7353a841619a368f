"""Where a prompt can be resumed: what each group has of a prefix, and what all of them together make of it.

*Local*: the deepest checkpoint (dense models: block boundary) at which every attention group has what going on reads.
*Remote*: the rest comes from a peer, so each group says by itself what it still needs. No lookup changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from common.kv_cache.groups.full_attention import FullAttentionManager
from common.kv_cache.groups.recurrent_state import RecurrentStateManager
from common.kv_cache.groups.single_type import SingleTypeManager
from common.kv_cache.groups.sliding_window import SlidingWindowManager
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.prefix.admitted_prefixes import AdmittedPrefixes
from common.kv_cache.prefix.hits import PrefixHit, RemoteHit
from common.kv_cache.spec import KVCacheConfig


class PrefixLookup:
    def __init__(
        self, config: KVCacheConfig, groups: Sequence[SingleTypeManager], state: RecurrentStateManager
    ) -> None:
        self._config = config
        self._groups = groups
        self._full_groups = [group for group in groups if isinstance(group, FullAttentionManager)]
        self._window_groups = [group for group in groups if isinstance(group, SlidingWindowManager)]
        self._state = state
        self._admitted = (
            AdmittedPrefixes() if config.has_state and config.caches_states and not self._full_groups else None
        )

    def remember(self, keys: PrefixKeys, num_tokens: int) -> None:
        """A prompt of ``num_tokens`` was admitted: where later ones part from it, a state is worth keeping."""
        if self._admitted is not None:
            self._admitted.add(keys, num_tokens)

    def local(self, keys: PrefixKeys, num_tokens: int) -> PrefixHit:
        """Deepest checkpoint that the attention groups cover too. Dense: attention alone, or a deeper tail."""
        if not self._config.enable_prefix_caching or num_tokens == 0:
            return PrefixHit()
        runs = {group.group.group_id: group.left_run(keys, num_tokens) for group in self._full_groups}
        num_blocks = min(map(len, runs.values()), default=num_tokens // keys.block_size)
        num_attention = num_blocks * keys.block_size if runs else 0
        num_state, windowless, found = 0, 0, None
        for checkpoint in self._state.matching(keys, num_tokens):
            is_whole = checkpoint.position == num_tokens
            if is_whole and checkpoint.output_row is None and self._config.has_state:
                continue  # the last token must be computed for its row, and its state cannot be undone
            num_state = max(num_state, checkpoint.position)
            depth = checkpoint.position // keys.block_size
            if self._groups and depth > num_blocks:
                continue
            windowless = max(windowless, checkpoint.position)
            # Without a row the last token is computed again, so a window must reach one token further back.
            has_row = is_whole and checkpoint.output_row is not None
            if self._windows_reach(keys, depth, num_tokens if has_row else min(checkpoint.position, num_tokens - 1)):
                found = checkpoint
                break
        is_exact = found is not None and found.position == num_tokens and found.output_row is not None
        row = found.output_row if found is not None and is_exact else None
        if self._config.has_state or is_exact:
            resume = reach = found.position if found is not None else 0
            known = num_attention if self._admitted is None else self._admitted.depth(keys, num_tokens)
            junction = known if known > resume and not is_exact else None
        else:
            junction = None
            windowless = max(windowless, num_attention)
            depth = self._dense_depth(keys, num_blocks, num_tokens)
            if found is not None and found.position <= depth:
                found = None
            reach = found.position if found is not None else depth
            resume = min(reach, num_tokens - 1)
        tables, written = self._tables(keys, runs, reach // keys.block_size, resume, reach)
        return PrefixHit(
            num_tokens=resume,
            tables=tables,
            num_written=written,
            num_attention_tokens=num_attention,
            num_state_tokens=num_state,
            num_windowless_tokens=max(resume, min(windowless, num_tokens - 1)),
            junction=junction,
            checkpoint=found,
            output_row=row,
        )

    def _windows_reach(self, keys: PrefixKeys, num_blocks: int, position: int) -> bool:
        """Whether every sliding window has what going on at ``position`` reads within ``num_blocks`` full blocks."""
        return all(group.find(keys, num_blocks, position) is not None for group in self._window_groups)

    def _dense_depth(self, keys: PrefixKeys, num_blocks: int, num_tokens: int) -> int:
        """Deepest block boundary from which the attention groups alone can go on, in tokens."""
        if not self._groups:
            return 0
        size = keys.block_size
        for depth in range(num_blocks, 0, -1):
            if self._windows_reach(keys, depth, min(depth * size, num_tokens - 1)):
                return depth * size
        return 0

    def _tables(
        self, keys: PrefixKeys, runs: dict[int, list[int]], num_blocks: int, resume: int, reach: int
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Per group: its cached blocks (a full group's whole run), and the position below which rows exist."""
        tables, written = [], []
        for group in self._groups:
            run = runs.get(group.group.group_id)
            if run is None:
                run = group.find(keys, num_blocks, resume) or []
                written.append(reach)
            else:
                written.append(max(reach, len(run) * keys.block_size))
            tables.append(tuple(run))
        return tuple(tables), tuple(written)

    def remote(self, keys: PrefixKeys, num_tokens: int) -> RemoteHit:
        """Each group by itself: the runs of the groups that keep everything set what is reused, a window looks for the
        blocks of its last window; null entries never count."""
        first_needed = tuple(group.first_needed(num_tokens) for group in self._groups)
        if not self._config.enable_prefix_caching:
            return RemoteHit(0, 0, ((),) * len(self._groups), first_needed, not self._config.has_state, None, 0)
        num_blocks, num_tail = divmod(num_tokens, keys.block_size)
        checkpoint = self._state.get(keys.key_at(num_tokens))
        tables: list[tuple[int, ...]] = []
        for group, first in zip(self._groups, first_needed, strict=True):
            if isinstance(group, FullAttentionManager):
                tables.append(tuple(group.left_run(keys, num_tokens)))
            else:
                indices = range(num_blocks)
                tables.append(tuple(group.get(keys.boundary_key(i + 1)) if i >= first else 0 for i in indices))
        runs = [tables[group.group.group_id] for group in self._full_groups]
        num_run = min(map(len, runs), default=0)
        num_attention = num_run * keys.block_size
        if num_tail and checkpoint is not None and checkpoint.tail_block_ids and num_run == num_blocks:
            num_attention = num_tokens
        marked = 0
        if self._full_groups:
            for index in range(num_run, 0, -1):
                if self._full_groups[0].is_marked(runs[0][index - 1]):
                    marked = index * keys.block_size
                    break
        has_state = not self._config.has_state or checkpoint is not None
        counted = runs or [tuple(takewhile(bool, table)) for table in tables]
        num_run_tokens = min(map(len, counted), default=0) * keys.block_size
        return RemoteHit(num_attention, num_run_tokens, tuple(tables), first_needed, has_state, checkpoint, marked)

    def is_current(self, hit: PrefixHit, keys: PrefixKeys) -> bool:
        """Whether everything a lookup found is still where it was."""
        if hit.checkpoint is not None and not hit.checkpoint.is_published:
            return False
        tables = zip(self._groups, hit.tables, strict=False)
        return all(group.is_current(keys, table) for group, table in tables)
