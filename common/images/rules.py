"""How many tokens an image takes in a model's prompts, from its size alone, and what names what the model sees of it.

The rule is the one of Qwen2-VL's image processor (transformers' ``smart_resize``): an image is resized to a multiple of
``patch_size * merge_size`` on each side, within bounds of its area; each square of ``merge_size`` patches is a token.
Whoever runs the processor compares what it gives with this (``common.models.vision``).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from common.errors import ConfigError, ImageRefusedError
from common.images.header import ImageHeader
from common.images.span import DIGEST_BYTES

MAX_ASPECT_RATIO = 200
"""The processor refuses longer images."""
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Of what one request may bring. ``max_pixels``: of each image, as its header says; ``max_bytes``: encoded."""

    max_images: int = 16
    max_pixels: int = 36_000_000
    max_bytes: int = 20 * 2**20

    @classmethod
    def of(cls, limit_mm_per_prompt: str, *, max_pixels: int, max_bytes: int) -> ImageLimits:
        """``limit_mm_per_prompt``: as vLLM's flag, ``{"image": 16}``. Raises ConfigError naming the flag."""
        flag = "--limit-mm-per-prompt"
        try:
            given = json.loads(limit_mm_per_prompt)
        except ValueError as exc:
            raise ConfigError(f"{flag} {limit_mm_per_prompt!r} is no JSON: {exc}", param=flag) from exc
        count = given.get("image") if isinstance(given, Mapping) and set(given) <= {"image"} else None
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 1024:
            raise ConfigError(
                f'{flag} {limit_mm_per_prompt!r} must be {{"image": N}} with N between 0 and 1024', param=flag
            )
        return cls(count, max_pixels, max_bytes)


@dataclass(frozen=True, slots=True)
class ImageRules:
    """
    Attributes:
        placeholder_id: the token that stands for each part of an image; templates write it once.
        end_id: the token that closes an image; None: none does.
        min_pixels, max_pixels: bounds of the resized image's area.
        processor: digest of everything else that decides what the vision tower is given, hex.
    """

    placeholder_id: int
    end_id: int | None
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    processor: str

    def with_at_most(self, num_tokens: int) -> ImageRules:
        """The rules that make images smaller which would take more tokens."""
        most = num_tokens * (self.patch_size * self.merge_size) ** 2
        return dataclasses.replace(self, max_pixels=min(self.max_pixels, most), min_pixels=min(self.min_pixels, most))

    def grid(self, header: ImageHeader, name: str) -> tuple[int, int]:
        """Rows and columns of an image's tokens. Raises ImageRefusedError for an image that the processor refuses."""
        height, width = header.height, header.width
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise ImageRefusedError(
                f"{name}: an image's longer side must be at most {MAX_ASPECT_RATIO} times the other, got {width} x "
                f"{height} pixels",
                reason="limit",
                param=name,
            )
        factor = self.patch_size * self.merge_size
        high, wide = (round(side / factor) * factor for side in (height, width))
        if high * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            high, wide = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
        elif high * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            high, wide = (math.ceil(side * grow / factor) * factor for side in (height, width))
        return high // factor, wide // factor

    def digest(self, data: bytes, rows: int, columns: int) -> bytes:
        """Of an encoded image that takes ``rows`` times ``columns`` tokens."""
        digest = blake2b(digest_size=DIGEST_BYTES)
        digest.update(f"{self.processor} {rows} {columns} ".encode())
        digest.update(data)
        return digest.digest()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ImageRules:
        """Raises ValueError or TypeError for what is no such object."""
        numbers = {name: int(value[name]) for name in ("placeholder_id", "patch_size", "merge_size", "min_pixels")}
        end_id = value.get("end_id")
        return cls(
            **numbers,
            max_pixels=int(value["max_pixels"]),
            end_id=None if end_id is None else int(end_id),
            processor=str(value["processor"]),
        )


def read_image_rules(config: Mapping[str, Any], processor: Mapping[str, Any]) -> ImageRules:
    """From a checkpoint's ``config.json`` and ``preprocessor_config.json``.

    Raises:
        ValueError: saying what of them is not known here.
    """
    kind = processor.get("image_processor_type")
    if kind not in _PROCESSORS:
        raise ValueError(f"its image processor is {kind!r}, not one of {', '.join(_PROCESSORS)}")
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if processor.get(name, True) is not True:
            raise ValueError(f"its image processor has {name} {processor[name]!r}")
    size = processor.get("size") or {}
    vision = config.get("vision_config") or {}
    patch_size, merge_size = processor.get("patch_size", 14), processor.get("merge_size", 2)
    if (patch_size, merge_size) != (vision.get("patch_size", 16), vision.get("spatial_merge_size", 2)):
        raise ValueError(f"patches of its image processor, {patch_size} and {merge_size}, are not its vision tower's")
    min_pixels = processor.get("min_pixels") or size.get("shortest_edge", 56 * 56)
    max_pixels = processor.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280)
    facts = {name: value for name, value in processor.items() if not name.startswith("_")}
    return ImageRules(
        placeholder_id=int(config["image_token_id"]),
        end_id=config.get("vision_end_token_id"),
        patch_size=int(patch_size),
        merge_size=int(merge_size),
        min_pixels=int(min_pixels),
        max_pixels=int(max_pixels),
        processor=blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=DIGEST_BYTES).hexdigest(),
    )
