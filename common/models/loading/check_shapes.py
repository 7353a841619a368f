"""What transformers' own cache holds after a prompt, against what the geometry plans to hold.

The geometry is read from the raw config without torch; here it meets the loaded weights. A stock forward fills stock's
cache, whose tensors show, layer by layer, the K/V heads and head sizes, the window, and the state shapes that the model
really has. A plan that differs is refused before a pool is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from common.errors import ConfigError
from common.kv_cache.spec import AttentionLayerSpec, GroupKind, ModelGeometry, StateLayerSpec


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """What one layer keeps: ``kv`` is (K/V heads, elements of K and V per head and token, window or 0) or None;
    ``state`` maps ``conv`` and ``recurrent`` to shapes without the batch dimension."""

    kv: tuple[int, int, int] | None
    state: dict[str, tuple[int, ...]]

    def __str__(self) -> str:
        parts = []
        if self.kv is not None:
            heads, size, window = self.kv
            parts.append(f"K/V of {heads} heads x {size}" + (f" in a window of {window}" if window else ""))
        parts += [f"{name} state {list(shape)}" for name, shape in self.state.items()]
        return ", ".join(parts) or "nothing"


def check_shapes(geometry: ModelGeometry, cache: Any) -> None:
    """Compare the plan with ``cache``, the one that a stock forward over at least one token has filled.

    Raises:
        ConfigError: naming the first layer that differs, what is planned and what is there.
    """
    measured = {index: _measured(layer) for index, layer in enumerate(cache.layers)}
    for index, state in enumerate(getattr(cache, "linear_cache", ())):  # minimax has a cache class of its own
        if isinstance(state, Tensor):
            measured[index] = LayerShapes(None, {"recurrent": tuple(state.shape[1:])})
    attention = {layer.layer_idx: layer for layer in geometry.attention_layers}
    states = {layer.layer_idx: layer for layer in geometry.state_layers}
    for index in sorted({*measured, *attention, *states}):
        plan = _planned(attention.get(index), states.get(index))
        found = measured.get(index, LayerShapes(None, {}))
        if plan != found:
            raise ConfigError(
                f"layer {index} of this {geometry.model_type} model: config.json plans {plan}, the model has {found}",
                param="--model",
            )


def _planned(attention: AttentionLayerSpec | None, state: StateLayerSpec | None) -> LayerShapes:
    kv = None
    if attention is not None:
        window = attention.window if attention.kind is GroupKind.SLIDING_WINDOW else 0
        kv = (attention.num_kv_heads, attention.head_size + attention.head_size_v, window)
    return LayerShapes(kv, {tensor.name: tensor.shape for tensor in state.tensors} if state is not None else {})


def _measured(layer: Any) -> LayerShapes:
    """``layer`` is one of transformers' cache layers; each has keys and values, or states, or both, or neither."""
    kv = None
    if (keys := getattr(layer, "keys", None)) is not None and keys.numel():
        kv = (keys.shape[1], keys.shape[-1] + layer.values.shape[-1], getattr(layer, "sliding_window", None) or 0)
    state: dict[str, tuple[int, ...]] = {}
    conv = [tensor for tensor in getattr(layer, "conv_states", {}).values() if tensor is not None]
    recurrent = [tensor for tensor in getattr(layer, "recurrent_states", {}).values() if tensor is not None]
    for index, tensor in enumerate(conv):  # stock keeps one more column than the convolution looks back
        state["conv" if index == 0 else f"conv {index}"] = (*tensor.shape[1:-1], tensor.shape[-1] - 1)
    for index, tensor in enumerate(recurrent):
        state["recurrent" if index == 0 else f"recurrent {index}"] = tuple(tensor.shape[1:])
    return LayerShapes(kv, state)
