"""What is not taken for an image: each refused by name, before anything is decoded."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from typing import Any

import pytest
from PIL import Image, ImageOps

from common.errors import ConfigError, ImageRefusedError
from common.images.header import ImageHeader, read_header
from common.images.layout import Grid
from common.images.read_rules import read_image_rules
from common.images.rules import ImageLimits, ImageRules
from common.images.source import ImageSource

LIMITS = ImageLimits(max_images=2, max_pixels=10_000, max_bytes=5_000)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(width: int, height: int) -> bytes:
    """A few bytes that claim any size."""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def encoded(width: int, height: int, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 10)).save(file, format, **options)
    return file.getvalue()


def source(data: bytes, kind: str = "png") -> ImageSource:
    return ImageSource(
        "messages[0].content[0].image_url.url", f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    )


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP"])
@pytest.mark.parametrize("options", [{}, {"progressive": True, "lossless": True}])
def test_header_when_an_encoder_wrote_the_image_then_format_and_size_are_its_own(
    format: str, options: dict[str, Any]
) -> None:
    for width, height in ((1, 1), (33, 70), (300, 17)):
        assert read_header(encoded(width, height, format, **options), "x") == ImageHeader(format, width, height)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_header_when_a_camera_lay_on_its_side_then_the_size_is_as_shown(orientation: int, format: str) -> None:
    data = encoded(40, 20, format, exif=exif_of(orientation))
    width, height = (20, 40) if orientation >= 5 else (40, 20)
    assert read_header(data, "x") == ImageHeader(format, width, height, orientation != 1)


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x010F] = "the camera's maker"
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_header_when_the_file_ends_anywhere_then_its_orientation_counts_once_it_is_there(format: str) -> None:
    data = encoded(40, 20, format, exif=exif_of(6))
    stored, shown = ImageHeader(format, 40, 20), ImageHeader(format, 20, 40, True)
    found = [read_header(data[:end], "x") for end in range(33, len(data) + 1)]
    assert found == sorted(found, key=[stored, shown].index)
    assert (found[0], found[-1]) == (stored, shown)


def tiff(kind: int = 3, count: int = 1, orientation: int = 6, *, tag: int = 0x0112, num: int = 1, at: int = 8) -> bytes:
    return b"MM\x00*" + struct.pack(">IHHHIHHI", at, num, tag, kind, count, orientation, 0, 0)


def test_header_when_a_png_has_its_exif_behind_the_pixels_then_the_size_is_as_shown() -> None:
    data = encoded(40, 20, "PNG")
    data = data[:-12] + chunk(b"eXIf", tiff()) + data[-12:]
    assert read_header(data, "x") == ImageHeader("PNG", 20, 40, True)
    assert ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size == (20, 40)


SPOILT_EXIF = {
    "nothing": chunk(b"eXIf", b""),
    "of another length than it says": b"\xff\xff\xff\xff" + chunk(b"eXIf", tiff())[4:],
    "no byte order": chunk(b"eXIf", b"XX" + tiff()[2:]),
    "tags beyond its end": chunk(b"eXIf", tiff(at=2**32 - 1)),
    "fewer tags than it says": chunk(b"eXIf", tiff(tag=0x010F, num=2**16 - 1)),
    "an orientation of another type": chunk(b"eXIf", tiff(kind=4)),
    "two orientations": chunk(b"eXIf", tiff(count=2)),
    "an orientation that there is not": chunk(b"eXIf", tiff(orientation=9)),
}


@pytest.mark.parametrize("case", SPOILT_EXIF)
def test_header_when_its_exif_is_spoilt_then_the_size_is_as_stored(case: str) -> None:
    data = encoded(40, 20, "PNG")
    assert read_header(data[:33] + SPOILT_EXIF[case] + data[33:], "x") == ImageHeader("PNG", 40, 20)


SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
REFUSED = {
    "a bomb of 100,000 x 100,000": (source(png_of(100_000, 100_000)), "limit", "at most --max-image-pixels 10000"),
    "too many bytes": (source(png_of(8, 8) + bytes(5_000)), "limit", "--max-image-bytes 5000"),
    "no pixels": (source(png_of(0, 8)), "content", "at least 1 x 1"),
    "a header cut short": (source(png_of(8, 8)[:18]), "content", "cut short"),
    "a JPEG without a frame": (source(b"\xff\xd8\xff\xe0\x00\x04ab"), "content", "cut short"),
    "a JPEG of endless padding": (source(b"\xff\xd8" + b"\xff" * 4_000), "content", "cut short"),
    "an SVG": (source(SVG, "svg+xml"), "format", "must be a PNG, JPEG, GIF or WebP"),
    "a polyglot that begins as HTML": (source(b"<html>" + png_of(8, 8)), "format", "must be a PNG"),
    "a TIFF": (source(b"II*\x00" + bytes(20)), "format", "must be a PNG"),
    "nothing": (source(b""), "format", "0 bytes"),
    "no base64": (ImageSource("x", "data:image/png;base64,@@@@"), "url", "no base64"),
    "text in a data URL": (ImageSource("x", "data:text/html;base64,PGI+"), "url", "must be a data URL"),
    "a data URL without base64": (ImageSource("x", "data:image/png,abc"), "url", "must be a data URL"),
    "a file": (ImageSource("x", "file:///etc/passwd"), "url", "must be a data URL"),
    "a path": (ImageSource("x", "/etc/passwd"), "url", "must be a data URL"),
    "another scheme": (ImageSource("x", "gopher://127.0.0.1/"), "url", "must be a data URL"),
    "a URL that nobody fetches": (ImageSource("x", "HTTPS://example.com/a.png"), "url", "--allowed-media-domains"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_image_when_it_is_none_or_too_large_then_refused_by_name_and_reason(case: str) -> None:
    given, reason, words = REFUSED[case]
    with pytest.raises(ImageRefusedError, match=words) as caught:
        given.read(LIMITS)
    assert (caught.value.reason, caught.value.param, caught.value.status) == (reason, given.name, 400)


def test_image_when_it_is_within_the_bounds_then_taken_whatever_its_url_calls_it() -> None:
    data = encoded(20, 10, "JPEG")
    image = source(data, "png").read(LIMITS)
    assert (image.data, image.header) == (data, ImageHeader("JPEG", 20, 10))
    assert source(b"x").with_data(data).read(LIMITS) == image


RULES = ImageRules(514, 513, 8, 2, 1024, 65536, "00")


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (64, 48, (3, 4)),
        (80, 32, (2, 5)),
        (33, 70, (4, 2)),
        (1, 1, (2, 2)),
        (10_000, 60, (1, 206)),
        (3000, 2000, (13, 19)),
    ],
)
def test_grid_when_an_image_is_small_or_large_then_as_the_processor_resizes_it(
    width: int, height: int, grid: tuple[int, int]
) -> None:
    assert RULES.grid(ImageHeader("PNG", width, height), "x") == grid
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    high, wide = smart_resize(height, width, 16, 1024, 65536)
    assert grid == (high // 16, wide // 16)


def test_grid_when_the_operator_bounds_tokens_then_larger_images_are_made_smaller_and_others_stay() -> None:
    bounded = RULES.with_at_most(20)
    for width, height in ((3000, 2000), (64, 48), (20, 900)):
        rows, columns = bounded.grid(ImageHeader("PNG", width, height), "x")
        assert rows * columns <= 20 or min(rows, columns) == 1
    assert bounded.grid(ImageHeader("PNG", 64, 48), "x") == RULES.grid(ImageHeader("PNG", 64, 48), "x")
    assert RULES.with_at_most(10**6) == RULES


def test_grid_when_an_image_is_a_thread_then_refused() -> None:
    with pytest.raises(ImageRefusedError, match="200 times"):
        RULES.grid(ImageHeader("PNG", 2010, 10), "x")


def test_digest_when_bytes_shape_or_processor_differ_then_differs() -> None:
    other = ImageRules(514, 513, 8, 2, 1024, 65536, "01")
    whole, high = Grid(2, 3), Grid(3, 2)
    digests = {
        RULES.digest(b"a", whole),
        RULES.digest(b"b", whole),
        RULES.digest(b"a", high),
        other.digest(b"a", whole),
        RULES.digest(b"a", whole, 1),  # another piece of the same image
        RULES.digest(b"a", Grid(2, 3, (3, 3)), 1),
        RULES.digest(b"a", Grid(2, 3, (2, 1)), 1),  # the same piece of another grid of tiles
    }
    assert len(digests) == 7
    assert RULES.digest(bytes(100_000), whole) != RULES.digest(bytes(99_999) + b"a", whole)  # however late


def test_rules_when_they_travel_as_json_then_equal() -> None:
    assert ImageRules.from_json(json.loads(json.dumps(RULES.to_json()))) == RULES


def no_token(text: str) -> None:
    return None


CONFIG = {"image_token_id": 9, "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "its image processor is 'SiglipImageProcessor'"),
        ({"do_resize": False}, "do_resize False"),
        ({"patch_size": 14}, "are not its vision tower's"),
        (
            {"image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 16},
            "has no token <|image_start|>",
        ),
        ({"image_processor_type": "Lfm2VlImageProcessor", "encoder_patch_size": 14}, "are not its vision tower's"),
        ({"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": True}, "do_pan_and_scan True"),
        ({"image_processor_type": "Gemma3ImageProcessorPil", "size": {"height": 512}}, "its vision tower takes"),
    ],
)
def test_rules_when_a_checkpoint_is_processed_otherwise_then_refused(change: dict[str, Any], words: str) -> None:
    assert read_image_rules(CONFIG, PROCESSOR, no_token, has_axes=True).placeholder_id == 9
    with pytest.raises(ValueError, match=words):
        read_image_rules(CONFIG, {**PROCESSOR, **change}, no_token, has_axes=True)


@pytest.mark.parametrize("text", ["16", "{", '{"image": -1}', '{"image": "2"}', '{"video": 1}', "{}"])
def test_limit_when_it_is_no_number_of_images_then_the_flag_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--limit-mm-per-prompt"):
        ImageLimits.of(text, max_pixels=1, max_bytes=1)
    assert ImageLimits.of('{"image": 0}', max_pixels=1, max_bytes=1).max_images == 0
