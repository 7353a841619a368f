"""Where images lie in prompts, and what their pieces are, against transformers' own processors."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from transformers import AutoTokenizer
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from common.errors import ImageRefusedError
from common.images.header import ImageHeader
from common.images.rules import ImageLimits, ImageRules
from common.images.source import ImageSource
from common.models.vision.processor import ImageProcessor
from common.openai.protocol import parse_chat
from common.text.chat_prompt import make_chat_prompt
from common.text.tokenizer import TextCodec
from tests.support import images
from tests.support.images import data_url, encoded, image_part, picture
from tests.support.lfm2_vl_processor import lfm2_vl_processor

SIZES = [
    (64, 48),
    (160, 100),
    (100, 160),
    (33, 70),
    (300, 40),
    (40, 300),
    (1, 1),
    (90, 90),
    (128, 128),
    (97, 161),
]


@functools.cache
def tokenizer(family: str) -> Any:
    return AutoTokenizer.from_pretrained(images.image_checkpoint(family))


@functools.cache
def stock_processor(family: str) -> Any:
    folder = images.image_checkpoint(family)
    if family == "lfm2_vl":
        return Lfm2VlProcessor(lfm2_vl_processor(folder), tokenizer(family))
    own = tokenizer(family)
    own.boi_token, own.eoi_token, own.image_token = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
    own.boi_token_id, own.image_token_id = own.convert_tokens_to_ids([own.boi_token, own.image_token])
    return Gemma3Processor(Gemma3ImageProcessorPil.from_pretrained(folder), own, image_seq_length=16)


@pytest.mark.parametrize("family", ["lfm2_vl", "gemma3"])
def test_prompt_when_a_chat_has_images_then_its_tokens_are_those_of_transformers_processor(family: str) -> None:
    rules = images.rules(family)
    codec = TextCodec(tokenizer(family), vocab_size=1024, image_rules=rules)
    parts: list[Any] = [{"type": "text", "text": "What is\n"}]
    pictures = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    for each in pictures:
        parts += [image_part(each), {"type": "text", "text": "\n and this?"}]
    request = parse_chat({"messages": [{"role": "user", "content": parts}]})
    made = make_chat_prompt(codec, request, images.LIMITS, keeps_boundaries=True, max_model_len=10_000)
    text = tokenizer(family).apply_chat_template(
        [{"role": "user", "content": [{"type": "image"} if "image_url" in each else each for each in parts]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    opened = [Image.open(io.BytesIO(each)) for each in pictures]
    expected = stock_processor(family)(text=[text], images=[opened], add_special_tokens=False)
    assert list(made.ids.token_ids) == list(expected["input_ids"][0])
    ends = [position for position in made.ids.boundaries if made.ids.token_ids[position - 1] == rules.end_id]
    assert len(ends) == 3  # the last ones, behind their closing tokens and inside none
    assert not any(each.start < position < each.end for each in made.ids.images for position in made.ids.boundaries)
    assert ImageRules.from_json(rules.to_json()) == rules


@pytest.mark.parametrize("size", SIZES)
def test_pieces_when_lfm2_vl_processes_an_image_then_they_are_transformers_own_to_the_bit(
    size: tuple[int, int],
) -> None:
    folder, data = images.image_checkpoint("lfm2_vl"), picture(9, *size)
    found = ImageProcessor(folder, images.rules("lfm2_vl")).pieces(encoded(data))
    theirs = lfm2_vl_processor(folder)(images=[Image.open(io.BytesIO(data))], return_tensors="pt")
    assert torch.cat([each["spatial_shapes"] for each in found]).equal(theirs["spatial_shapes"])
    for index, each in enumerate(found):
        num_patches = int(theirs["pixel_attention_mask"][index].sum())
        assert each["pixel_values"][0].equal(theirs["pixel_values"][index, :num_patches])


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", [2, 3, 6, 7])
def test_pieces_when_a_camera_lay_on_its_side_then_they_are_those_of_the_image_as_shown(
    orientation: int, format: str
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored, shown = io.BytesIO(), io.BytesIO()
    Image.open(io.BytesIO(picture(3, 90, 40))).save(stored, format, exif=exif)
    ImageOps.exif_transpose(Image.open(stored)).convert("RGB").save(shown, "PNG")
    processor = ImageProcessor(images.image_checkpoint("lfm2_vl"), images.rules("lfm2_vl"))
    found, expected = (processor.pieces(encoded(each.getvalue())) for each in (stored, shown))
    assert len(found) == len(expected)
    for piece, other in zip(found, expected, strict=True):
        assert all(piece[name].equal(other[name]) for name in other)


def test_image_when_pillow_takes_it_for_a_bomb_then_refused_by_name() -> None:
    data = bytearray(picture(1))
    data[16:24] = struct.pack(">II", 20_000, 20_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    image = ImageSource("image", data_url(bytes(data))).read(ImageLimits(max_pixels=10**9))
    with pytest.raises(ImageRefusedError, match=r"image: the image cannot be decoded: .* bomb") as caught:
        ImageProcessor(images.image_checkpoint("lfm2_vl"), images.rules("lfm2_vl")).pieces(image)
    assert caught.value.reason == "content"


@pytest.mark.parametrize("size", [(500, 20), (20, 500), (300, 8), (10_000, 1)])
def test_image_when_it_is_longer_than_transformers_processor_can_pad_then_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageRefusedError, match="too long and narrow") as caught:
        images.rules("lfm2_vl").pieces(ImageHeader("PNG", *size), "x")
    assert caught.value.reason == "limit"


def test_tiles_when_the_operator_bounds_tokens_then_fewer_or_none_and_never_more() -> None:
    rules = images.rules("lfm2_vl")
    header = encoded(picture(1, 100, 160)).header
    assert len(rules.pieces(header, "x")) == 3
    for bound in (100, 24, 23, 16, 7):
        bounded = rules.with_at_most(bound)
        assert sum(grid.rows * grid.columns for grid in bounded.pieces(header, "x")) <= bound
    with pytest.raises(ValueError, match="take 16 tokens each, --max-image-tokens is 15"):
        images.rules("gemma3").with_at_most(15)
    assert images.rules("gemma3").with_at_most(16) == images.rules("gemma3")


def test_digest_when_the_operator_bounds_tokens_then_a_tile_of_another_grid_has_another_name() -> None:
    """Both grids begin with a tile of the same size, which shows another part of the image."""
    rules = images.rules("lfm2_vl")
    image = encoded(picture(1, 300, 300))
    pieces = rules.pieces(image.header, image.name)
    most = sum(piece.rows * piece.columns for piece in pieces)
    digests = {}
    for bound in range(pieces[0].rows * pieces[0].columns, most + 1):
        first = rules.with_at_most(bound).pieces(image.header, image.name)[0]
        if first.tiles is not None:
            assert (first.rows, first.columns) == (pieces[0].rows, pieces[0].columns)
            digests[first.tiles] = rules.digest(image.data, first)
    assert len(digests) > 1
    assert len(set(digests.values())) == len(digests)
