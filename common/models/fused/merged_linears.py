"""Linear layers that read the same rows as one matrix product: query, key and value; gate and up.

The weights of such a group are put one behind another into one tensor, group by group, so that the model is never in
memory twice. Each layer is replaced by a ``MergedPart``: the first that is called with a tensor computes the product
for all, the others take their columns of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of layers beside each other whose callers give all of them the same tensor. Others would be right and slow."""


class _Merged(nn.Module):
    """The layers of a group. Keeps the last product until each part of it was taken."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.weight = joined([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else joined([layer.bias for layer in layers])
        self._rows: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        if self._rows is not x or index not in self._parts:
            self._rows = x
            self._parts = dict(enumerate(F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._rows = None
        return part


class MergedPart(nn.Module):
    """Stands in for an ``nn.Linear``; its result is a view, whose rows are as far apart as those of all parts."""

    def __init__(self, merged: _Merged, index: int) -> None:
        super().__init__()
        self._merged, self._index = merged, index
        self.in_features, self.out_features = merged.weight.shape[1], merged.sizes[index]

    @property
    def weight(self) -> Tensor:
        return self._merged.weight.split(self._merged.sizes)[self._index]

    @property
    def bias(self) -> Tensor | None:
        return None if self._merged.bias is None else self._merged.bias.split(self._merged.sizes)[self._index]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self._merged.part(self._index, x)


def joined(parts: Sequence[Tensor]) -> nn.Parameter:
    """One parameter of rows one behind another."""
    return nn.Parameter(torch.cat(list(parts)).detach(), requires_grad=False)


def merge_linears(model: nn.Module) -> None:
    """Replace the groups of linear layers in ``model``; a layer whose weight another module holds too is left alone."""
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    merged = 0
    for parent in list(model.modules()):
        for names in _GROUPS:
            layers: list[Any] = [getattr(parent, name, None) for name in names]
            if _are_alike(layers) and all(holders[id(layer.weight)] == 1 for layer in layers):
                together = _Merged(layers)
                for index, name in enumerate(names):
                    setattr(parent, name, MergedPart(together, index))
                merged += 1
            del layers  # else the last ones would live on beside their copy
    logger.info("linear layers merged groups=%d", merged)


def _are_alike(layers: Sequence[Any]) -> bool:
    """Whether all are linear layers of the same input, and all or none have a bias."""
    if not all(type(layer) is nn.Linear for layer in layers):
        return False
    return len({(x.in_features, x.weight.dtype, x.weight.device, x.bias is None) for x in layers}) == 1
