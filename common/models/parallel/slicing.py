"""One rank's part of a weight: of each named part of its rows (or columns) a run of whole heads.

The parts are those of ``common.kv_cache.spec.ShardPart``, and which heads of one are a rank's is what
``common.kv_cache.shards`` says of the pools. Weights are replaced one by one; what a rank does not keep is freed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.kv_cache.shards import check_parts, held
from common.kv_cache.spec import ShardPart
from common.models.parallel.group import RankGroup


class Summed(nn.Module):
    """Stands in for a module that computes from this rank's part of the columns: the ranks' results added up."""

    def __init__(self, inner: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.inner = inner
        self._group = group

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._group.sum(self.inner(*args, **kwargs))

    @property
    def in_features(self) -> int:
        """Of this rank's part of a linear layer."""
        return int(self.inner.in_features)


class Slicer:
    """Cuts the weights of modules, in place, to those of one rank."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def count(self, part: ShardPart) -> int:
        """Heads of ``part`` that are this rank's."""
        return len(held(part, self.group.rank, self.group.size))

    def rows(self, part: ShardPart) -> int:
        """Rows of ``part`` that are this rank's."""
        return self.count(part) * part.head_rows

    def index(self, *parts: ShardPart) -> Tensor:
        """Which rows of a tensor of these parts, one behind the other, are this rank's."""
        kept, begin = [], 0
        for part in parts:
            heads = held(part, self.group.rank, self.group.size)
            kept.append(torch.arange(begin + heads.start * part.head_rows, begin + heads.stop * part.head_rows))
            begin += part.num_rows
        return torch.cat(kept)

    def tensor(self, whole: Tensor, *parts: ShardPart, dim: int = 0) -> Tensor:
        """A copy of this rank's part. Raises ConfigError where the ranks cannot divide it."""
        check_parts(f"a weight {list(whole.shape)}", parts, self.group.size)
        num_rows = sum(part.num_rows for part in parts)
        assert whole.shape[dim] == num_rows, f"axis {dim} of {list(whole.shape)} is not the {num_rows} rows of {parts}"
        return whole.detach().index_select(dim, self.index(*parts).to(whole.device))

    def replace(self, module: Any, name: str, *parts: ShardPart, dim: int = 0) -> None:
        """Cuts a parameter or buffer, if there is one of that name."""
        whole = getattr(module, name, None)
        if whole is not None:
            cut = self.tensor(whole, *parts, dim=dim)
            setattr(module, name, nn.Parameter(cut, requires_grad=False) if isinstance(whole, nn.Parameter) else cut)

    def outputs(self, linear: Any, *parts: ShardPart) -> None:
        """A linear layer that keeps a part of its outputs, or a convolution by channel of its channels."""
        for name in ("weight", "bias"):
            self.replace(linear, name, *parts)
        if isinstance(linear, nn.Conv1d):
            linear.in_channels = linear.out_channels = linear.groups = linear.weight.shape[0]
        else:
            linear.out_features = linear.weight.shape[0]

    def inputs(self, parent: Any, name: str, part: ShardPart) -> None:
        """``parent.name``, a linear layer, keeps the columns that read ``part``; what the ranks compute is added up.
        The bias is rank 0's."""
        linear = getattr(parent, name)
        self.replace(linear, "weight", part, dim=1)
        linear.in_features = linear.weight.shape[1]
        if self.group.rank > 0:
            linear.bias = None
        self.sum(parent, name)

    def sum(self, parent: Any, name: str) -> None:
        setattr(parent, name, Summed(getattr(parent, name), self.group))
