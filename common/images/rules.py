"""How many tokens an image takes in a model's prompts, from its size alone, and what names what the model sees of it.

An image is resized to a multiple of ``patch_size * merge_size`` on each side, within bounds of its area; each square of
``merge_size`` patches is a token. Which sizes those are depends on the processor (``Kind``, ``common.images.layout``);
whoever runs the processor compares what it gives with this (``common.models.vision``).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from common.errors import ConfigError, ImageRefusedError
from common.images.header import ImageHeader
from common.images.layout import Grid, Tiling, smart_resize
from common.images.span import DIGEST_BYTES

MAX_ASPECT_RATIO = 200
"""Qwen2-VL's processor refuses longer images."""


class Kind(enum.Enum):
    """Of image processors."""

    QWEN2_VL = "qwen2_vl"
    LFM2_VL = "lfm2_vl"
    GEMMA3 = "gemma3"


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
        has_axes: rotary positions of an image's tokens are on three axes; else they go on as in a text.
        start_ids, end_ids: tokens that are put round the placeholders: a template writes one placeholder alone.
        tiling: how large images are cut; None: they are made smaller.
        marker: what a template writes for an image, and what takes its place before the text is tokenised; None: it
            writes the placeholder.
    """

    placeholder_id: int
    end_id: int | None
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    processor: str
    kind: Kind = Kind.QWEN2_VL
    has_axes: bool = True
    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    tiling: Tiling | None = None
    marker: tuple[str, str] | None = None

    @property
    def factor(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge_size

    def with_at_most(self, num_tokens: int) -> ImageRules:
        """The rules that make images smaller which would take more tokens.

        Raises:
            ValueError: all images have one size, and that takes more.
        """
        most = num_tokens * self.factor**2
        if self.kind is Kind.GEMMA3:
            if most < self.max_pixels:
                needed = self.max_pixels // self.factor**2
                raise ValueError(f"its images take {needed} tokens each, --max-image-tokens is {num_tokens}")
            return self
        rules = dataclasses.replace(self, max_pixels=min(self.max_pixels, most), min_pixels=min(self.min_pixels, most))
        if rules.tiling is None:
            return rules
        left = most - rules.max_pixels * rules.tiling.has_overview
        max_tiles = min(rules.tiling.max_tiles, left // rules.tiling.tile_size**2)
        fits = max_tiles >= rules.tiling.min_tiles
        return dataclasses.replace(
            rules, tiling=dataclasses.replace(rules.tiling, max_tiles=max_tiles) if fits else None
        )

    def size(self, header: ImageHeader, name: str) -> tuple[int, int]:
        """Height and width in pixels that an image is resized to, as one piece. Raises ImageRefusedError for an image
        that the processor refuses."""
        height, width = header.height, header.width
        if self.kind is Kind.GEMMA3:
            return math.isqrt(self.max_pixels), math.isqrt(self.max_pixels)
        if self.kind is Kind.QWEN2_VL and max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise ImageRefusedError(
                f"{name}: an image's longer side must be at most {MAX_ASPECT_RATIO} times the other, got {width} x "
                f"{height} pixels",
                reason="limit",
                param=name,
            )
        at_least = self.factor if self.kind is Kind.LFM2_VL else 0
        high, wide = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels, at_least=at_least)
        tile_size = self.tiling.tile_size if self.tiling is not None else 0
        if self.kind is Kind.LFM2_VL and high * wide > max(self.max_pixels, tile_size**2):
            raise ImageRefusedError(
                f"{name}: an image of {width} x {height} pixels is too long and narrow: at {wide} x {high} it has more "
                f"than the model's {self.max_pixels} pixels",
                reason="limit",
                param=name,
            )
        return high, wide

    def tiles(self, header: ImageHeader) -> tuple[int, int]:
        """Rows and columns of tiles; 0, 0 where an image is one piece."""
        sizes = header.height, header.width
        if self.tiling is None or not self.tiling.is_cut(*sizes, self.factor, self.patch_size, self.max_pixels):
            return 0, 0
        return self.tiling.tiles(*sizes)

    def grid(self, header: ImageHeader, name: str) -> tuple[int, int]:
        """Rows and columns of an image's tokens, as one piece. Raises as ``size``."""
        height, width = self.size(header, name)
        return height // self.factor, width // self.factor

    def layout(self, header: ImageHeader, name: str) -> Iterator[int | Grid]:
        """What takes the place of a placeholder: token ids, and pieces of the image. Raises as ``size``."""
        whole = Grid(*self.grid(header, name))
        yield from self.start_ids
        rows, columns = self.tiles(header)
        if self.tiling is not None and rows * columns:
            side = self.tiling.tile_size // self.factor
            for mark in self.tiling.marks(rows, columns):
                yield mark
                yield Grid(side, side, (rows, columns))
        if self.tiling is None or rows * columns == 0:
            yield whole
        elif self.tiling.has_overview:
            yield self.tiling.overview_id
            yield whole
        yield from self.end_ids

    def pieces(self, header: ImageHeader, name: str) -> list[Grid]:
        """The pieces of an image that the vision tower computes, in order. Raises as ``size``."""
        return [each for each in self.layout(header, name) if isinstance(each, Grid)]

    def span_shape(self, grid: Grid) -> tuple[int, int]:
        """Rows and columns of a span: those of a row where positions go on as in a text."""
        return (grid.rows, grid.columns) if self.has_axes else (1, grid.rows * grid.columns)

    def digest(self, data: bytes, piece: Grid, number: int = 0) -> bytes:
        """Of the piece of an encoded image with this number. It says into what the image is cut: the same tile of
        another grid shows another part of it."""
        digest = blake2b(digest_size=DIGEST_BYTES)
        digest.update(f"{self.processor} {piece.rows} {piece.columns} ".encode())
        if piece.tiles is not None:
            digest.update(f"tiles {piece.tiles[0]} {piece.tiles[1]} ".encode())
        if number:
            digest.update(f"piece {number} ".encode())
        digest.update(data)
        return digest.digest()

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "kind": self.kind.value}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ImageRules:
        """Raises ValueError or TypeError for what is no such object."""
        end_id, tiling, marker = value.get("end_id"), value.get("tiling"), value.get("marker")
        return cls(
            placeholder_id=int(value["placeholder_id"]),
            end_id=None if end_id is None else int(end_id),
            patch_size=int(value["patch_size"]),
            merge_size=int(value["merge_size"]),
            min_pixels=int(value["min_pixels"]),
            max_pixels=int(value["max_pixels"]),
            processor=str(value["processor"]),
            kind=Kind(value["kind"]),
            has_axes=bool(value["has_axes"]),
            start_ids=tuple(int(each) for each in value["start_ids"]),
            end_ids=tuple(int(each) for each in value["end_ids"]),
            tiling=None if tiling is None else Tiling.from_json(tiling),
            marker=None if marker is None else (str(marker[0]), str(marker[1])),
        )
