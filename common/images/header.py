"""Format and size of an encoded image, from its metadata: nothing is decoded, nothing of ours is built from sizes.

PNG, JPEG, GIF and WebP, by what their files begin with, whatever a client calls them. A size is as the image is shown:
cameras store images lying down, with an Exif tag that says so, which whoever makes another format of one may keep.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import ImageRefusedError

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")

_PNG = b"\x89PNG\r\n\x1a\n"
_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xDA)})
_EXIF, _ORIENTATION = b"Exif\x00\x00", 0x0112
_BYTE_ORDERS = {b"II*\x00": "<", b"II\x00*": "<", b"MM\x00*": ">", b"MM*\x00": ">"}
"""By what an Exif block begins with; like Pillow with the third and fourth byte in the wrong order too."""
_HAS_EXIF = 0x08
"""Flag of an extended WebP: without it libwebp does not look for the chunk."""
MAX_SEGMENTS = 4096
"""Of a JPEG before its frame, and chunks of a PNG or WebP: metadata comes in a few dozen, the pixels of 20 MB in 2,500
of 8 kB."""
MAX_TAGS = 1024
"""Of an Exif block: cameras write a few dozen."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """``format``: one of ``FORMATS``, as Pillow calls it. ``width`` and ``height``: in pixels, as it is shown.
    ``is_turned``: an Exif orientation has to be applied to show it so."""

    format: str
    width: int
    height: int
    is_turned: bool = False


def read_header(data: bytes, name: str) -> ImageHeader:
    """Raises ImageRefusedError, naming ``name``, for what is none of ``FORMATS`` or ends before its size."""
    try:
        header = _read(data)
    except (struct.error, IndexError, ValueError) as exc:
        raise ImageRefusedError(
            f"{name}: the image's header cannot be read: it is cut short", reason="content", param=name
        ) from exc
    if header is None:
        raise ImageRefusedError(
            f"{name} must be a PNG, JPEG, GIF or WebP image, got {len(data)} bytes that begin with {data[:8]!r}",
            reason="format",
            param=name,
        )
    if not (header.width and header.height):
        raise ImageRefusedError(
            f"{name}: the image's size must be at least 1 x 1 pixels, got {header.width} x {header.height}",
            reason="content",
            param=name,
        )
    return header


def _read(data: bytes) -> ImageHeader | None:
    if data.startswith(_PNG):
        if data[12:16] != b"IHDR":
            raise ValueError
        return _shown("PNG", _png_orientation(data), *struct.unpack_from(">II", data, 16))
    if data.startswith((b"GIF87a", b"GIF89a")):
        return ImageHeader("GIF", *struct.unpack_from("<HH", data, 6))
    if data.startswith(b"\xff\xd8\xff"):
        return _read_jpeg(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _shown("WEBP", _webp_orientation(data), *_webp_size(data))
    return None


def _shown(kind: str, orientation: int, width: int, height: int) -> ImageHeader:
    """Of an image that is stored in this size."""
    if orientation >= 5:
        width, height = height, width
    return ImageHeader(kind, width, height, orientation != 1)


def _png_orientation(data: bytes) -> int:
    """Of the last eXIf chunk, as in Pillow: it may come behind the pixels too, in an animation those of the first
    frame."""
    exif, has_pixels, at = b"", False, len(_PNG)
    for _ in range(MAX_SEGMENTS):
        start = at + 8
        if start > len(data):
            break
        kind, end = data[at + 4 : start], start + int.from_bytes(data[at : at + 4], "big")
        if kind == b"IEND" or end > len(data) or (kind == b"fcTL" and has_pixels):
            break
        if kind == b"eXIf":
            exif = data[start:end]
        has_pixels = has_pixels or kind == b"IDAT"
        at = end + 4
    return _orientation(exif)


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        if len(data) < 30:
            raise ValueError
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError


def _webp_orientation(data: bytes) -> int:
    """Of the first EXIF chunk, as in libwebp. Raises IndexError where the flags are missing."""
    if data[12:16] != b"VP8X" or not data[20] & _HAS_EXIF:
        return 1
    limit = min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    at = 12
    for _ in range(MAX_SEGMENTS):
        start = at + 8
        if start > limit:
            break
        end = start + int.from_bytes(data[at + 4 : start], "little")
        if end > limit:
            break
        if data[at : at + 4] == b"EXIF":
            return _orientation(data[start:end])
        at = end + (end - start) % 2
    return 1


def _read_jpeg(data: bytes) -> ImageHeader:
    orientation = 1
    for marker, start, end in _jpeg_segments(data):
        if marker == 0xE1 and data.startswith(_EXIF, start) and orientation == 1:
            orientation = _orientation(data[start + len(_EXIF) : end])
        if marker in _START_OF_FRAME:
            height, width = struct.unpack_from(">HH", data, start + 1)
            return _shown("JPEG", orientation, width, height)
    raise ValueError


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, and where its content begins and ends."""
    at = 2
    for _ in range(MAX_SEGMENTS):
        while data[at + 1] == 0xFF and data[at] == 0xFF:
            at += 1
        if data[at] != 0xFF:
            return
        marker = data[at + 1]
        at += 2
        if marker in _WITHOUT_LENGTH:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        if length < 2:
            return
        yield marker, at + 2, at + length
        at += length


def _orientation(exif: bytes) -> int:
    """1 to 8; 1 where there is none, or none that can be read."""
    tiff = exif.removeprefix(_EXIF)
    try:
        order = _BYTE_ORDERS[tiff[:4]]
        (at,) = struct.unpack_from(order + "I", tiff, 4)
        (num_tags,) = struct.unpack_from(order + "H", tiff, at)
        for index in range(min(num_tags, MAX_TAGS)):
            tag, kind, count, value = struct.unpack_from(order + "HHIH2x", tiff, at + 2 + 12 * index)
            if tag == _ORIENTATION:
                return value if (kind, count) == (3, 1) and 1 <= value <= 8 else 1
    except (KeyError, struct.error):
        pass
    return 1
