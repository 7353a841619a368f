"""Gated short convolutions (lfm2): ``out(c * conv(b * x))`` with b, c and x from one projection.

Stock multiplies before and after the convolution, each time passing over all tokens once more; here the convolution
does both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from common.models.adapter.forward_context import get_forward_context


def short_conv_forward(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``Lfm2ShortConv.forward`` that runs on the forward context while one is set, else is ``stock``."""

    @functools.wraps(stock)
    def forward(mixer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        context = get_forward_context()
        if context is None:
            out: Tensor = stock(mixer, hidden_states, *args, **kwargs)
            return out
        context.layer_idx = mixer.layer_idx
        b, c, x = mixer.in_proj(hidden_states)[0].chunk(3, dim=-1)
        weight, bias = mixer.conv.weight[:, 0], mixer.conv.bias
        y = context.ops.conv1d(x, weight, bias, context.metadata, context.state_pool("conv"), gates=(b, c))
        projected: Tensor = mixer.out_proj(y[None])
        return projected

    return forward
