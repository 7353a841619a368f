"""Attention by head: each rank has some of the query heads and the K/V heads that they see; multi-head latent attention
has every head's part of the expansion and the latents whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from common.kv_cache.spec import AttentionLayerSpec, ShardPart
from common.models.parallel.norms import slice_norm
from common.models.parallel.slicing import Slicer


def is_attention(module: nn.Module) -> bool:
    """Whether keys and values of this module are attention's; mixers that look like one are told apart before."""
    return hasattr(module, "q_proj") and hasattr(module, "k_proj") and hasattr(module, "v_proj")


def is_latent_attention(module: nn.Module) -> bool:
    return hasattr(module, "kv_b_proj")


def slice_attention(slicer: Slicer, module: Any, layer: AttentionLayerSpec) -> None:
    """``layer``: what one of its layers keeps, undivided."""
    out = "o_proj" if hasattr(module, "o_proj") else "out_proj"
    heads = ShardPart("query heads", getattr(module, out).in_features // layer.head_size_v, layer.head_size_v)
    kv_heads = replace(layer.kv_heads, head_rows=layer.head_size)
    values = replace(layer.kv_heads, head_rows=layer.head_size_v)
    # With a gate behind each head the projection is twice as wide.
    query = replace(heads, head_rows=module.q_proj.out_features // heads.num_heads)
    for name, part in (("q", query), ("k", kv_heads), ("v", values)):
        slicer.outputs(getattr(module, f"{name}_proj"), part)
        for adapter in getattr(module, f"linear_{name}_adapter_list", ()):
            if not isinstance(adapter, nn.Identity):
                slicer.outputs(adapter[-1], part)
    if getattr(module, "g_proj", None) is not None:
        slicer.outputs(module.g_proj, replace(heads, head_rows=module.g_proj.out_features // heads.num_heads))
    for name, part in (("q_norm", replace(heads, head_rows=layer.head_size)), ("k_norm", kv_heads)):
        if hasattr(module, name):
            slice_norm(slicer, module, name, part)
    slicer.inputs(module, out, heads)
    module.num_key_value_groups = slicer.count(heads) // slicer.count(kv_heads)


def slice_latent_attention(slicer: Slicer, module: Any) -> None:
    heads = ShardPart("query heads", module.num_heads, module.v_head_dim)
    query = module.q_b_proj if getattr(module, "q_b_proj", None) is not None else module.q_proj
    slicer.outputs(query, replace(heads, head_rows=module.qk_head_dim))
    slicer.outputs(module.kv_b_proj, replace(heads, head_rows=module.qk_nope_head_dim + module.v_head_dim))
    if getattr(module, "g_proj", None) is not None:
        slicer.outputs(module.g_proj, replace(heads, head_rows=module.g_proj.out_features // heads.num_heads))
    slicer.inputs(module, "o_proj", heads)
    module.num_heads = slicer.count(heads)
