"""What each layer keeps between tokens, as data. No torch: dtypes are names.

A KV cache *group* is all layers of one kind. Full attention shares one block pool (a block is the K/V of ``block_size``
tokens for all of the group's layers, one contiguous byte range); recurrent layers share one slot pool (a slot is the
conv + recurrent state of all recurrent layers at one exact token position, one contiguous byte range).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of every dtype that a pool may hold."""


class GroupKind(enum.Enum):
    FULL_ATTENTION = "full_attention"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class AttentionLayerSpec:
    """K/V of one attention call site. ``layer_idx`` is the index given to the cache's ``update``."""

    layer_idx: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return self.num_kv_heads * (self.head_size + self.head_size_v) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateTensorSpec:
    """One tensor of a layer's state: ``name`` is ``conv`` or ``recurrent``; shape without the slot dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateLayerSpec:
    """State of one recurrent layer. ``mixer`` is mamba2 | mamba1 | gated_delta | short_conv (and later kinds)."""

    layer_idx: int
    mixer: str
    tensors: tuple[StateTensorSpec, ...]


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Everything the cache must know of a model: derived from the raw config, checked against the loaded model.

    ``max_position`` is the longest sequence the config allows (0: unbounded).
    """

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position: int
    attention_layers: tuple[AttentionLayerSpec, ...]
    state_layers: tuple[StateLayerSpec, ...]


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Sizes and policy of one node's cache; made by the planner, validated there.

    ``num_blocks`` and ``num_slots`` count the null entry at position 0. ``root_key`` binds model fingerprint, dtype and
    layout version: it is the start of every key chain.
    """

    geometry: ModelGeometry
    block_size: int
    num_blocks: int
    num_slots: int
    root_key: bytes
    enable_prefix_caching: bool = True
    mamba_cache_mode: str = "auto"
    eviction_policy: str = "lru"
    max_checkpoints: int = field(default=65536)

    @property
    def has_attention(self) -> bool:
        return bool(self.geometry.attention_layers)

    @property
    def has_state(self) -> bool:
        return bool(self.geometry.state_layers)
