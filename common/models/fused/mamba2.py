"""Mamba-2 mixers in five kernels: projection, convolution, scan, gated norm, projection back.

Stock computes the decay of each head from the weights in every step, and falcon_h1 multiplies twice more; here the
decay and the product of falcon_h1's factors are made at load. A projection with a bias keeps its input's factor: what
the bias adds comes behind that one and before the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.models.adapter.forward_context import get_forward_context
from common.ops.interface import StepSize
from common.ops.row_ops import FusedOps

_MIXERS = (
    "BambaMixer",
    "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer",
    "Mamba2Mixer",
    "NemotronHMamba2Mixer",
    "Zamba2MambaMixer",
)


class FusedMamba2:
    """The forward of one mixer."""

    def __init__(self, mixer: Any, ops: FusedOps) -> None:
        self._mixer, self._ops = mixer, ops
        mixer.register_buffer("decay", -torch.exp(mixer.A_log.float()), persistent=False)
        vector, scale = getattr(mixer, "mup_vector", None), getattr(mixer, "ssm_in_multiplier", 1.0)
        has_bias = getattr(mixer.in_proj, "bias", None) is not None
        self._input_scale: float = scale if has_bias else 1.0
        scale = 1.0 if has_bias else scale
        factors = None if vector is None else (vector.float() * scale).flatten().to(vector.dtype)
        mixer.register_buffer("factors", factors, persistent=False)
        self._sizes = (mixer.intermediate_size, mixer.conv_dim, mixer.num_heads)

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """[1, num_tokens, hidden] -> the same."""
        context, mixer = get_forward_context(), self._mixer
        assert context is not None, "a mixer prepared for the engine was called outside a forward context"
        context.layer_idx = mixer.layer_idx
        if self._input_scale != 1.0:
            hidden_states = hidden_states * self._input_scale
        projected = mixer.in_proj(hidden_states)[0]
        if mixer.factors is not None:
            projected = projected * mixer.factors
        gate, mixed, dt = projected.split(self._sizes, dim=-1)
        weight, metadata = mixer.conv1d.weight[:, 0], context.metadata
        mixed = context.ops.conv1d(mixed, weight, mixer.conv1d.bias, metadata, context.state_pool("conv"), silu=True)
        width = (mixed.shape[1] - self._sizes[0]) // 2
        x, b, c = mixed.split((self._sizes[0], width, width), dim=-1)
        out = context.ops.mamba2(
            x.unflatten(-1, (mixer.num_heads, -1)),
            dt,
            mixer.decay,
            b.unflatten(-1, (mixer.n_groups, -1)),
            c.unflatten(-1, (mixer.n_groups, -1)),
            mixer.D,
            metadata,
            context.state_pool("recurrent"),
            step_size=StepSize(mixer.dt_bias, True, *mixer.time_step_limit),
        ).flatten(1)
        if getattr(mixer, "mamba_rms_norm", True):
            out = mixer.norm(out[None], gate[None])
        else:
            out = self._ops.elementwise.silu_mul(gate, out)[None]
        result: Tensor = mixer.out_proj(out)
        return result


def fuse_mamba2(model: nn.Module, ops: FusedOps) -> int:
    """Give the mixers of ``model`` that are known a forward of ours; how many they were."""
    mixers = [m for m in model.modules() if type(m).__name__ in _MIXERS and m.activation in ("silu", "swish")]
    for mixer in mixers:
        mixer.forward = FusedMamba2(mixer, ops)
    return len(mixers)
