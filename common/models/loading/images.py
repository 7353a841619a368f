"""Whether a checkpoint takes images, and what computes them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError
from common.geometry.families import Family
from common.images.read_rules import read_image_rules
from common.images.rules import ImageRules
from common.models.vision.processor import ImageProcessor, read_processor
from common.models.vision.tower import VisionTower, create_tower

logger = logging.getLogger(__name__)


def load_images(
    folder: Path,
    raw_config: Mapping[str, Any],
    family: Family,
    tokenizer: Any | None,
    max_tokens: int | None,
    *,
    vision: Mapping[str, torch.nn.Module],
    dtype: torch.dtype,
    device: torch.device,
    with_tower: bool,
) -> tuple[ImageRules | str, VisionTower | None, ImageProcessor | None]:
    """The rules, or why the model takes no images here; and, ``with_tower``, what computes them. A checkpoint whose
    images cannot be used is served with text alone. ``max_tokens``: of one image. ``vision``: what was loaded of its
    vision modules already."""
    try:
        rules = _read_rules(folder, raw_config, family, tokenizer)
        if max_tokens is not None:
            rules = rules.with_at_most(max_tokens)
        if not with_tower:
            return rules, None, None
        processor = ImageProcessor(folder, rules)
        tower = create_tower(folder, vision, dtype=dtype, device=device)
    except (ConfigError, ValueError) as exc:
        if family.sees_images is not None:
            logger.warning("images are refused: %s", exc)
        return str(exc), None, None
    logger.info("vision tower loaded bytes=%d tokens_per_image=%d", tower.num_bytes, _most_tokens(rules))
    return rules, tower, processor


def _read_rules(folder: Path, raw_config: Mapping[str, Any], family: Family, tokenizer: Any | None) -> ImageRules:
    """Raises ValueError with the reason."""
    if family.sees_images is None:
        raise ValueError("it is a model of text")

    def token_id(text: str) -> int | None:
        if tokenizer is None:
            return None
        found = tokenizer.convert_tokens_to_ids(text)
        return found if isinstance(found, int) and found != tokenizer.unk_token_id else None

    try:
        processor = read_processor(folder)
        return read_image_rules(raw_config, processor, token_id, has_axes=family.sees_images.has_axes)
    except OSError as exc:
        raise ValueError(f"its image processor's configuration cannot be read: {exc}") from exc
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"its config.json or its image processor's is not as expected: {exc!r}") from exc


def _most_tokens(rules: ImageRules) -> int:
    most = rules.max_pixels // rules.factor**2
    if rules.tiling is None:
        return most
    tile = (rules.tiling.tile_size // rules.factor) ** 2
    return tile * rules.tiling.max_tiles + most * rules.tiling.has_overview
