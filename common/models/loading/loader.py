"""From a checkpoint folder or hub id to a model that runs with all of its state outside.

1 read the raw config and derive the geometry (no weights yet). 2 load the weights straight to the target dtype. 3 run
transformers' own forward over a few tokens: what its cache then holds must have the planned shapes. 4 of several ranks:
cut the weights to this one's. 5 put the backend's layers in. 6 patch the model: functions present, mixers counted. 7
probe: the logits of step 3 against the engine's, in chunks, on all ranks together. Leaves by: a ``LoadedModel``, or
``ConfigError`` with the reason. A family never runs unprobed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.geometry.families import FAMILIES, SeesImages
from common.geometry.geometry import model_geometry
from common.geometry.parts import with_mtp
from common.images.rules import ImageRules
from common.kv_cache.shards import shard_geometry
from common.kv_cache.spec import ModelGeometry
from common.models.adapter.engine_cache import EngineCache
from common.models.adapter.head import Head
from common.models.adapter.mtp import MtpHead
from common.models.adapter.patching import ATTENTION_NAME, patch_model
from common.models.backends.backend import ModelBackend
from common.models.backends.create import create_backend
from common.models.loading.checkpoint import (
    eos_token_ids,
    load_tokenizer,
    load_weights,
    read_config,
    resolve_dtype,
    resolve_folder,
)
from common.models.loading.fingerprint import model_fingerprint, user_cache_dir
from common.models.loading.foreign_kernels import refuse_foreign_kernels
from common.models.loading.images import load_images
from common.models.loading.mtp import load_mtp
from common.models.loading.probe import check_numbers, check_replay, probe_tokens, stock_logits
from common.models.loading.quiet import quiet_transformers
from common.models.parallel.group import RankGroup
from common.models.parallel.shard_model import check_rules, shard_model
from common.models.vision.processor import ImageProcessor
from common.models.vision.tower import VisionTower, take_vision
from common.ops.interface import Ops

logger = logging.getLogger(__name__)

NO_IMAGES = "it runs on several ranks (--tensor-parallel-size)"
"""Why a model of several ranks takes no images."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal-LM ready for :class:`common.engine.model_runner.ModelRunner`.

    Attributes:
        model: the transformers model, in eval mode, on ``device``, attention switched to the paged function.
        geometry: what the cache must hold for it, checked against the loaded modules; with ``mtp`` its layer too. Of
            several ranks: this one's part.
        dtype: of the weights.
        backend: what it runs on.
        fingerprint: hex digest of config, weights, dtype and revision.
        head: rows of the last hidden state -> logits.
        tokenizer: the checkpoint's tokenizer, or None when it has none.
        eos_token_ids: what the checkpoint names, of those that the logits have, sorted.
        folder: where the files are.
        is_replayed: whether a recorded decode step gave what the forward gives.
        sees_images: of the family.
        image_rules: how many tokens an image takes; a text says why the model takes none.
        tower, image_processor: loaded on request, where the model takes images.
        mtp: the head for further tokens, loaded on request.
        undivided: the geometry of the model as a whole.
        num_ranks: how many processes compute it together.
    """

    model: Any
    geometry: ModelGeometry
    undivided: ModelGeometry
    dtype: torch.dtype
    backend: ModelBackend
    fingerprint: str
    head: Head
    tokenizer: Any | None
    eos_token_ids: tuple[int, ...]
    folder: Path
    is_replayed: bool
    num_ranks: int = 1
    sees_images: SeesImages | None = None
    image_rules: ImageRules | str = "it is a model of text"
    tower: VisionTower | None = None
    image_processor: ImageProcessor | None = None
    mtp: MtpHead | None = None

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.backend.device

    @property
    def ops(self) -> Ops:
        """What the patched functions call."""
        return self.backend.ops


def check_ranks(model: str, num_ranks: int, *, revision: str | None = None) -> None:
    """That ``num_ranks`` processes can share ``model``, by its config alone.

    Raises:
        ConfigError: naming what they cannot divide.
    """
    raw_config = read_config(resolve_folder(model, revision))
    check_rules(model_geometry(raw_config, resolve_dtype("auto", raw_config)), num_ranks)


def load_model(
    model: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    ops_backend: str = "auto",
    prebuilt_ops: str | None = None,
    enforce_eager: bool = False,
    compact_weights: bool = False,
    with_images: bool = False,
    max_image_tokens: int | None = None,
    with_mtp_head: bool = False,
    group: RankGroup | None = None,
) -> LoadedModel:
    """Load ``model`` (a local folder or a hub id).

    ``dtype`` is float32 | bfloat16 | float16 | auto (the checkpoint's own). ``seed`` picks the probe's tokens.
    ``ops_backend`` is auto | torch | cpp | triton, ``prebuilt_ops`` a folder (:func:`common.ops.select.create_ops`).
    ``enforce_eager``: decode steps are not recorded. ``compact_weights``: packed for decode steps rather than for
    prompts (:func:`common.models.cpu.linears.pack_linears`). ``with_images``: the vision tower too, if the model has
    one that can be used. ``max_image_tokens``: larger images are made smaller; None: as the checkpoint says.
    ``with_mtp_head``: the head for further tokens too. ``group``: with whose other ranks this one shares the model; all
    of them load it at once, without images and that head, and no step is recorded.

    Raises:
        ConfigError: no such folder or no config in it, unsupported ``model_type``, unreadable weights, failed probe, no
            head where one is wanted, foreign kernels in the environment, a model that the ranks cannot divide.
    """
    begin_s = time.monotonic()
    refuse_foreign_kernels()
    folder = resolve_folder(model, revision)
    raw_config = read_config(folder)
    dtype = resolve_dtype(dtype, raw_config)
    geometry = model_geometry(raw_config, dtype)  # refuses what is not in FAMILIES
    undivided, family = geometry, FAMILIES[geometry.model_type]
    if group is not None:
        check_rules(undivided, group.size)
        geometry = shard_geometry(undivided, group.size)
    target = torch.device(device)
    backend = create_backend(
        ops_backend,
        dtype=getattr(torch, dtype),
        device=target,
        cache_dir=user_cache_dir(),
        prebuilt_dir=Path(prebuilt_ops) if prebuilt_ops is not None else None,
    )
    with quiet_transformers():
        loaded = load_weights(folder, getattr(torch, dtype), target, trust_remote_code)
        vision = take_vision(loaded)
        head = Head(loaded)
        tokens = probe_tokens(geometry.vocab_size, seed)
        expected = stock_logits(loaded, tokens, undivided, target)
        mtp = load_mtp(folder, loaded, family, geometry, getattr(torch, dtype)) if with_mtp_head else None
        if group is not None:
            shard_model(loaded, family, undivided, group)
        num_parameters = sum(p.numel() for p in loaded.parameters())
        for module in (loaded, mtp) if mtp is not None else (loaded,):
            backend.prepare(module, is_compact=compact_weights)
        patch_model(loaded, family, geometry)
        if mtp is not None:
            mtp.config._attn_implementation = ATTENTION_NAME
        check_numbers(
            loaded,
            EngineCache(),
            backend.ops,
            geometry,
            tokens,
            expected,
            dtype=getattr(torch, dtype),
            device=target,
            tolerance=family.probe_tolerance,
        )
        is_replayed = not (enforce_eager or group) and check_replay(loaded, EngineCache(), backend, geometry, tokens)
        tokenizer = load_tokenizer(folder, trust_remote_code)
        images: tuple[ImageRules | str, VisionTower | None, ImageProcessor | None] = (NO_IMAGES, None, None)
        if group is None:
            images = load_images(
                folder,
                raw_config,
                family,
                tokenizer,
                max_image_tokens,
                vision=vision,
                dtype=getattr(torch, dtype),
                device=target,
                with_tower=with_images,
            )
        image_rules, tower, image_processor = images
    logger.info(
        "model loaded folder=%s model_type=%s dtype=%s device=%s ops=%s parameters=%d seconds=%.1f",
        folder,
        geometry.model_type,
        dtype,
        target,
        backend.ops.name,
        num_parameters,
        time.monotonic() - begin_s,
    )
    return LoadedModel(
        model=loaded,
        geometry=geometry if mtp is None else with_mtp(geometry),
        undivided=undivided if mtp is None else with_mtp(undivided),
        dtype=getattr(torch, dtype),
        backend=backend,
        fingerprint=model_fingerprint(folder, raw_config, dtype=dtype, revision=revision),
        head=head,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(loaded, raw_config, expected.shape[-1]),
        folder=folder,
        is_replayed=is_replayed,
        num_ranks=1 if group is None else group.size,
        sees_images=family.sees_images,
        image_rules=image_rules,
        tower=tower,
        image_processor=image_processor,
        mtp=mtp,
    )
