"""An image as a request brings it: where in the body, and the bytes behind its URL.

Only ``data:`` URLs have bytes here. What others name is fetched by the proxy, if at all, and no other scheme is ever
opened.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from common.errors import ImageRefusedError
from common.images.header import ImageHeader, read_header
from common.images.rules import ImageLimits

_DATA_URL = re.compile(r"data:image/[A-Za-z0-9.+-]{1,32};base64,")
_PIECE_CHARS = 2**18
"""A multiple of 4, so that each piece is base64 by itself; 1 ms."""
_DATA_PREFIX = "data:image/x;base64,"
"""Of an image that was fetched: its own bytes say what it is."""
_MAX_PREFIX = 64
"""Characters of a URL that are looked at for its scheme."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """``name``: the field that it came in, for errors."""

    name: str
    url: str

    @property
    def is_remote(self) -> bool:
        """Whether the image has to be fetched."""
        return self.url[:_MAX_PREFIX].partition(":")[0].lower() in ("http", "https")

    def with_data(self, data: bytes) -> ImageSource:
        """The same image as a data URL."""
        return ImageSource(self.name, _DATA_PREFIX + base64.b64encode(data).decode("ascii"))

    def read(self, limits: ImageLimits) -> EncodedImage:
        """Takes as long as the image has bytes: 1 ms for each 500 kB.

        Raises:
            ImageRefusedError: no data URL of base64, too many bytes or pixels, or no image.
        """
        prefix = _DATA_URL.match(self.url, 0, _MAX_PREFIX)
        if prefix is None and self.is_remote:
            raise ImageRefusedError(
                f"{self.name}: only a proxy with --allowed-media-domains fetches http and https URLs; send a data URL",
                reason="url",
                param=self.name,
            )
        if prefix is None:
            raise ImageRefusedError(
                f"{self.name} must be a data URL of base64 (data:image/png;base64,...), got {self.url[:40]!r}",
                reason="url",
                param=self.name,
            )
        if len(self.url) - prefix.end() > limits.max_bytes * 4 // 3 + 4:
            raise too_long(self.name, limits)
        try:
            # In pieces: a call on all of it would hold the interpreter's lock for a tenth of a second.
            starts = range(prefix.end(), len(self.url), _PIECE_CHARS)
            data = b"".join(binascii.a2b_base64(self.url[at : at + _PIECE_CHARS], strict_mode=True) for at in starts)
        except ValueError as exc:
            raise ImageRefusedError(
                f"{self.name}: the data URL is no base64: {exc}", reason="url", param=self.name
            ) from exc
        return EncodedImage.of(data, self.name, limits)


def too_long(name: str, limits: ImageLimits) -> ImageRefusedError:
    return ImageRefusedError(
        f"{name}: an image must have at most --max-image-bytes {limits.max_bytes} bytes", reason="limit", param=name
    )


@dataclass(frozen=True, slots=True)
class EncodedImage:
    name: str
    data: bytes
    header: ImageHeader

    @classmethod
    def of(cls, data: bytes, name: str, limits: ImageLimits) -> EncodedImage:
        """Raises ImageRefusedError as ``ImageSource.read``."""
        if len(data) > limits.max_bytes:
            raise too_long(name, limits)
        header = read_header(data, name)
        if header.width * header.height > limits.max_pixels:
            raise ImageRefusedError(
                f"{name}: an image must have at most --max-image-pixels {limits.max_pixels} pixels, got "
                f"{header.width} x {header.height}",
                reason="limit",
                param=name,
            )
        return cls(name, data, header)
