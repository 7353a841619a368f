"""Fuses a loaded model for the backend that will run it: what every backend with ops on rows can, then what needs more.

The order counts: mixers take their projections before linear layers are merged, MLPs are tried with merged ones, and
attention looks for norms that were replaced; sums are handed on by the modules that are there in the end.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from common.models.fused.activations import fuse_activations
from common.models.fused.attention import fuse_attention
from common.models.fused.gated_delta import fuse_gated_deltas
from common.models.fused.gated_mlps import fuse_gated_mlps
from common.models.fused.mamba2 import fuse_mamba2
from common.models.fused.merged_linears import merge_linears
from common.models.fused.norms import FusedNorm, fuse_norms
from common.models.fused.residual import sum_in_norms
from common.ops.interface import Ops
from common.ops.row_ops import FusedOps

logger = logging.getLogger(__name__)


@torch.inference_mode()
def fuse_model(model: nn.Module, ops: Ops) -> None:
    """Replace what ``ops`` has fewer kernels for; nothing, if it has no ops on rows."""
    norms: Any = getattr(ops, "norms", None)
    elementwise: Any = getattr(ops, "elementwise", None)
    if norms is None or elementwise is None:
        return
    fuse_norms(model, norms)
    fuse_activations(model, elementwise)
    if isinstance(ops, FusedOps):
        if any(hasattr(module, "is_transposed") for module in model.modules()):  # experts, in a form that is known
            model.set_experts_implementation("grouped_mm")
        mixers = fuse_gated_deltas(model, ops) + fuse_mamba2(model, ops)
        merge_linears(model)
        attentions = fuse_attention(model, ops)
        logger.info("mixers fused=%d attention with norms fused=%d", mixers, attentions)
    fuse_gated_mlps(model, elementwise)
    if isinstance(ops, FusedOps):
        sum_in_norms(model, ops.norms, FusedNorm)
