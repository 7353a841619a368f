"""Recurrent mixers: which rows of a mixer's weights are whose, by the parts that its state declares.

A rank scans the heads (or channels) whose states its slots hold, so every rule begins with the parts of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from common.kv_cache.spec import ShardPart, StateLayerSpec
from common.models.parallel.norms import slice_norm
from common.models.parallel.slicing import Slicer


def _parts(layer: StateLayerSpec, tensor: str) -> tuple[ShardPart, ...]:
    return next(each.parts for each in layer.tensors if each.name == tensor)


def _mamba2(slicer: Slicer, mixer: Any, layer: StateLayerSpec) -> None:
    x, b, c = conv = _parts(layer, "conv")
    (heads,) = _parts(layer, "recurrent")
    projected = (replace(x, name="z"), *conv, replace(heads, name="dt"))
    slicer.outputs(mixer.in_proj, *projected)
    slicer.replace(mixer, "mup_vector", *projected, dim=-1)
    slicer.outputs(mixer.conv1d, *conv)
    for name in ("A_log", "D", "dt_bias"):
        slicer.replace(mixer, name, heads)
    if hasattr(mixer, "norm"):
        slice_norm(slicer, mixer, "norm", x)
    slicer.inputs(mixer, "out_proj", x)
    mixer.num_heads, mixer.n_groups = slicer.count(heads), slicer.count(b)
    mixer.intermediate_size = slicer.rows(x)
    mixer.conv_dim = slicer.rows(x) + slicer.rows(b) + slicer.rows(c)
    mixer.groups_time_state_size = slicer.rows(b)


def _mamba1(slicer: Slicer, mixer: Any, layer: StateLayerSpec) -> None:
    """zamba has heads, each with projections of its own, and x and z of a channel beside each other."""
    (x,) = _parts(layer, "conv")
    has_heads = hasattr(mixer, "n_mamba_heads")
    z = replace(x, name="z")
    slicer.outputs(mixer.in_proj, *([replace(x, head_rows=2 * x.head_rows)] if has_heads else (x, z)))
    slicer.outputs(mixer.conv1d, x)
    (heads,) = _parts(layer, "recurrent")
    for name in ("A_log", "D", "x_proj_weight", "dt_proj_weight", "dt_proj_bias"):
        slicer.replace(mixer, name, heads)
    if has_heads:
        mixer.n_mamba_heads = slicer.count(heads)
    else:
        slicer.inputs(mixer, "x_proj", x)
        slicer.outputs(mixer.dt_proj, x)
    slicer.inputs(mixer, "out_proj", x)
    mixer.intermediate_size = slicer.rows(x)


def _gated_delta(slicer: Slicer, mixer: Any, layer: StateLayerSpec) -> None:
    q, k, v = conv = _parts(layer, "conv")
    (heads,) = _parts(layer, "recurrent")
    slicer.outputs(mixer.conv1d, *conv)
    if hasattr(mixer, "in_proj_qkvz"):
        _interleaved(slicer, mixer.in_proj_qkvz, (q, k, v, replace(v, name="z")))
        _interleaved(slicer, mixer.in_proj_ba, (replace(heads, name="b"), replace(heads, name="a")), q.num_heads)
    else:
        by_name = {"in_proj_qkv": conv, "in_proj_z": (v,), "in_proj_b": (heads,), "in_proj_a": (heads,)}
        by_name |= {"q_proj": (q,), "k_proj": (k,), "v_proj": (v,), "g_proj": (v,)}
        by_name |= {"b_proj": (heads,), "a_proj": (heads,)}
        for name, parts in by_name.items():
            if hasattr(mixer, name):
                slicer.outputs(getattr(mixer, name), *parts)
    for name in ("A_log", "dt_bias"):
        slicer.replace(mixer, name, heads)
    slicer.inputs(mixer, "out_proj" if hasattr(mixer, "out_proj") else "o_proj", v)
    mixer.num_k_heads, mixer.num_v_heads = slicer.count(q), slicer.count(v)
    mixer.key_dim, mixer.value_dim = slicer.rows(q), slicer.rows(v)
    mixer.conv_dim = 2 * mixer.key_dim + mixer.value_dim


def _interleaved(slicer: Slicer, linear: Any, parts: tuple[ShardPart, ...], num_heads: int = 0) -> None:
    """A projection whose rows are those of the first key head in all parts, then of the second (qwen3_next)."""
    num_heads = num_heads or parts[0].num_heads
    widths = [part.num_rows // num_heads for part in parts]
    rows = torch.arange(linear.out_features).view(num_heads, -1).split(widths, dim=1)
    kept = [of_part.flatten()[slicer.index(part)] for part, of_part in zip(parts, rows, strict=True)]
    num_held = max(1, num_heads // slicer.group.size)
    order = torch.cat([each.view(num_held, -1) for each in kept], dim=1).flatten()
    linear.weight = torch.nn.Parameter(linear.weight.detach()[order], requires_grad=False)
    linear.out_features = linear.weight.shape[0]


def _kimi_delta(slicer: Slicer, mixer: Any, layer: StateLayerSpec) -> None:
    q, k, v = conv = _parts(layer, "conv")
    (heads,) = _parts(layer, "recurrent")
    slicer.outputs(mixer.conv1d, *conv)
    gate = mixer.forget_gate
    by_name = {"q_proj": q, "k_proj": k, "v_proj": v, "b_proj": heads, "g_proj": v, "g_b_proj": v}
    by_name |= {"f_proj": q, "f_b_proj": q}
    for owner in (mixer, gate):
        for name, part in by_name.items():
            if hasattr(owner, name):
                slicer.outputs(getattr(owner, name), part)
    slicer.replace(gate, "dt_bias", q)
    slicer.replace(gate, "A_log", heads, dim=gate.A_log.shape.index(heads.num_heads))
    slicer.inputs(mixer, "o_proj", v)
    for owner in (mixer, gate):
        owner.num_heads, owner.qkv_dim = slicer.count(heads), slicer.rows(q)
    mixer.conv_dim = 3 * mixer.qkv_dim


def _lightning(slicer: Slicer, mixer: Any, layer: StateLayerSpec) -> None:
    """A head's query, key and value are one behind the other; its decay is a buffer."""
    (heads,) = _parts(layer, "recurrent")
    values = replace(heads, head_rows=mixer.head_dim)
    slicer.outputs(mixer.qkv_proj, replace(heads, head_rows=3 * mixer.head_dim))
    slicer.outputs(mixer.output_gate, values)
    for name in ("slope_rate", "query_decay", "key_decay"):
        slicer.replace(mixer, name, heads)
    slicer.replace(mixer, "diagonal_decay", heads, dim=1)
    slice_norm(slicer, mixer, "norm", values)
    slicer.inputs(mixer, "out_proj", values)
    mixer.num_attention_heads = slicer.count(heads)


def _short_conv(slicer: Slicer, mixer: Any, layer: StateLayerSpec) -> None:
    """b, c and x, each of all channels."""
    (channels,) = _parts(layer, "conv")
    slicer.outputs(mixer.in_proj, channels, channels, channels)
    slicer.outputs(mixer.conv, channels)
    slicer.inputs(mixer, "out_proj", channels)


MIXERS: Mapping[str, Callable[[Slicer, Any, StateLayerSpec], None]] = MappingProxyType(
    {
        "mamba2": _mamba2,
        "mamba1": _mamba1,
        "gated_delta": _gated_delta,
        "kimi_delta": _kimi_delta,
        "lightning": _lightning,
        "short_conv": _short_conv,
    }
)
"""By ``StateLayerSpec.mixer``."""
