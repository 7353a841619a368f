"""Whether a checkpoint takes images, and what computes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError
from common.geometry.families import Family
from common.geometry.refused import WITHOUT_IMAGES
from common.images.rules import ImageRules, read_image_rules
from common.models.vision.processor import ImageProcessor
from common.models.vision.tower import VisionTower, load_tower

logger = logging.getLogger(__name__)

PROCESSOR_FILE = "preprocessor_config.json"


def load_images(
    folder: Path,
    raw_config: Mapping[str, Any],
    family: Family,
    max_tokens: int | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    with_tower: bool,
) -> tuple[ImageRules | str, VisionTower | None, ImageProcessor | None]:
    """The rules, or why the model takes no images here; and, ``with_tower``, what computes them. A checkpoint whose
    images cannot be used is served with text alone. ``max_tokens``: of one image."""
    try:
        rules = _read_rules(folder, raw_config, family)
        if max_tokens is not None:
            rules = rules.with_at_most(max_tokens)
        if not with_tower:
            return rules, None, None
        processor = ImageProcessor(folder, rules)
        tower = load_tower(folder, merge_size=rules.merge_size, dtype=dtype, device=device)
    except (ConfigError, ValueError) as exc:
        if family.sees_images:
            logger.warning("images are refused: %s", exc)
        return str(exc), None, None
    logger.info("vision tower loaded bytes=%d tokens_per_image=%d", tower.num_bytes, _most_tokens(rules))
    return rules, tower, processor


def _read_rules(folder: Path, raw_config: Mapping[str, Any], family: Family) -> ImageRules:
    """Raises ValueError with the reason."""
    model_type = str(raw_config.get("model_type"))
    if not family.sees_images:
        raise ValueError(WITHOUT_IMAGES.get(model_type, "it is a model of text"))
    try:
        processor = json.loads((folder / PROCESSOR_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ValueError(f"its {PROCESSOR_FILE} cannot be read: {exc}") from exc
    try:
        return read_image_rules(raw_config, processor)
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"its config.json or {PROCESSOR_FILE} is not as expected: {exc!r}") from exc


def _most_tokens(rules: ImageRules) -> int:
    return rules.max_pixels // (rules.patch_size * rules.merge_size) ** 2
