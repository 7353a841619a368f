"""What each layer keeps between tokens, as data. No torch: dtypes are names.

A KV cache *group* is all layers that keep the same thing for the same tokens. Each attention group (full attention,
MLA latents, sliding windows of one size) has a block pool of its own: a block is what ``block_size`` tokens leave in
all of the group's layers, one contiguous byte range. The recurrent layers, of whatever mixers, share one slot pool: a
slot is the conv + recurrent state of all of them at one exact token position, one contiguous byte range.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of every dtype that a pool may hold."""


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Consecutive rows of a tensor's sharded axis that tensor parallelism deals out by whole heads: ``num_heads`` of
    ``head_rows`` rows each. The parts of a tensor, in order, are all of its rows.

    ``may_repeat``: where there are more ranks than heads, several hold the same one (K/V heads, groups of B and C, key
    heads); other parts are computed by one rank each, and then cannot be divided.
    """

    name: str
    num_heads: int
    head_rows: int = 1
    may_repeat: bool = False

    @property
    def num_rows(self) -> int:
        return self.num_heads * self.head_rows


class GroupKind(enum.Enum):
    FULL_ATTENTION = "full_attention"
    MLA = "mla"
    SLIDING_WINDOW = "sliding_window"


@dataclass(frozen=True, slots=True)
class AttentionLayerSpec:
    """What one attention call site keeps. ``layer_idx`` is the index given to the cache's ``update``.

    MLA keeps one latent row a token: ``num_kv_heads`` 1, ``head_size`` its width, ``head_size_v`` 0. ``window`` is the
    number of tokens that a query of a sliding window sees, itself included; 0 for the other kinds.
    """

    layer_idx: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str
    kind: GroupKind = GroupKind.FULL_ATTENTION
    window: int = 0

    @property
    def kv_heads(self) -> ShardPart:
        """How tensor parallelism divides K and V. A latent row is one head: every rank holds it."""
        return ShardPart("kv_heads", self.num_kv_heads, may_repeat=True)

    def __post_init__(self) -> None:
        assert (self.window > 0) == (self.kind is GroupKind.SLIDING_WINDOW), "a window goes with its kind"


@dataclass(frozen=True, slots=True)
class StateTensorSpec:
    """One tensor of a layer's state: ``name`` is ``conv`` or ``recurrent``; shape without the slot dimension. ``parts``
    of its first axis; none: nobody has said how to divide it, so it is not divided."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    # Not in the repr, which a node's layout fingerprint is made of: how bytes could be dealt out changes none of them.
    parts: tuple[ShardPart, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        num_rows = sum(part.num_rows for part in self.parts)
        if self.parts and num_rows != self.shape[0]:
            raise ValueError(f"{self.name}: {self.shape[0]} rows, but its parts {self.parts} have {num_rows}")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateLayerSpec:
    """State of one recurrent layer. ``mixer`` is mamba2 | mamba1 | gated_delta | kimi_delta |
    short_conv | lightning, or mtp: a head for further tokens, no mixer, whose state is a row."""

    layer_idx: int
    mixer: str
    tensors: tuple[StateTensorSpec, ...]


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """The attention layers that share a block pool and a block table.

    ``group_id`` counts from 0: full attention, then MLA, then windows, widest first. ``pool_name`` names its units in
    generation tables and policies, ``label`` in metrics and events.
    """

    group_id: int
    kind: GroupKind
    window: int
    layers: tuple[AttentionLayerSpec, ...]

    @property
    def pool_name(self) -> str:
        return f"blocks_{self.group_id}" if self.group_id else "blocks"

    @property
    def label(self) -> str:
        if self.kind is GroupKind.SLIDING_WINDOW:
            return f"window_{self.window}"
        return "attention" if self.kind is GroupKind.FULL_ATTENTION else "mla"


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Everything the cache must know of a model: derived from the raw config, checked against the loaded model.

    ``max_position`` is the longest sequence the config allows (0: unbounded). ``num_ranks`` above 1: what each of so
    many ranks keeps (``common.kv_cache.shards``).
    """

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position: int
    attention_layers: tuple[AttentionLayerSpec, ...]
    state_layers: tuple[StateLayerSpec, ...]
    # Not in the repr either: what is undivided has the fingerprint that it had.
    num_ranks: int = field(default=1, repr=False)

    @property
    def attention_groups(self) -> tuple[KVCacheGroup, ...]:
        order = list(GroupKind)
        kinds = sorted(
            {(layer.kind, layer.window) for layer in self.attention_layers},
            key=lambda kind: (order.index(kind[0]), -kind[1]),
        )
        return tuple(
            KVCacheGroup(
                group_id,
                kind,
                window,
                tuple(layer for layer in self.attention_layers if (layer.kind, layer.window) == (kind, window)),
            )
            for group_id, (kind, window) in enumerate(kinds)
        )


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Sizes and policy of one node's cache; made by the planner, validated there.

    ``num_blocks`` (per attention group) and ``num_slots`` count the null entry at position 0. ``root_key`` binds model
    fingerprint, dtype and layout version: it is the start of every key chain. ``retention_interval`` is in tokens, a
    multiple of ``block_size``; None: every boundary in modes ``all`` and ``align`` and for windows, no grid in
    ``auto``. ``max_checkpoints`` bounds the index of checkpoints, which need no slot in dense models.
    """

    geometry: ModelGeometry
    block_size: int
    num_blocks: tuple[int, ...]
    num_slots: int
    root_key: bytes
    enable_prefix_caching: bool = True
    mamba_cache_mode: str = "auto"
    eviction_policy: str = "value"
    retention_interval: int | None = None
    enable_events: bool = False
    max_checkpoints: int = 65_536

    @property
    def has_attention(self) -> bool:
        return bool(self.geometry.attention_layers)

    @property
    def has_state(self) -> bool:
        return bool(self.geometry.state_layers)

    @property
    def caches_states(self) -> bool:
        """Whether checkpoints are published (ends of prompts, for dense models)."""
        return self.enable_prefix_caching and not (self.has_state and self.mamba_cache_mode == "none")

    @property
    def keeps_boundaries(self) -> bool:
        """Whether states are kept at a prompt's semantic boundaries."""
        return self.has_state and self.caches_states and self.mamba_cache_mode == "auto"

    @property
    def keeps_ends_of_chunks(self) -> bool:
        """Whether a prompt's states are kept at the ends of its chunks only."""
        return self.has_state and self.mamba_cache_mode == "align"

    @property
    def pool_sizes(self) -> dict[str, int]:
        """Pool name -> units, the null entry included."""
        names = [group.pool_name for group in self.geometry.attention_groups]
        return {**dict(zip(names, self.num_blocks, strict=True)), "slots": self.num_slots}
