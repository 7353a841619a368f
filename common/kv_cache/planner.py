"""How many blocks and slots a memory budget buys, and what that means in sequences, tokens and resumable prefixes.

Each group is sized by itself: a block by its attention layers, a slot by the recurrent layers, none padded to another.
A recurrent layer needs O(1) per sequence, so concurrency is never computed from the longest context for it; a sliding
window needs the blocks of its window per sequence and per resumable position. What cannot run is refused with the
flag's name and the smallest value that works.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError
from common.kv_cache.eviction.base import EVICTION_POLICIES
from common.kv_cache.layout import Layout, make_layout
from common.kv_cache.spec import GroupKind, KVCacheConfig, KVCacheGroup, ModelGeometry

SLOT_SHARE = 0.2
"""Part of the bytes for states when prefixes are cached. On 3,000 requests of a production chat trace
(Qwen3.5-35B-A3B, policy ``value``, 40 and 160 GiB, blocks of 128) 0.15 gave 11.3 and 22.0 % of prompt tokens, 0.2 gave
11.4 and 22.6 %, 0.25 gave 11.0 and 22.3 %."""

MAMBA_CACHE_MODES = ("auto", "all", "align", "none")
"""``common.kv_cache.checkpoints.save_policy`` says what they keep. The first is the default."""


@dataclass(frozen=True, slots=True)
class GroupCapacity:
    """One attention group: blocks without the null entry."""

    label: str
    num_blocks: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """The arithmetic of one plan. Counts are without the null entries; ``used_bytes`` includes them. Bytes are those of
    each of ``num_ranks``, which have the same blocks and slots."""

    block_size: int
    groups: tuple[GroupCapacity, ...]
    slot_bytes: int
    num_slots: int
    num_running_slots: int
    memory_bytes: int
    used_bytes: int
    max_model_len: int
    max_num_seqs: int
    is_dense: bool
    num_ranks: int = 1

    @property
    def num_tokens(self) -> int:
        """Positions that fit in the first attention group, which reaches furthest; states and windows do not grow with
        them."""
        return self.groups[0].num_blocks * self.block_size if self.groups else 0

    @property
    def num_full_sequences(self) -> int:
        """Sequences of ``max_model_len`` that can run at once."""
        if not self.groups:
            return self.max_num_seqs
        return min(self.max_num_seqs, self.num_tokens // self.block_size // -(-self.max_model_len // self.block_size))

    @property
    def num_resumable_prefixes(self) -> int:
        """States that can stay cached while ``max_num_seqs`` sequences run."""
        return max(0, self.num_slots - self.num_running_slots)

    def __str__(self) -> str:
        first = self.groups[0] if self.groups else GroupCapacity("attention", 0, 0)
        each = _per_rank(self.num_ranks)
        lines = [
            f"KV cache memory{each}: {_size(self.used_bytes)} used of {_size(self.memory_bytes)}",
            f"  blocks: {first.num_blocks} + null x {_size(first.block_bytes)} ({self.block_size} tokens each)"
            f" = {_size((first.num_blocks + 1) * first.block_bytes)}{each}: {self.num_tokens} tokens of K/V",
        ]
        lines += [
            f"  {other.label} blocks: {other.num_blocks} + null x {_size(other.block_bytes)}"
            f" = {_size((other.num_blocks + 1) * other.block_bytes)}{each}"
            for other in self.groups[1:]
        ]
        if not self.is_dense:
            lines.append(
                f"  slots: {self.num_slots} + null x {_size(self.slot_bytes)}"
                f" = {_size((self.num_slots + 1) * self.slot_bytes)}{each}:"
                f" {self.num_running_slots} for running sequences, {self.num_resumable_prefixes} resumable prefixes"
            )
        lines.append(
            f"  at most {self.max_num_seqs} sequences; {self.num_full_sequences} of {self.max_model_len} tokens at once"
        )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class CachePlan:
    config: KVCacheConfig
    report: CapacityReport


def plan_cache(
    geometry: ModelGeometry,
    *,
    kv_cache_memory_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    root_key: bytes,
    enable_prefix_caching: bool = True,
    mamba_cache_mode: str = "auto",
    eviction_policy: str = EVICTION_POLICIES[0],
    retention_interval: int | None = None,
    slot_share: float | None = None,
    enable_events: bool = False,
    has_two_states: bool = False,
) -> CachePlan:
    """Sizes of all pools. ``slot_share``: part of the bytes for states, None for the default. ``has_two_states``:
    running sequences keep a second one: to go back to from drafts, or because steps are launched ahead.

    Raises ConfigError for values out of range, and when the memory does not hold one sequence of ``max_model_len`` with
    a spare block per attention group, plus a running slot for each of ``max_num_seqs`` sequences with a spare slot.
    """
    _validate(max_num_seqs, max_model_len, block_size, mamba_cache_mode, eviction_policy)
    _validate_shares(block_size, retention_interval, slot_share)
    layout, groups = make_layout(geometry, block_size), geometry.attention_groups
    has_state = bool(geometry.state_layers)
    caches = enable_prefix_caching
    # The spare blocks and slot let one prompt's end be kept, or forked, while everything else is in use.
    min_blocks = -(-max_model_len // block_size) + 1 if groups else 0
    running_slots = max_num_seqs * (2 if has_two_states else 1) + 1 if has_state else 0
    all_block_bytes = sum(layout.group_block_bytes)
    null_bytes = all_block_bytes + layout.slot_bytes
    needed_bytes = null_bytes + min_blocks * all_block_bytes + running_slots * layout.slot_bytes
    if kv_cache_memory_bytes < needed_bytes:
        each = _per_rank(geometry.num_ranks)
        # A node's least is 2, and a replay of a trace plans for 1.
        shorter = f", and less with a --max-model-len below {max_model_len}" if groups and max_model_len > 2 else ""
        raise ConfigError(
            f"--kv-cache-memory {kv_cache_memory_bytes}{each} is too small: one sequence of {max_model_len} tokens"
            f" needs {min_blocks} blocks of {all_block_bytes} bytes, {max_num_seqs} sequences need {running_slots}"
            f" slots of {layout.slot_bytes} bytes; the smallest value that works is {needed_bytes}{shorter}",
            param="--kv-cache-memory",
        )
    budget = kv_cache_memory_bytes - null_bytes
    num_slots = 0
    if has_state:
        num_slots = _num_slots(
            budget, all_block_bytes, layout.slot_bytes, min_blocks, running_slots, max_num_seqs,
            share=SLOT_SHARE if slot_share is None else slot_share,
            caches_states=caches and mamba_cache_mode != "none",
        )  # fmt: skip
    num_blocks = _group_blocks(
        layout, groups, budget - num_slots * layout.slot_bytes, block_size, min_blocks, max_num_seqs,
        retention_interval if caches else max_model_len,
    )  # fmt: skip
    config = KVCacheConfig(
        geometry=geometry,
        block_size=block_size,
        num_blocks=tuple(count + 1 for count in num_blocks),
        num_slots=num_slots + 1,
        root_key=root_key,
        enable_prefix_caching=caches,
        mamba_cache_mode=mamba_cache_mode,
        eviction_policy=eviction_policy,
        retention_interval=retention_interval,
        enable_events=enable_events,
    )
    report = CapacityReport(
        block_size=block_size,
        groups=tuple(
            GroupCapacity(group.label, count, layout.group_block_bytes[group.group_id])
            for group, count in zip(groups, num_blocks, strict=True)
        ),
        slot_bytes=layout.slot_bytes,
        num_slots=num_slots,
        num_running_slots=min(num_slots, running_slots),
        memory_bytes=kv_cache_memory_bytes,
        used_bytes=null_bytes
        + num_slots * layout.slot_bytes
        + sum(count * size for count, size in zip(num_blocks, layout.group_block_bytes, strict=True)),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        is_dense=not has_state,
        num_ranks=geometry.num_ranks,
    )
    return CachePlan(config, report)


def _group_blocks(
    layout: Layout,
    groups: tuple[KVCacheGroup, ...],
    budget: int,
    block_size: int,
    min_blocks: int,
    max_num_seqs: int,
    retention_interval: int | None,
) -> list[int]:
    """Blocks per attention group.

    Groups that keep everything get the same number of blocks. A window is resumable once per retention interval and
    needs its own blocks there, besides those of the running sequences: a fraction of the others' blocks. Without an
    interval, or without a group that keeps everything, its blocks are as many as the others'.
    """
    if not groups:
        return []
    fractions, fixed = [], []
    keeps_all = any(group.kind is not GroupKind.SLIDING_WINDOW for group in groups)
    for group in groups:
        window_blocks = -(-(group.window - 1) // block_size) if group.window else 0
        is_sparse = keeps_all and group.window > 0 and retention_interval is not None
        if is_sparse and window_blocks * block_size < (retention_interval or 0):
            fractions.append(window_blocks * block_size / (retention_interval or 1))
            fixed.append(min_blocks + max_num_seqs * (window_blocks + 1))
        else:
            fractions.append(1.0)
            fixed.append(0)
    sizes = layout.group_block_bytes
    free = budget - sum(count * size for count, size in zip(fixed, sizes, strict=True))
    base = max(0, int(free / sum(part * size for part, size in zip(fractions, sizes, strict=True))))
    counts = [max(min_blocks, int(base * part) + count) for part, count in zip(fractions, fixed, strict=True)]
    if sum(count * size for count, size in zip(counts, sizes, strict=True)) > budget:
        return [min_blocks] * len(groups)
    return counts


def _num_slots(
    budget: int,
    block_bytes: int,
    slot_bytes: int,
    min_blocks: int,
    running_slots: int,
    max_num_seqs: int,
    *,
    share: float,
    caches_states: bool,
) -> int:
    """Running slots first, then a share for checkpoints (without caching: for prompts that wait for their reader)."""
    affordable = (budget - min_blocks * block_bytes) // slot_bytes
    shared = int(budget * share) // slot_bytes if block_bytes else affordable
    if caches_states:
        # More checkpoints than blocks to hang them on are of no use.
        most = running_slots + budget // block_bytes if block_bytes else affordable
    else:
        most = running_slots + max_num_seqs
    return max(running_slots, min(shared, most, affordable))


def _validate(
    max_num_seqs: int, max_model_len: int, block_size: int, mamba_cache_mode: str, eviction_policy: str
) -> None:
    for flag, value in (
        ("--max-num-seqs", max_num_seqs),
        ("--max-model-len", max_model_len),
        ("--block-size", block_size),
    ):
        if value < 1:
            raise ConfigError(f"{flag} {value} must be at least 1", param=flag)
    for flag, word, known in (
        ("--mamba-cache-mode", mamba_cache_mode, MAMBA_CACHE_MODES),
        ("--eviction-policy", eviction_policy, EVICTION_POLICIES),
    ):
        if word not in known:
            raise ConfigError(f"{flag} {word!r} is not available; available: {', '.join(known)}", param=flag)


def _validate_shares(block_size: int, retention_interval: int | None, slot_share: float | None) -> None:
    if retention_interval is not None and (retention_interval <= 0 or retention_interval % block_size):
        flag = "--prefix-cache-retention-interval"
        raise ConfigError(
            f"{flag} {retention_interval} must be a positive multiple of --block-size {block_size}", param=flag
        )
    if slot_share is not None and not 0 < slot_share < 1:
        flag = "--state-memory-share"
        raise ConfigError(f"{flag} {slot_share} must be above 0 and below 1", param=flag)


def _per_rank(num_ranks: int) -> str:
    return " per rank" if num_ranks > 1 else ""


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
