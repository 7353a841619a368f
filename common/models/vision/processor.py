"""From an encoded image to what the vision tower takes, with transformers' own processor, on Pillow.

Blocks for tens of milliseconds a megapixel, without the interpreter's lock for most of it: call it in a thread.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError, ImageRefusedError
from common.images.rules import ImageRules
from common.images.source import EncodedImage

EXTRA = "tandem-serve[images]"
"""What installs Pillow."""


class ImageProcessor:
    """Of one checkpoint. Thread-safe: it keeps nothing of an image.

    Raises:
        ConfigError: Pillow is not installed, or the checkpoint's processor cannot be used.
    """

    def __init__(self, folder: Path, rules: ImageRules) -> None:
        self.rules = rules
        try:
            import PIL.Image  # noqa: F401
        except ImportError as exc:
            raise ConfigError(f"images need Pillow: install {EXTRA}") from exc
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        try:
            self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)
        except (OSError, ValueError, TypeError) as exc:
            raise ConfigError(f"--model {str(folder)!r}: its image processor cannot be used: {exc}") from exc

    def pixels(self, image: EncodedImage) -> Tensor:
        """[num_patches, patch_values] float32, in the order in which the tower merges them.

        Raises:
            ImageRefusedError: it cannot be decoded, or its content is not what its header says.
        """
        from PIL import Image, ImageOps

        header = image.header
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the size was checked before
                picture: Any = Image.open(io.BytesIO(image.data), formats=[header.format])
                if header.is_turned:
                    picture = ImageOps.exif_transpose(picture)
                if picture.size != (header.width, header.height):
                    raise ImageRefusedError(
                        f"{image.name}: the image is {picture.size[0]} x {picture.size[1]} pixels, its header says "
                        f"{header.width} x {header.height}",
                        reason="content",
                        param=image.name,
                    )
                size = {"shortest_edge": self.rules.min_pixels, "longest_edge": self.rules.max_pixels}
                output = self._processor(images=[picture.convert("RGB")], size=size, return_tensors="pt")
        # A decoder of files that anybody may send: whatever it raises, it is because of this one.
        except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError) as exc:
            reason = str(exc) or type(exc).__name__
            raise ImageRefusedError(
                f"{image.name}: the image cannot be decoded: {reason}", reason="content", param=image.name
            ) from exc
        rows, columns = self.rules.grid(header, image.name)
        merge = self.rules.merge_size
        grid = [1, rows * merge, columns * merge]
        assert output["image_grid_thw"].tolist() == [grid], (
            f"the processor gives {output['image_grid_thw']}, not {grid}"
        )
        pixels: Tensor = output["pixel_values"]
        return pixels.to(torch.float32)
