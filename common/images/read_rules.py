"""The rules of a checkpoint's images, from its own files: one function for each image processor that is known here."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from common.images.layout import Tiling
from common.images.rules import ImageRules, Kind
from common.images.span import DIGEST_BYTES

TokenId = Callable[[str], int | None]
"""The id of a token of the checkpoint's tokenizer; None: it has none such."""


def read_image_rules(
    config: Mapping[str, Any], processor: Mapping[str, Any], token_id: TokenId, *, has_axes: bool
) -> ImageRules:
    """From a checkpoint's ``config.json``, its image processor's configuration and its tokenizer.

    Raises:
        ValueError: saying what of them is not known here.
    """
    kind = processor.get("image_processor_type")
    found = _PROCESSORS.get(str(kind).removesuffix("Fast").removesuffix("Pil"))
    if found is None:
        raise ValueError(f"its image processor is {kind!r}, not one of {', '.join(_PROCESSORS)}")
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if processor.get(name) not in (True, None):
            raise ValueError(f"its image processor has {name} {processor[name]!r}")
    facts = {name: value for name, value in processor.items() if not name.startswith("_")}
    digest = blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=DIGEST_BYTES).hexdigest()
    rules = found(config, processor, token_id, digest)
    return dataclasses.replace(rules, has_axes=has_axes)


def _qwen2_vl(config: Mapping[str, Any], processor: Mapping[str, Any], token_id: TokenId, digest: str) -> ImageRules:
    size = processor.get("size") or {}
    vision = config.get("vision_config") or {}
    patch_size, merge_size = processor.get("patch_size", 14), processor.get("merge_size", 2)
    if (patch_size, merge_size) != (vision.get("patch_size", 16), vision.get("spatial_merge_size", 2)):
        raise ValueError(f"patches of its image processor, {patch_size} and {merge_size}, are not its vision tower's")
    return ImageRules(
        placeholder_id=int(config["image_token_id"]),
        end_id=config.get("vision_end_token_id"),
        patch_size=int(patch_size),
        merge_size=int(merge_size),
        min_pixels=int(processor.get("min_pixels") or size.get("shortest_edge", 56 * 56)),
        max_pixels=int(processor.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280)),
        processor=digest,
    )


def _lfm2_vl(config: Mapping[str, Any], processor: Mapping[str, Any], token_id: TokenId, digest: str) -> ImageRules:
    patch_size, merge_size = int(processor.get("encoder_patch_size", 16)), int(processor.get("downsample_factor", 2))
    vision = config.get("vision_config") or {}
    if (patch_size, merge_size) != (vision.get("patch_size", 16), config.get("downsample_factor", 2)):
        raise ValueError(f"patches of its image processor, {patch_size} and {merge_size}, are not its vision tower's")
    if processor.get("do_pad", True) is not True:
        raise ValueError("its image processor has do_pad False")
    area = (patch_size * merge_size) ** 2
    start, end, overview = (_need(token_id, text) for text in ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"))
    tile_size, max_tiles = int(processor.get("tile_size", 512)), int(processor.get("max_tiles", 10))
    tiling = None
    if processor.get("do_image_splitting", True) and max_tiles > 1:
        if tile_size % (patch_size * merge_size):
            raise ValueError(f"its image processor's tiles of {tile_size} pixels are no whole number of tokens")
        side = range(1, max_tiles + 1)
        marks = tuple(_need(token_id, f"<|img_row_{row}_col_{column}|>") for row in side for column in side)
        tiling = Tiling(
            tile_size,
            int(processor.get("min_tiles", 2)),
            max_tiles,
            float(processor.get("max_pixels_tolerance", 2.0)),
            bool(processor.get("use_thumbnail", True)),
            marks,
            overview,
        )
    return ImageRules(
        placeholder_id=int(config["image_token_id"]),
        end_id=end,
        patch_size=patch_size,
        merge_size=merge_size,
        min_pixels=int(processor.get("min_image_tokens", 64)) * area,
        max_pixels=int(processor.get("max_image_tokens", 256)) * area,
        processor=digest,
        kind=Kind.LFM2_VL,
        start_ids=(start,),
        end_ids=(end,),
        tiling=tiling,
    )


def _gemma3(config: Mapping[str, Any], processor: Mapping[str, Any], token_id: TokenId, digest: str) -> ImageRules:
    side = math.isqrt(int(config.get("mm_tokens_per_image", 256)))
    size, vision = processor.get("size") or {}, config.get("vision_config") or {}
    pixels = int(size.get("height", 224))
    if processor.get("do_pan_and_scan"):
        raise ValueError("its image processor has do_pan_and_scan True")
    if {pixels, size.get("width", 224)} != {vision.get("image_size", 224)} or pixels % side:
        raise ValueError(
            f"its image processor makes {size} of images, its vision tower takes {vision.get('image_size')}"
        )
    begin, inner, end = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
    ids = [_need(token_id, text) for text in (begin, inner, end)]
    named = [config.get(name) for name in ("boi_token_index", "image_token_index", "eoi_token_index")]
    if ids != named:
        raise ValueError(f"its tokenizer has tokens {ids} for images, its config.json {named}")
    return ImageRules(
        placeholder_id=ids[1],
        end_id=ids[2],
        patch_size=pixels // side,
        merge_size=1,
        min_pixels=pixels**2,
        max_pixels=pixels**2,
        processor=digest,
        kind=Kind.GEMMA3,
        marker=(begin, f"\n\n{begin}{inner}{end}\n\n"),
    )


def _need(token_id: TokenId, text: str) -> int:
    found = token_id(text)
    if found is None:
        raise ValueError(f"its tokenizer has no token {text}")
    return found


_PROCESSORS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], TokenId, str], ImageRules]] = (
    MappingProxyType(
        {
            "Qwen2VLImageProcessor": _qwen2_vl,
            "Lfm2VlImageProcessor": _lfm2_vl,
            "Gemma3ImageProcessor": _gemma3,
        }
    )
)
"""By ``image_processor_type``, whichever backend it names."""
