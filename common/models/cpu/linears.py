"""Puts packed weights where a loaded model has linear layers, an output head, or experts.

1 list who holds which parameter, 2 reserve the packed bytes in one piece, 3 pack weight by weight, each replacing the
original, which is freed: a model is never in memory twice. A weight stays as it is when a module other than a
linear layer or an embedding holds it, or when the model's code reads it without calling the layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.ops.cpu.launch import DTYPES
from common.ops.cpu.linear import LinearOps, PackedWeight, large_pages

logger = logging.getLogger(__name__)

_READ_DIRECTLY = ("dt_proj", "kv_b_proj")
"""Names of layers whose weight is also read without calling the layer (Mamba-1:
``self.dt_proj.weight @ time_step``; MLA: ``kv_b_proj.weight``, see ``adapter/mla.py``). They stay as they are."""


def _stand_in(weight: PackedWeight) -> Tensor:
    """``layer.weight`` of a packed layer: right in dtype, device and shape, for code that reads those. Its values are
    NaN: code that multiplied with them would fail the numeric probe."""
    return torch.full((1, 1), float("nan"), dtype=weight.dtype).expand(weight.out_features, weight.in_features)


class PackedLinear(nn.Module):
    """Stands in for an ``nn.Linear``."""

    def __init__(self, ops: LinearOps, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self._ops, self._packed = ops, weight
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.weight, self.bias = _stand_in(weight), bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self._ops.linear(x, self._packed, self.bias)


class _PackedEmbedding(nn.Embedding):
    """An embedding whose rows come from the output head's packed weight; never constructed, see :func:`_share`."""

    packed_rows: Callable[[Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return self.packed_rows(input)


class PackedExperts(nn.Module):
    """Stands in for a transformers experts module: rows sorted by expert, each expert's weights read once and only if
    it has rows. ``activate`` is the module's own gate or activation."""

    def __init__(
        self, ops: LinearOps, up: PackedWeight, down: PackedWeight, activate: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self._ops, self._up, self._down, self._activate = ops, up, down, activate

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [num_tokens, hidden]; top_k_index, top_k_weights [num_tokens, top_k] -> [num_tokens, hidden].
        A token's result does not depend on the other tokens."""
        num_tokens, top_k = top_k_index.shape
        experts, order = top_k_index.flatten().sort(stable=True)
        counts = torch.bincount(experts, minlength=self._up.num_groups)
        begin = F.pad(counts.cumsum(0), (1, 0)).tolist()
        rows = self._activate(self._ops.grouped(hidden_states[order // top_k], begin, self._up))
        rows = self._ops.grouped(rows, begin, self._down)
        outputs = torch.empty_like(rows)
        outputs[order] = rows
        weighted = outputs.view(num_tokens, top_k, rows.shape[1]) * top_k_weights[..., None]
        return weighted.sum(1).to(hidden_states.dtype)


@dataclass(frozen=True, slots=True)
class _Holder:
    """``parent.name`` is the module that holds a parameter."""

    parent: nn.Module
    name: str
    module: nn.Module


def pack_linears(model: nn.Module, ops: LinearOps, *, is_compact: bool = False) -> None:
    """Replace the linear layers, the output head (with the embedding tied to it) and the experts of ``model``.

    Afterwards ``parameters()`` and ``state_dict()`` no longer show these weights; ``layer.weight`` tells shape, dtype
    and device only. ``is_compact``: bfloat16 weights in 12 bits, which serves steps of few rows (``LinearOps.pack``).
    """
    linears, experts = list(_linears(model)), list(_experts(model))
    weights = [group[0].module.weight for group in linears]
    weights += [weight for holder in experts for weight in _expert_weights(holder.module)]
    sizes = [ops.num_words(weight) for weight in weights]
    regions = iter(large_pages(sum(sizes)).split(sizes))
    before, after = sum(weight.nbytes for weight in weights), 0
    del weights  # else the originals would live until the end
    while linears:
        group = linears.pop(0)
        packed = _pack(ops, group[0].module.weight, next(regions), is_compact)
        after += packed.nbytes
        for holder in group:
            if isinstance(holder.module, nn.Embedding):
                _share(holder.module, ops, packed)
            else:
                setattr(holder.parent, holder.name, PackedLinear(ops, packed, holder.module.bias))
    while experts:
        holder = experts.pop(0)
        up, down = (_pack(ops, weight, next(regions), is_compact) for weight in _expert_weights(holder.module))
        after += up.nbytes + down.nbytes
        activate = holder.module._apply_gate if holder.module.has_gate else holder.module.act_fn
        for name in [name for name, _ in holder.module.named_parameters(recurse=False)]:
            delattr(holder.module, name)  # `activate` keeps the module
        setattr(holder.parent, holder.name, PackedExperts(ops, up, down, activate))
    logger.info("weights packed matrices=%d bytes=%d packed_bytes=%d", len(sizes), before, after)


def _pack(ops: LinearOps, weight: Tensor, words: Tensor, is_compact: bool) -> PackedWeight:
    packed = ops.pack(weight, words, is_compact=is_compact)
    ops.forget(weight)
    return packed


def _share(embedding: nn.Embedding, ops: LinearOps, packed: PackedWeight) -> None:
    """A subclass that scales its rows calls ``super().forward``: that becomes the packed one."""
    del embedding.weight
    embedding.weight = _stand_in(packed)
    embedding.packed_rows = lambda indices: ops.rows(packed, indices)
    kind = type(embedding)
    bases = (_PackedEmbedding,) if kind is nn.Embedding else (kind, _PackedEmbedding)
    embedding.__class__ = type(f"Packed{kind.__name__}", bases, {})


def _linears(model: nn.Module) -> Iterator[list[_Holder]]:
    """Holders of each weight that can be packed: linear layers, perhaps with the embedding tied to them."""
    holders: dict[int, list[_Holder]] = {}
    for parent in model.modules():
        for name, module in parent.named_children():
            for parameter in module.parameters(recurse=False):
                holders.setdefault(id(parameter), []).append(_Holder(parent, name, module))
    for key, group in holders.items():
        layers = [holder for holder in group if type(holder.module) is nn.Linear]
        if (
            layers
            and all(type(h.module) is nn.Linear or isinstance(h.module, nn.Embedding) for h in group)
            and all(id(holder.module.weight) == key for holder in group)  # else it is a bias
            and layers[0].module.weight.dtype in DTYPES
            and not any(holder.name in _READ_DIRECTLY for holder in group)
        ):
            yield layers + [holder for holder in group if holder not in layers]


def _experts(model: nn.Module) -> Iterator[_Holder]:
    """transformers' experts modules of the plain form: [experts, out, in] weights, no biases, no norm."""
    for parent in model.modules():
        for name, module in parent.named_children():
            plain = getattr(module, "is_transposed", None) is False and not module.has_bias
            if plain and not module.has_post_expert_norm and _expert_weights(module)[0].dtype in DTYPES:
                yield _Holder(parent, name, module)


def _expert_weights(experts: Any) -> tuple[Tensor, Tensor]:
    return (experts.gate_up_proj if experts.has_gate else experts.up_proj), experts.down_proj
