"""Multi-head latent attention (arXiv 2405.04434) on the latents themselves.

A token leaves one row: its latent, from which the keys and values of all heads would be made, then the part of the key
that all heads share. Keys and values are never made. They are a linear function of the latent, so the key's half of it
is applied to the query instead and the value's half to the result ("absorbed"): what remains is ordinary attention of
all heads over one K/V head, whose keys are the rows and whose values are their latent part. It reads 576 numbers a
token where 32 heads of keys and values are 10,240. Prompts are computed in the same way: making keys and values first
is faster for short ones only (bfloat16, one core, 1,024 tokens 0.15 s against 0.22 s; 512 tokens after 4,096 0.82 s
against 0.85 s).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.models.adapter.forward_context import ForwardContext


def store(context: ForwardContext, latent: Tensor, shared_key: Tensor) -> tuple[Tensor, Tensor]:
    """Write this step's rows to their blocks. latent: [1, 1, num_tokens, rank]; shared_key: [1, 1, num_tokens, width].

    Returns one row of each. The model expands what it gets to keys and values that nobody reads, so it gets little.
    """
    pool = context.attention_pool()
    rows = torch.cat([latent, shared_key], -1)[0].transpose(0, 1)
    context.latents = rows
    nothing = slice(0, 0)
    context.ops.write_kv(rows, rows[..., nothing], pool.key, pool.key[..., nothing], context.attention_metadata())
    return latent[:, :, :1], shared_key[:, :, :1]


def attend(context: ForwardContext, module: Any, query: Tensor, scale: float) -> Tensor:
    """query: [1, num_heads, num_tokens, own + shared columns] -> [1, num_tokens, num_heads, value columns].

    ``module``: the attention module, with ``kv_b_proj`` (latent to each head's own key columns, then its value
    columns), ``kv_lora_rank`` and ``qk_nope_head_dim``.
    """
    pool, rows = context.attention_pool(), context.latents
    assert rows is not None, "attention comes after the cache's update"
    rank, num_own = int(module.kv_lora_rank), int(module.qk_nope_head_dim)
    expand = module.kv_b_proj.weight.view(query.shape[1], -1, rank)  # [num_heads, own + value columns, rank]
    own, shared = query[0, :, :, :num_own], query[0, :, :, num_own:]
    absorbed = torch.cat([own @ expand[:, :num_own], shared], -1).transpose(0, 1)
    attended = context.ops.attention(
        absorbed, rows, rows[..., :rank], pool.key, pool.key[..., :rank], context.attention_metadata(), scale
    )
    values = attended.transpose(0, 1) @ expand[:, num_own:].transpose(1, 2)
    return values.transpose(0, 1)[None]
