"""What stands around attention in fewer kernels: norms and rotary position embedding of query and key in one, the gate
of the result in one.

Layers whose heads have norms (qwen3, qwen3_5, gemma3, lfm2) get a forward of ours. For the others the function
``apply_rotary_pos_emb`` in transformers' module of the family is replaced, if ours gives its numbers in a trial.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from common.models.adapter.forward_context import get_forward_context
from common.models.adapter.patching import replace_function
from common.models.fused.norms import FusedNorm
from common.ops.row_ops import FusedOps, Gate

logger = logging.getLogger(__name__)

_ATTENTIONS = (
    "Gemma3Attention",
    "Lfm2Attention",
    "Lfm2MoeAttention",
    "Qwen3Attention",
    "Qwen3NextAttention",
    "Qwen3_5Attention",
    "Qwen3_5MoeAttention",
)
_ROTARY = "apply_rotary_pos_emb"
_TRIAL = (3, 4, 2, 16)
"""Tokens, query heads, key heads, columns of a head in a trial."""
_TOLERANCE = 1e-5


class FusedAttention:
    """The forward of one layer with norms of its heads. A query projection that is twice as wide as what is projected
    back has a gate behind each head."""

    def __init__(self, module: Any, ops: FusedOps) -> None:
        self._module, self._ops = module, ops
        self._out = getattr(module, "o_proj", None) or module.out_proj
        self._is_gated = module.q_proj.out_features == 2 * self._out.in_features
        self._norms = _head_norms(module)

    def __call__(
        self, hidden_states: Tensor, position_embeddings: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """[1, num_tokens, hidden] -> the same."""
        module, gate = self._module, None
        query, key, value = (
            each(hidden_states)[0].unflatten(-1, (-1, module.head_dim))
            for each in (module.q_proj, module.k_proj, module.v_proj)
        )
        if self._is_gated:
            query, gate = query.unflatten(1, (-1, 2)).unbind(2)
        first, second = self._norms
        cos, sin = position_embeddings
        query, key = self._ops.rotary.rotate(
            query,
            key,
            cos[0],
            sin[0],
            (first.weight, second.weight),
            epsilon=first.variance_epsilon,
            offset=first.variant.offset,
        )
        heads = [each.transpose(0, 1)[None] for each in (query, key, value)]
        heads[1:] = past_key_values.update(*heads[1:], module.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
        window = getattr(module, "sliding_window", None)
        out = attend(module, *heads, None, scaling=module.scaling, sliding_window=window)[0]
        if gate is not None:
            out = self._ops.elementwise.mul_sigmoid(out, gate[None])
        return self._out(out.flatten(2)), None


def _head_norms(module: Any) -> tuple[Any, Any]:
    names = ("q_norm", "k_norm") if hasattr(module, "q_norm") else ("q_layernorm", "k_layernorm")
    return getattr(module, names[0]), getattr(module, names[1])


def _is_known(module: Any) -> bool:
    if type(module).__name__ not in _ATTENTIONS:
        return False
    first, second = _head_norms(module)
    return (
        isinstance(first, FusedNorm)
        and isinstance(second, FusedNorm)
        and first.weight.shape == second.weight.shape == (module.head_dim,)
        and first.variant == second.variant
        and first.variant.kind is Gate.NONE
        and first.variant.group == module.head_dim
        and first.variance_epsilon == second.variance_epsilon
    )


def fuse_attention(model: nn.Module, ops: FusedOps) -> int:
    """Give the layers of ``model`` that are known a forward of ours, and let the others call the kernel for rotary
    position embedding; how many layers have norms."""
    known = [m for m in model.modules() if _is_known(m)]
    for module in known:
        module.forward = FusedAttention(module, ops)
    for owner in {sys.modules[type(m).__module__] for m in model.modules() if type(m).__name__.endswith("Attention")}:
        stock = getattr(owner, _ROTARY, None)
        if stock is not None and _fits(stock, ops, next(model.parameters()).device):
            replace_function(owner, _ROTARY, _rotary)
    return len(known)


def _rotary(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel while a forward context is set whose ops have it, else ``stock``."""

    @functools.wraps(stock)
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context()
        ops = getattr(context.ops, "rotary", None) if context is not None else None
        if ops is None or args or kwargs or q.ndim != 4 or cos.ndim != 3:
            return stock(q, k, cos, sin, *args, **kwargs)
        outs = ops.rotate(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
        return tuple(out.transpose(0, 1)[None] for out in outs)

    return rotary


@torch.inference_mode()
def _fits(stock: Callable[..., Any], ops: FusedOps, device: torch.device) -> bool:
    """Whether the module's function is the common one, also for columns that are not rotated if it knows them."""
    tokens, heads, key_heads, columns = _TRIAL
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(tokens, heads, columns, generator=generator).to(device)
    key = torch.randn(tokens, key_heads, columns, generator=generator).to(device)
    cos, sin = torch.randn(2, tokens, columns, generator=generator).to(device)
    found = ops.rotary.rotate(query, key, cos, sin)
    try:
        expected = stock(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
    except (RuntimeError, TypeError):  # called in another way
        return False
    return all(
        torch.allclose(a, b[0].transpose(0, 1), rtol=_TOLERANCE, atol=_TOLERANCE)
        for a, b in zip(found, expected, strict=True)
    )
