"""Leads the gates of transformers' mixers to our ops: decays, betas and the like, which they compute with functions of
torch before they call anything of ours. In torch a row's gates would depend on how many rows are in the step
(:meth:`common.ops.interface.Ops.activation`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.adapter.forward_context import get_forward_context

PLACES = ((F, "silu"), (F, "softplus"), (torch, "sigmoid"), (Tensor, "sigmoid"))
"""Where mixers find the functions of :data:`common.ops.interface.ACTIVATIONS`: in torch itself, as methods too, so that
there is no module of a mixer's own to replace them in."""


def gate(name: str, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The op while a forward context is set, else ``stock``."""

    @functools.wraps(stock)
    def activation(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        context = get_forward_context()
        if context is None or args or any(kwargs.values()):  # in place, or another softplus
            return stock(x, *args, **kwargs)
        return context.ops.activation(name, x)

    return activation
