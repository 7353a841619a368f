"""How many blocks and slots a memory budget buys, and what that means in sequences, tokens and resumable prefixes.

Each kind is sized by itself: a block by the attention layers, a slot by the recurrent layers, neither padded to the
other. A recurrent layer needs O(1) per sequence, so concurrency is never computed from the longest context for it. What
cannot run is refused with the flag's name and the smallest value that works.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError
from common.kv_cache.layout import make_layout
from common.kv_cache.spec import KVCacheConfig, ModelGeometry

SLOT_SHARE = 0.25
"""Part of the bytes for states when prefixes are cached: 20-30 % did best on a production chat trace."""

MAMBA_CACHE_MODES = ("auto", "none")
EVICTION_POLICIES = ("lru",)


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """The arithmetic of one plan. Counts are without the null entries; ``used_bytes`` includes them."""

    block_size: int
    block_bytes: int
    slot_bytes: int
    num_blocks: int
    num_slots: int
    num_running_slots: int
    memory_bytes: int
    used_bytes: int
    max_model_len: int
    max_num_seqs: int
    is_dense: bool
    has_attention: bool

    @property
    def num_tokens(self) -> int:
        """K/V positions that fit; recurrent layers need none."""
        return self.num_blocks * self.block_size

    @property
    def num_full_sequences(self) -> int:
        """Sequences of ``max_model_len`` that can run at once."""
        by_blocks = self.num_blocks // -(-self.max_model_len // self.block_size) if self.has_attention else None
        limits = [self.max_num_seqs] if by_blocks is None else [self.max_num_seqs, by_blocks]
        return min(limits)

    @property
    def num_resumable_prefixes(self) -> int:
        """States that can stay cached while ``max_num_seqs`` sequences run."""
        return max(0, self.num_slots - self.num_running_slots)

    def __str__(self) -> str:
        lines = [
            f"KV cache memory: {_size(self.used_bytes)} used of {_size(self.memory_bytes)}",
            f"  blocks: {self.num_blocks} + null x {_size(self.block_bytes)} ({self.block_size} tokens each)"
            f" = {_size((self.num_blocks + 1) * self.block_bytes)}: {self.num_tokens} tokens of K/V",
        ]
        if not self.is_dense:
            lines.append(
                f"  slots: {self.num_slots} + null x {_size(self.slot_bytes)}"
                f" = {_size((self.num_slots + 1) * self.slot_bytes)}: {self.num_running_slots} for running sequences,"
                f" {self.num_resumable_prefixes} resumable prefixes"
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
    eviction_policy: str = "lru",
) -> CachePlan:
    """Sizes of both pools.

    Raises ConfigError when the memory does not hold one sequence of ``max_model_len`` with a spare block, plus a
    running slot for each of ``max_num_seqs`` sequences with a spare slot.
    """
    _validate(max_num_seqs, max_model_len, block_size, mamba_cache_mode, eviction_policy)
    layout = make_layout(geometry, block_size)
    has_attention, has_state = bool(geometry.attention_layers), bool(geometry.state_layers)
    # The spare block and slot let one prompt's end be kept, or forked, while everything else is in use.
    min_blocks = -(-max_model_len // block_size) + 1 if has_attention else 0
    running_slots = max_num_seqs + 1 if has_state else 0
    null_bytes = layout.block_bytes + layout.slot_bytes
    needed_bytes = null_bytes + min_blocks * layout.block_bytes + running_slots * layout.slot_bytes
    if kv_cache_memory_bytes < needed_bytes:
        raise ConfigError(
            f"--kv-cache-memory {kv_cache_memory_bytes} is too small: one sequence of {max_model_len} tokens needs"
            f" {min_blocks} blocks of {layout.block_bytes} bytes, {max_num_seqs} sequences need {running_slots} slots"
            f" of {layout.slot_bytes} bytes; the smallest value that works is {needed_bytes}",
            param="--kv-cache-memory",
        )
    budget = kv_cache_memory_bytes - null_bytes
    num_slots = 0
    if has_state:
        num_slots = _num_slots(
            budget, layout.block_bytes, layout.slot_bytes, min_blocks, running_slots, max_num_seqs,
            caches_states=enable_prefix_caching and mamba_cache_mode != "none",
        )  # fmt: skip
    num_blocks = (budget - num_slots * layout.slot_bytes) // layout.block_bytes if has_attention else 0
    config = KVCacheConfig(
        geometry=geometry,
        block_size=block_size,
        num_blocks=num_blocks + 1,
        num_slots=num_slots + 1,
        root_key=root_key,
        enable_prefix_caching=enable_prefix_caching,
        mamba_cache_mode=mamba_cache_mode,
        eviction_policy=eviction_policy,
    )
    report = CapacityReport(
        block_size=block_size,
        block_bytes=layout.block_bytes,
        slot_bytes=layout.slot_bytes,
        num_blocks=num_blocks,
        num_slots=num_slots,
        num_running_slots=min(num_slots, running_slots),
        memory_bytes=kv_cache_memory_bytes,
        used_bytes=(num_blocks + 1) * layout.block_bytes + (num_slots + 1) * layout.slot_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        is_dense=not has_state,
        has_attention=has_attention,
    )
    return CachePlan(config, report)


def _num_slots(
    budget: int,
    block_bytes: int,
    slot_bytes: int,
    min_blocks: int,
    running_slots: int,
    max_num_seqs: int,
    *,
    caches_states: bool,
) -> int:
    """Running slots first, then a share for checkpoints (without caching: for prompts to be handed over)."""
    affordable = (budget - min_blocks * block_bytes) // slot_bytes
    share = int(budget * SLOT_SHARE) // slot_bytes if block_bytes else affordable
    if caches_states:
        # More checkpoints than blocks to hang them on are of no use.
        most = running_slots + budget // block_bytes if block_bytes else affordable
    else:
        most = running_slots + max_num_seqs
    return max(running_slots, min(share, most, affordable))


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


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
