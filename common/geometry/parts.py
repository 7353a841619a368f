"""What the readers of configs share: fields with defaults, the kinds of layers, the shapes of states.

Shapes: conv state [channels, kernel - 1] in the model's dtype; recurrent state in float32: Mamba-2 [heads, head_dim,
state], gated delta rule [value heads, key head_dim, value head_dim], Kimi delta [heads, head_dim, head_dim], Mamba-1
[intermediate, state], split into heads in zamba. A ``hybrid`` layer keeps both: attention beside its mixer (falcon_h1)
or a call of a shared attention block before it (zamba, zamba2). Multi-head latent attention keeps one row [kv_lora_rank
+ qk_rope_head_dim] a token.

Parts, by which tensor parallelism divides the first axis of a state: convolutions in the order of their channels, x | B
| C in Mamba-2 (B and C by group), q | k | v in delta rules (q and k by key head), single channels elsewhere; recurrent
states by head, Mamba-1's by channel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.errors import ConfigError
from common.kv_cache.spec import (
    AttentionLayerSpec,
    GroupKind,
    ModelGeometry,
    ShardPart,
    StateLayerSpec,
    StateTensorSpec,
)

RawConfig = Mapping[str, Any]

_LEGACY_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
_STATEFUL = ("linear_attention", "conv")
_STATELESS = ("mlp", "moe")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "axial")
"""Those whose frequencies are fixed. transformers chooses those of dynamic and longrope by the longest row of a step,
so that a prompt's K/V would depend on what else is in the step."""


def get(config: RawConfig, name: str, default: Any) -> Any:
    """A field, or the config class's default when it is missing or null."""
    value = config.get(name)
    return default if value is None else value


def assemble(
    model_type: str,
    dtype: str,
    layer_types: Sequence[str],
    *,
    num_kv_heads: int,
    head_dim: int,
    state: tuple[str, tuple[StateTensorSpec, ...]] | None,
    hidden_size: int,
    vocab_size: int,
    max_position: int,
    window: int = 0,
    latent_size: int = 0,
) -> ModelGeometry:
    """The layer's index in the model is the index that every family's modelling file gives to the cache.

    ``window``: tokens that a query of a sliding-attention layer sees. ``latent_size``: columns of the one row that a
    full-attention layer keeps a token, where it is multi-head latent attention.
    """
    attention, recurrent = [], []
    for layer_idx, layer_type in enumerate(layer_types):
        if layer_type == "full_attention" and latent_size:
            attention.append(AttentionLayerSpec(layer_idx, 1, latent_size, 0, dtype, GroupKind.MLA))
        elif layer_type in ("full_attention", "hybrid"):
            attention.append(AttentionLayerSpec(layer_idx, num_kv_heads, head_dim, head_dim, dtype))
        elif layer_type == "sliding_attention" and window > 0:
            kind = GroupKind.SLIDING_WINDOW
            attention.append(AttentionLayerSpec(layer_idx, num_kv_heads, head_dim, head_dim, dtype, kind, window))
        elif layer_type not in (*_STATEFUL, *_STATELESS) or (layer_type in _STATEFUL and state is None):
            raise ConfigError(
                f"layer {layer_idx} of this {model_type} model is {layer_type!r}, which is not supported",
                param="--model",
            )
        if layer_type in (*_STATEFUL, "hybrid") and state is not None:
            recurrent.append(StateLayerSpec(layer_idx, state[0], state[1]))
    return ModelGeometry(
        model_type=model_type,
        num_layers=len(layer_types),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_position=max_position,
        attention_layers=tuple(attention),
        state_layers=tuple(recurrent),
    )


def layer_kinds(raw: Sequence[str]) -> list[str]:
    return [_LEGACY_LAYER_TYPES.get(layer_type, layer_type) for layer_type in raw]


def common_fields(config: RawConfig, *, hidden: int, vocab: int, positions: int) -> dict[str, int]:
    max_position = int(get(config, "max_position_embeddings", positions))
    for place, rope in _rope_fields(config):
        name = "rope_type" if "rope_type" in rope else "type"
        if (rope_type := get(rope, name, "default")) not in _ROPE_TYPES:
            raise ConfigError(
                f"config.json: {place}.{name} is {rope_type!r}, must be one of {', '.join(_ROPE_TYPES)}",
                param="--model",
            )
        if rope_type == "yarn" and rope.get("factor") and rope.get("original_max_position_embeddings"):
            # Published configs keep the limit that the model was trained to, beside the factor that extends it.
            max_position = max(max_position, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return {
        "hidden_size": int(get(config, "hidden_size", hidden)),
        "vocab_size": int(get(config, "vocab_size", vocab)),
        "max_position": max_position,
    }


def _rope_fields(config: RawConfig) -> Iterator[tuple[str, RawConfig]]:
    """Name and content of the fields about rotary positions, and of those by layer type inside."""
    for place in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(place), Mapping):
            yield place, rope
            yield from ((f"{place}.{name}", each) for name, each in rope.items() if isinstance(each, Mapping))


def mamba2_state(
    dtype: str, *, num_heads: int, head_dim: int, state_size: int, num_groups: int, kernel: int
) -> tuple[str, tuple[StateTensorSpec, ...]]:
    channels = num_heads * head_dim + 2 * num_groups * state_size
    x = ShardPart("x", num_heads, head_dim)
    b, c = (ShardPart(name, num_groups, state_size, may_repeat=True) for name in ("B", "C"))
    return "mamba2", (
        StateTensorSpec("conv", (channels, kernel - 1), dtype, (x, b, c)),
        by_head("recurrent", (num_heads, head_dim, state_size), "float32"),
    )


def mamba1_state(dtype: str, *, width: int, state_size: int, kernel: int) -> tuple[str, tuple[StateTensorSpec, ...]]:
    parts = (ShardPart("channels", width),)
    return "mamba1", (
        StateTensorSpec("conv", (width, kernel - 1), dtype, parts),
        StateTensorSpec("recurrent", (width, state_size), "float32", parts),
    )


def delta_state(
    dtype: str, *, num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int, kernel: int
) -> tuple[str, tuple[StateTensorSpec, ...]]:
    channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    q, k = (ShardPart(name, num_key_heads, key_dim, may_repeat=True) for name in ("q", "k"))
    v = ShardPart("v", num_value_heads, value_dim)
    return "gated_delta", (
        StateTensorSpec("conv", (channels, kernel - 1), dtype, (q, k, v)),
        by_head("recurrent", (num_value_heads, key_dim, value_dim), "float32"),
    )


def kimi_delta_state(
    dtype: str, *, num_heads: int, head_dim: int, kernel: int
) -> tuple[str, tuple[StateTensorSpec, ...]]:
    """One convolution over query, key and value."""
    parts = tuple(ShardPart(name, num_heads, head_dim) for name in ("q", "k", "v"))
    return "kimi_delta", (
        StateTensorSpec("conv", (3 * num_heads * head_dim, kernel - 1), dtype, parts),
        by_head("recurrent", (num_heads, head_dim, head_dim), "float32"),
    )


def short_conv_state(dtype: str, *, width: int, kernel: int) -> tuple[str, tuple[StateTensorSpec, ...]]:
    return "short_conv", (StateTensorSpec("conv", (width, kernel - 1), dtype, (ShardPart("channels", width),)),)


def by_head(name: str, shape: tuple[int, ...], dtype: str) -> StateTensorSpec:
    """A state whose first axis counts heads."""
    return StateTensorSpec(name, shape, dtype, (ShardPart("heads", shape[0]),))


def with_mtp(geometry: ModelGeometry) -> ModelGeometry:
    """The model with its head for further tokens (``common.models.adapter.mtp``), as one more layer: it keeps K/V like
    the model's full attention, and as its state the hidden row before a position, which its next row is made of."""
    full = next(layer for layer in geometry.attention_layers if layer.kind is GroupKind.FULL_ATTENTION)
    attention = replace(full, layer_idx=geometry.num_layers)
    whole = ShardPart("row", 1, geometry.hidden_size, may_repeat=True)
    row = StateTensorSpec("conv", (geometry.hidden_size, 1), full.dtype, (whole,))
    return replace(
        geometry,
        attention_layers=(*geometry.attention_layers, attention),
        state_layers=(*geometry.state_layers, StateLayerSpec(geometry.num_layers, "mtp", (row,))),
    )
