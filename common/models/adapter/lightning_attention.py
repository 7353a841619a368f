"""Lightning attention (minimax), arXiv 2501.08313: linear attention with a fixed decay per head, on the slot pool.

transformers keeps its state in a cache class of its own and walks token by token whenever there is one, so the mixer's
forward is replaced as a whole. The recurrence ``S <- exp(-slope) S + k v``, ``o = q S`` is a Mamba-2 scan with a step
size of 1: the value is its input, key and query are its B and C, one group per head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.models.adapter.forward_context import get_forward_context


def lightning_forward(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``MiniMaxLightningAttention.forward`` that runs on the forward context while one is set, else is ``stock``."""

    @functools.wraps(stock)
    def forward(mixer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        context = get_forward_context()
        if context is None:
            out, nothing = stock(mixer, hidden_states, *args, **kwargs)
            return out, nothing
        context.layer_idx = mixer.layer_idx
        num_tokens, num_heads = hidden_states.shape[1], mixer.num_attention_heads
        # [num_tokens, heads, 3 * head_dim]
        projected = mixer.act_fn(mixer.qkv_proj(hidden_states))[0].view(num_tokens, num_heads, -1)
        query, key, value = projected.split(mixer.head_dim, dim=-1)
        step_size = projected.new_ones(num_tokens, num_heads)
        decay = -mixer.slope_rate.flatten()
        pool = context.state_pool("recurrent")
        out = context.ops.mamba2(value, step_size, decay, key, query, None, context.metadata, pool).reshape(
            1, num_tokens, -1
        )
        out = torch.sigmoid(mixer.output_gate(hidden_states)) * mixer.norm(out)
        return mixer.out_proj(out), None

    return forward
