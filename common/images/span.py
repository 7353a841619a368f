"""An image's place in a prompt, and what it does to the positions of the tokens around it.

A prompt holds ``rows * columns`` placeholder tokens for an image, one for each vector of the vision tower. The tokens
alone say nothing of the image: whoever compares prompts, or names them, takes ``digest`` and the offset too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 32
"""A cryptographic length: prompts with equal digests share memory, across tenants."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """
    Attributes:
        start: position of its first token.
        rows, columns: its tokens, as they lie in the image.
        digest: of the encoded image, and of everything that decides what the vision tower makes of it.
    """

    start: int
    rows: int
    columns: int
    digest: bytes

    @property
    def length(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_positions(self) -> int:
        """How far the text after it moves on, on each axis (Qwen2-VL's rule, arXiv 2409.12191)."""
        return max(self.rows, self.columns)


def overlapping(images: Sequence[ImageSpan], start: int, end: int) -> list[ImageSpan]:
    """Those with tokens in [start, end)."""
    return [image for image in images if image.start < end and image.end > start]


def end_of_images(images: Sequence[ImageSpan]) -> int:
    """Position after the last image's last token; 0 without images."""
    return images[-1].end if images else 0


def digests_and_offsets(images: Sequence[ImageSpan], start: int, end: int) -> bytes:
    """What a key of the tokens [start, end) binds besides their ids; empty without an image there."""
    return b"".join(
        image.digest + (start - image.start).to_bytes(8, "little", signed=True)
        for image in overlapping(images, start, end)
    )


def row_id(image: ImageSpan, position: int) -> int:
    """A number for the token at ``position`` of an image, that no other image's token has, and no token id is."""
    offset = (position - image.start).to_bytes(8, "little")
    return int.from_bytes(blake2b(image.digest + offset, digest_size=DIGEST_BYTES).digest(), "little") | 1 << 255


def rope_position(images: Sequence[ImageSpan], position: int) -> int:
    """Of a token of text, on every axis."""
    return position + sum(image.num_positions - image.length for image in images if image.end <= position)


def rope_axes(images: Sequence[ImageSpan], start: int, end: int) -> tuple[list[int], list[int], list[int]]:
    """Positions in time, height and width of the tokens [start, end)."""
    time: list[int] = []
    height: list[int] = []
    width: list[int] = []
    at = start
    for image in overlapping(images, start, end):
        _extend_text(images, at, image.start, (time, height, width))
        first, last = max(start, image.start), min(end, image.end)
        base, offsets = rope_position(images, image.start), range(first - image.start, last - image.start)
        time.extend([base] * len(offsets))
        height.extend(base + offset // image.columns for offset in offsets)
        width.extend(base + offset % image.columns for offset in offsets)
        at = last
    _extend_text(images, at, end, (time, height, width))
    return time, height, width


def _extend_text(images: Sequence[ImageSpan], start: int, end: int, axes: tuple[list[int], ...]) -> None:
    if start < end:
        base = rope_position(images, start)
        for axis in axes:
            axis.extend(range(base, base + end - start))
