"""The part of the pools that each layer of a model reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.kv_cache.spec import GroupKind, ModelGeometry
from common.ops.step.check import PoolSizes


class LayerPools(Protocol):
    """Views of the pools by layer; ``common.kv_cache.pools.storage.KVStorage`` has this shape."""

    def attention_layer(self, layer_idx: int) -> tuple[Tensor, Tensor]: ...
    def state_layer(self, layer_idx: int) -> dict[str, Tensor]: ...


@dataclass(frozen=True, slots=True)
class AttentionPool:
    """One layer's part of the block pool of its group.

    Attributes:
        key: [num_blocks, block_size, num_kv_heads, head_size]; value: [.., head_size_v].
        group_id: the attention group whose block tables index it.
        window: tokens that a query sees, 0 for all.
        is_latent: keys are latent rows, from which values are made too (MLA).
    """

    key: Tensor
    value: Tensor
    group_id: int
    window: int
    is_latent: bool


@dataclass(frozen=True, slots=True)
class PoolViews:
    """All layers' views, looked up once per model instead of once per layer and step. ``windows``, ``sizes``: of each
    attention group, in order; one of no window and no blocks where there is none."""

    attention: dict[int, AttentionPool]
    state: dict[int, dict[str, Tensor]]
    windows: tuple[int, ...]
    sizes: tuple[PoolSizes, ...]

    @classmethod
    def of(cls, pools: LayerPools, geometry: ModelGeometry) -> PoolViews:
        groups = geometry.attention_groups
        attention = {
            layer.layer_idx: AttentionPool(
                *pools.attention_layer(layer.layer_idx), group.group_id, group.window, group.kind is GroupKind.MLA
            )
            for group in groups
            for layer in group.layers
        }
        state = {s.layer_idx: pools.state_layer(s.layer_idx) for s in geometry.state_layers}
        num_slots = max((len(pool) for tensors in state.values() for pool in tensors.values()), default=0)
        num_blocks = [len(attention[group.layers[0].layer_idx].key) for group in groups] or [0]
        windows = tuple(group.window for group in groups) or (0,)
        return cls(attention, state, windows, tuple(PoolSizes(blocks, num_slots) for blocks in num_blocks))
