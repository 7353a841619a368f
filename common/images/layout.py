"""How an image is laid out in a prompt: how large the processor makes it, and into which tiles it cuts it.

Sizes alone decide, so nothing is decoded. Whoever runs a processor compares what it gives with this
(``common.models.vision``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows and columns of tokens that the vision tower computes together: a whole image, or a tile of one that is cut
    into ``tiles``, rows and columns of them."""

    rows: int
    columns: int
    tiles: tuple[int, int] | None = None


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, *, at_least: int = 0
) -> tuple[int, int]:
    """Height and width as multiples of ``factor`` within bounds of the area (Qwen2-VL's rule, which LFM2-VL shares but
    for sides of ``at_least`` so many pixels)."""
    high, wide = (max(at_least, round(side / factor) * factor) for side in (height, width))
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return high, wide


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of images that are too large for one piece (LFM2-VL): a grid of tiles of one size, then all of it, made smaller.

    Attributes:
        tile_size: pixels of a tile's side.
        tolerance: images of up to so many times the largest piece's pixels are made smaller instead.
        has_overview: the image as a whole follows its tiles.
        mark_ids: tokens before the tiles, row by row in a square of ``max_tiles`` a side.
        overview_id: the token before the overview.
    """

    tile_size: int
    min_tiles: int
    max_tiles: int
    tolerance: float
    has_overview: bool
    mark_ids: tuple[int, ...]
    overview_id: int

    def is_cut(self, height: int, width: int, factor: int, patch_size: int, max_pixels: int) -> bool:
        high, wide = (max(patch_size, round(side / factor) * factor) for side in (height, width))
        return high * wide > max_pixels * self.tolerance

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: of all grids the one with the nearest aspect ratio; of equally near ones the
        largest that the image fills by half."""
        # Put into a set in transformers' own order: that decides between grids of as many tiles.
        ratios = [
            (columns, rows)
            for most in range(self.min_tiles, self.max_tiles + 1)
            for columns in range(1, most + 1)
            for rows in range(1, most + 1)
            if self.min_tiles <= columns * rows <= self.max_tiles
        ]
        best, least = (1, 1), math.inf
        for columns, rows in sorted(set(ratios), key=lambda ratio: ratio[0] * ratio[1]):
            away = abs(width / height - columns / rows)
            fills = width * height > 0.5 * self.tile_size**2 * columns * rows
            if away < least or (away == least and fills):
                best, least = (columns, rows), away
        return best[1], best[0]

    def marks(self, rows: int, columns: int) -> Iterator[int]:
        """The tokens before the tiles of a grid, row by row."""
        side = math.isqrt(len(self.mark_ids))
        for row in range(rows):
            yield from self.mark_ids[row * side : row * side + columns]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Tiling:
        """Raises ValueError, TypeError or KeyError for what is no such object."""
        return cls(
            int(value["tile_size"]),
            int(value["min_tiles"]),
            int(value["max_tiles"]),
            float(value["tolerance"]),
            bool(value["has_overview"]),
            tuple(int(each) for each in value["mark_ids"]),
            int(value["overview_id"]),
        )
