"""MLPs and experts by their intermediate columns. Routers stay whole: every rank makes the same choice, of its part of
the same experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from common.errors import ConfigError
from common.kv_cache.spec import ShardPart
from common.models.parallel.slicing import Slicer

# Names of the layers of an MLP: those that make its intermediate columns, with how many of them one behind the other,
# then the one that reads them.
_MLPS = (
    (("gate_proj", "up_proj"), 1, "down_proj"),
    (("w1", "w3"), 1, "w2"),
    (("input_linear",), 2, "output_linear"),
    (("gate_up_proj",), 2, "down_proj"),
    (("up_proj",), 1, "down_proj"),
)


def slice_mlps(slicer: Slicer, model: nn.Module) -> int:
    """Cuts the MLPs and experts of ``model``; how many they were.

    Raises:
        ConfigError: experts whose weights are in another form than is known.
    """
    found = 0
    for module in list(model.modules()):
        if hasattr(module, "is_transposed"):
            _slice_experts(slicer, module)
            found += 1
        else:
            found += _slice_mlp(slicer, module)
    return found


def _slice_mlp(slicer: Slicer, module: Any) -> bool:
    for first, each, last in _MLPS:
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in (*first, last)):
            part = ShardPart("intermediate columns", getattr(module, last).in_features)
            for name in first:
                slicer.outputs(getattr(module, name), *[part] * each)
                for adapter in getattr(module, f"{name}_adapter_list", ()):
                    if not isinstance(adapter, nn.Identity):
                        slicer.outputs(adapter[-1], *[part] * each)
            slicer.inputs(module, last, part)
            return True
    return False


def _slice_experts(slicer: Slicer, experts: Any) -> None:
    """[experts, out, in] each; the sum over ranks is put round them by ``sum_experts``."""
    kind = type(experts).__name__
    if experts.is_transposed or experts.has_bias or experts.has_post_expert_norm:
        raise ConfigError(
            f"--tensor-parallel-size {slicer.group.size}: no rule for the weights of {kind}",
            param="--tensor-parallel-size",
        )
    part = ShardPart("intermediate columns", experts.down_proj.shape[2])
    if experts.has_gate:
        slicer.replace(experts, "gate_up_proj", part, part, dim=1)
    else:
        slicer.replace(experts, "up_proj", part, dim=1)
    slicer.replace(experts, "down_proj", part, dim=2)
    experts.intermediate_dim = slicer.rows(part)


def sum_experts(slicer: Slicer, model: nn.Module) -> None:
    """Puts the sum over ranks round the experts of ``model``."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "is_transposed"):
                slicer.sum(parent, name)
