"""Functions of one element whose results do not depend on its place, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"sigmoid": torch.sigmoid, "silu": F.silu, "softplus": F.softplus}
)
_UNIT = 128
"""Elements: a multiple of what one pass of torch's vector loops takes on any CPU (twice 32 halves of 512 bits)."""
_PIECE = 16384
"""Elements of one call: below the 32,768 from which torch cuts a tensor for its threads, at any element."""


def activation(name: str, x: Tensor) -> Tensor:
    """As :meth:`common.ops.interface.Ops.activation`.

    On a CPU torch computes whole vectors with vector instructions and what is left with others, which round
    differently. So nothing is left over: zeros fill the last vectors.
    """
    function = _FUNCTIONS[name]
    if x.device.type != "cpu":
        return function(x)
    filled = F.pad(x.reshape(-1), (0, -x.numel() % _UNIT))
    return torch.cat([function(piece) for piece in filled.split(_PIECE)])[: x.numel()].view(x.shape)
