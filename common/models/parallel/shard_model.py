"""A loaded model becomes one rank's: its mixers, attention, MLPs and experts keep a part each, all else stays whole.

1 the geometry can be divided and every mixer has a rule, 2 mixers, 3 attention, 4 MLPs and experts. It is done on the
modules as transformers loaded them, before a backend puts its own in. Embeddings, norms of the residual stream, routers
and the output head are on every rank.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from common.errors import ConfigError
from common.geometry.families import Family
from common.kv_cache.shards import check_tensor_parallel
from common.kv_cache.spec import ModelGeometry
from common.models.parallel.attention import (
    is_attention,
    is_latent_attention,
    slice_attention,
    slice_latent_attention,
)
from common.models.parallel.group import RankGroup
from common.models.parallel.mixers import MIXERS
from common.models.parallel.mlps import slice_mlps, sum_experts
from common.models.parallel.slicing import Slicer

logger = logging.getLogger(__name__)


def check_rules(geometry: ModelGeometry, tp: int) -> None:
    """Raises ConfigError, naming what cannot be divided among ``tp`` ranks. Needs no weights."""
    check_tensor_parallel(geometry, tp)
    unknown = sorted({layer.mixer for layer in geometry.state_layers} - MIXERS.keys())
    if unknown:
        raise ConfigError(
            f"--tensor-parallel-size {tp}: no rule to divide the mixers of {geometry.model_type}"
            f" ({', '.join(unknown)})",
            param="--tensor-parallel-size",
        )


@torch.inference_mode()
def shard_model(model: Any, family: Family, geometry: ModelGeometry, group: RankGroup) -> None:
    """Cuts ``model``, of the undivided ``geometry``, to this rank's part.

    Raises:
        ConfigError: naming what cannot be divided.
    """
    check_rules(geometry, group.size)
    slicer = Slicer(group)
    states = {layer.layer_idx: layer for layer in geometry.state_layers}
    attention = {layer.layer_idx: layer for layer in geometry.attention_layers}
    mixers = [m for m in model.modules() if family.mixer_class and type(m).__name__ == family.mixer_class]
    for mixer in mixers:
        layer = states[mixer.layer_idx]
        MIXERS[layer.mixer](slicer, mixer, layer)
    of_mixers = {id(m) for mixer in mixers for m in mixer.modules()}
    attentions = 0
    for module in [m for m in model.modules() if id(m) not in of_mixers]:
        if is_latent_attention(module):
            slice_latent_attention(slicer, module)
        elif is_attention(module):
            # A block that several layers share (zamba) has no layer of its own: all of them keep the same.
            layer_idx = getattr(module, "layer_idx", -1)
            slice_attention(slicer, module, attention.get(layer_idx) or geometry.attention_layers[0])
        else:
            continue
        attentions += 1
    if bool(attentions) != bool(geometry.attention_layers):
        raise ConfigError(
            f"--tensor-parallel-size {group.size}: no rule for the attention of {geometry.model_type}",
            param="--tensor-parallel-size",
        )
    mlps = slice_mlps(slicer, model)
    sum_experts(slicer, model)
    where = (group.rank, group.size)
    logger.info("model divided rank=%d of=%d mixers=%d attention=%d mlps=%d", *where, len(mixers), attentions, mlps)
