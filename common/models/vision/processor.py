"""From an encoded image to what the vision tower takes: decoded by Pillow, resized and cut as transformers does.

Qwen2-VL's and Gemma 3's processors are transformers' own, on Pillow. LFM2-VL's needs torchvision there, which not every
build of torch has a build for; it is done here with the functions of torch that torchvision calls, to the same bits.
Blocks for tens of milliseconds a megapixel, without the interpreter's lock for most of it: call it in a thread.
"""

from __future__ import annotations

import io
import json
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError, ImageRefusedError, how_to_install
from common.images.rules import ImageRules, Kind
from common.images.source import EncodedImage

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Where a checkpoint may have its image processor's configuration; in the second it is one of several."""

Inputs = Mapping[str, Tensor]
"""Of one piece of an image: arguments of the wrapper's ``get_image_features``."""


def read_processor(folder: Path) -> Mapping[str, Any]:
    """The image processor's configuration. Raises OSError or ValueError."""
    for name in PROCESSOR_FILES:
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            found = found.get("image_processor", found) if isinstance(found, dict) else found
            if not isinstance(found, dict):
                raise ValueError(f"{name} holds no object")
            return found
    raise FileNotFoundError(f"no {' or '.join(PROCESSOR_FILES)}")


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
            raise ConfigError(f"images need Pillow ({how_to_install('images')})") from exc
        try:
            self._processor = _create(folder, rules)
        except (OSError, ValueError, TypeError) as exc:
            raise ConfigError(f"--model {str(folder)!r}: its image processor cannot be used: {exc}") from exc

    def pieces(self, image: EncodedImage) -> list[Inputs]:
        """What the tower takes for each piece of an image, in order.

        Raises:
            ImageRefusedError: it cannot be decoded, or its content is not what its header says.
        """
        from PIL import Image, ImageOps

        header = image.header
        # A decoder of files that anybody may send: whatever it raises, it is because of this one.
        decoder_errors = (
            OSError,
            ValueError,
            SyntaxError,
            EOFError,
            IndexError,
            KeyError,
            TypeError,
            OverflowError,
            struct.error,  # of an Exif block, which Pillow writes anew without the orientation
            Image.DecompressionBombError,  # Pillow's own bound, where --max-image-pixels is above it
        )
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
                picture = picture.convert("RGB")
        except decoder_errors as exc:
            reason = str(exc) or type(exc).__name__
            raise ImageRefusedError(
                f"{image.name}: the image cannot be decoded: {reason}", reason="content", param=image.name
            ) from exc
        pieces: list[Inputs] = self._processor.pieces(picture, image)
        return pieces


def _create(folder: Path, rules: ImageRules) -> Any:
    if rules.kind is Kind.LFM2_VL:
        return _Lfm2Vl(read_processor(folder), rules)
    if rules.kind is Kind.GEMMA3:
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return _Gemma3(Gemma3ImageProcessorPil.from_pretrained(folder))
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return _Qwen2Vl(Qwen2VLImageProcessorPil.from_pretrained(folder), rules)


class _Qwen2Vl:
    def __init__(self, processor: Any, rules: ImageRules) -> None:
        self._processor, self._rules = processor, rules

    def pieces(self, picture: Any, image: EncodedImage) -> list[Inputs]:
        """``pixel_values`` [num_patches, patch_values], in the order in which the tower merges them."""
        size = {"shortest_edge": self._rules.min_pixels, "longest_edge": self._rules.max_pixels}
        output = self._processor(images=[picture], size=size, return_tensors="pt")
        rows, columns = self._rules.grid(image.header, image.name)
        merge = self._rules.merge_size
        grid = [1, rows * merge, columns * merge]
        found = output["image_grid_thw"]
        assert found.tolist() == [grid], f"the processor gives {found}, not {grid}"
        return [{"pixel_values": output["pixel_values"].to(torch.float32), "image_grid_thw": found}]


class _Gemma3:
    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def pieces(self, picture: Any, image: EncodedImage) -> list[Inputs]:
        """``pixel_values`` [1, channels, height, width]."""
        output = self._processor(images=[picture], return_tensors="pt", do_pan_and_scan=False, do_convert_rgb=True)
        return [{"pixel_values": output["pixel_values"].to(torch.float32)}]


class _Lfm2Vl:
    """As ``Lfm2VlImageProcessor``, without padding: each piece runs alone."""

    def __init__(self, config: Mapping[str, Any], rules: ImageRules) -> None:
        if config.get("resample", 2) != 2:  # Pillow's number of bilinear
            raise ValueError(f"resample {config['resample']!r} is not bilinear (2)")
        factor = 1.0 / float(config.get("rescale_factor", 1 / 255))
        mean, std = (config.get(name, [0.5, 0.5, 0.5]) for name in ("image_mean", "image_std"))
        self._mean, self._std = (torch.tensor(each)[:, None, None] * factor for each in (mean, std))
        self._rules = rules

    def pieces(self, picture: Any, image: EncodedImage) -> list[Inputs]:
        """``pixel_values`` [1, num_patches, patch_values], row by row."""
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
        found = []
        rows, columns = self._rules.tiles(image.header)
        tiling = self._rules.tiling
        if tiling is not None and rows * columns:
            side = tiling.tile_size
            resized = _resize(pixels, rows * side, columns * side)
            for row in range(rows):
                for column in range(columns):
                    found.append(resized[:, row * side : (row + 1) * side, column * side : (column + 1) * side])
        if tiling is None or rows * columns == 0 or tiling.has_overview:
            found.append(_resize(pixels, *self._rules.size(image.header, image.name)))
        inputs = [self._inputs(each) for each in found]
        shapes = [tuple((each["spatial_shapes"][0] // self._rules.merge_size).tolist()) for each in inputs]
        pieces = [(piece.rows, piece.columns) for piece in self._rules.pieces(image.header, image.name)]
        assert shapes == pieces, shapes
        return inputs

    def _inputs(self, pixels: Tensor) -> Inputs:
        patch = self._rules.patch_size
        normal = (pixels.to(torch.float32) - self._mean) / self._std
        channels, height, width = normal.shape
        rows, columns = height // patch, width // patch
        patches = normal.reshape(channels, rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
        return {
            "pixel_values": patches.reshape(1, rows * columns, -1),
            "spatial_shapes": torch.tensor([[rows, columns]]),
            "pixel_attention_mask": torch.ones(1, rows * columns, dtype=torch.int32),
        }


def _resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """uint8 [channels, height, width], as torchvision's ``resize`` with its default of antialiasing."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    # torch has this for bytes where the processor has AVX2; elsewhere torchvision too goes by floats.
    has_bytes = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    given = pixels[None] if has_bytes else pixels[None].to(torch.float32)
    resized = torch.nn.functional.interpolate(
        given, size=(height, width), mode="bilinear", align_corners=False, antialias=True
    )[0]
    return resized if has_bytes else resized.clamp(0, 255).round().to(torch.uint8)
