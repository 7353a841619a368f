"""The gated delta mixers of qwen3_next and qwen3_5 in six kernels: one projection, the convolution, both gates, the
rule, the gated norm, and the projection back.

Stock projects in two or four products, the larger one of qwen3_next with the heads' parts interleaved, and computes the
gates in seven. Here the rows of all weights are put in the order query, key, value, z, b, a at load.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from common.models.adapter.forward_context import get_forward_context
from common.models.fused.merged_linears import joined
from common.ops.row_ops import FusedOps

_SEPARATE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_INTERLEAVED = ("in_proj_qkvz", "in_proj_ba")


class FusedGatedDelta:
    """The forward of one mixer, whose projections it takes away."""

    def __init__(self, mixer: Any, ops: FusedOps) -> None:
        self._mixer, self._ops = mixer, ops
        parts = _rows(mixer)
        mixer.in_proj = nn.Linear(1, 1, bias=False, device="meta")
        mixer.in_proj.weight = joined(parts)
        mixer.in_proj.out_features, mixer.in_proj.in_features = mixer.in_proj.weight.shape
        for name in (*_SEPARATE, *_INTERLEAVED):
            if hasattr(mixer, name):
                delattr(mixer, name)

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """[1, num_tokens, hidden] -> the same."""
        context, mixer = get_forward_context(), self._mixer
        assert context is not None, "a mixer prepared for the engine was called outside a forward context"
        context.layer_idx = mixer.layer_idx
        keys, values, heads = mixer.key_dim, mixer.value_dim, mixer.num_v_heads
        qkv, z, b, a = mixer.in_proj(hidden_states)[0].split((2 * keys + values, values, heads, heads), dim=-1)
        weight, metadata = mixer.conv1d.weight[:, 0], context.metadata
        mixed = context.ops.conv1d(qkv, weight, mixer.conv1d.bias, metadata, context.state_pool("conv"), silu=True)
        query, key, value = mixed.split((keys, keys, values), dim=-1)
        decay, beta = self._ops.elementwise.delta_gates(a, b, mixer.A_log, mixer.dt_bias)
        out = context.ops.gated_delta(
            query.unflatten(-1, (-1, mixer.head_k_dim)),
            key.unflatten(-1, (-1, mixer.head_k_dim)),
            value.unflatten(-1, (-1, mixer.head_v_dim)),
            decay,
            beta,
            metadata,
            context.state_pool("recurrent"),
        )
        normed = mixer.norm(out, z.unflatten(-1, (-1, mixer.head_v_dim)))
        projected: Tensor = mixer.out_proj(normed.flatten(1)[None])
        return projected


def _rows(mixer: Any) -> list[Tensor]:
    """The weights' rows in our order."""
    if hasattr(mixer, _SEPARATE[0]):
        return [getattr(mixer, name).weight for name in _SEPARATE]
    heads, ratio = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
    width = ratio * mixer.head_v_dim
    both = mixer.in_proj_qkvz.weight.unflatten(0, (heads, -1))
    query, key, value, z = both.split((mixer.head_k_dim, mixer.head_k_dim, width, width), dim=1)
    b, a = mixer.in_proj_ba.weight.unflatten(0, (heads, -1)).split((ratio, ratio), dim=1)
    return [part.flatten(0, 1) for part in (query, key, value, z, b, a)]


def fuse_gated_deltas(model: nn.Module, ops: FusedOps) -> int:
    """Give the mixers of ``model`` that are known a forward of ours; how many they were."""
    mixers = [m for m in model.modules() if _is_known(m)]
    for mixer in mixers:
        mixer.forward = FusedGatedDelta(mixer, ops)
    return len(mixers)


def _is_known(module: Any) -> bool:
    names = {name for name, _ in module.named_children()}
    return (
        type(module).__name__.endswith("GatedDeltaNet")
        and (
            names == {"conv1d", "norm", "out_proj", *_SEPARATE}
            or names == {"conv1d", "norm", "out_proj", *_INTERLEAVED}
        )
        and module.activation in ("silu", "swish")
        and all(linear.bias is None for linear in module.children() if isinstance(linear, nn.Linear))
    )
