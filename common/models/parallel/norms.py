"""Root mean square norms of rows that several ranks hold a part of: the mean is over all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError
from common.kv_cache.spec import ShardPart
from common.models.fused.norms import FusedNorm, epsilon_of, find_variant
from common.models.parallel.group import RankGroup
from common.models.parallel.slicing import Slicer
from common.ops.row_ops import Gate


class RankNorms:
    """:class:`common.ops.row_ops.Norms` of this rank's channels; ``group`` counts those of all ranks."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        gate: Tensor | None,
        *,
        epsilon: float,
        offset: float = 0.0,
        group: int | None = None,
        kind: Gate = Gate.NONE,
    ) -> Tensor:
        size = x.shape[-1]
        group = group or size * self._ranks.size
        g = None if gate is None else gate.float()
        y = x.float() if g is None or kind is not Gate.SILU_BEFORE else x.float() * F.silu(g)
        y = y.unflatten(-1, (-1, min(group, size)))
        mean = y.square().mean(-1, keepdim=True)
        if (span := group // size) > 1:
            first = self._ranks.rank // span * span
            mean = torch.stack(self._ranks.gather(mean)[first : first + span]).mean(0)
        y = (y * torch.rsqrt(mean + epsilon)).flatten(-2) * (weight.float() + offset)
        if g is not None and kind is not Gate.SILU_BEFORE:
            y = y * (F.silu(g) if kind is Gate.SILU_AFTER else g.sigmoid())
        return y.to(x.dtype)


def slice_norm(slicer: Slicer, parent: Any, name: str, part: ShardPart) -> None:
    """``parent.name``, a norm of all heads of ``part`` (one of a single head's width is every head's and stays whole).

    Raises:
        ConfigError: it is no norm that is known, or a group of its channels is neither whole ranks' nor one rank's.
    """
    norm = getattr(parent, name)
    if norm.weight.shape[0] != part.num_rows:
        return
    ranks, kind = slicer.group, type(norm).__name__
    variant = find_variant(norm, RankNorms(ranks))
    slicer.replace(norm, "weight", part)
    size = norm.weight.shape[0]
    if variant is not None and size % variant.group == 0:
        if hasattr(norm, "n_groups"):
            norm.n_groups = size // variant.group
    elif variant is not None and variant.group % size == 0 and part.num_heads % ranks.size == 0:
        setattr(parent, name, FusedNorm(RankNorms(ranks), norm.weight, epsilon_of(norm), variant))
    elif variant is not None and variant.group == part.num_rows:
        # Every head is held by as many ranks, so that the mean over all that they hold is the heads' own.
        spread = type(variant)(variant.offset, size * ranks.size, variant.kind)
        setattr(parent, name, FusedNorm(RankNorms(ranks), norm.weight, epsilon_of(norm), spread))
    else:
        why = "is of no kind that is known" if variant is None else f"has groups of {variant.group} channels"
        raise ConfigError(
            f"--tensor-parallel-size {ranks.size}: {kind} of {part.num_rows} channels {why}",
            param="--tensor-parallel-size",
        )
