"""Tiny vision-language checkpoints whose answers depend on their images, images for them, and what transformers itself
answers. ``python -m tests.support.images [FAMILY]`` makes one and prints its folder, for ``tandem up --model``.
"""

from __future__ import annotations

import argparse
import base64
import functools
import getpass
import hashlib
import io
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from common.geometry.families import FAMILIES as MODEL_FAMILIES
from common.images.layout import Grid
from common.images.read_rules import read_image_rules
from common.images.rules import ImageLimits, ImageRules
from common.images.source import EncodedImage, ImageSource
from common.images.span import ImageSpan
from common.models.synthetic import build_tokenizer, give_long_memory, missing, save_checkpoint, special_ids
from tests.support.lfm2_vl_processor import lfm2_vl_processor
from tests.support.models import CONFIGS, MAX_POSITION, VOCAB_SIZE
from tests.support.reference import Greedy

_VERSION = 2
LIMITS = ImageLimits()

_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ 'IMAGE' }}"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 8,
    "num_position_embeddings": 64,
}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
}
# Every axis of an image has frequencies of its own in the text model's rotary embedding.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [3, 3, 2]}
_NORMAL = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_QWEN2_VL = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512},
    **_NORMAL,
}
_MOST_TILES = 4


@dataclass(frozen=True)
class Wrapper:
    """What sets one family's tiny checkpoint apart.

    Attributes:
        text: its text model, as in ``CONFIGS``; the text's own ``model_type``.
        written: what its template writes for an image, of ``tokens``, the ids from ``VOCAB_SIZE`` on.
        names: fields of its config with token ids, by the tokens' own names.
    """

    text: str
    text_type: str
    vision: Mapping[str, Any]
    processor: Mapping[str, Any]
    written: tuple[str, ...]
    tokens: tuple[str, ...]
    names: Mapping[str, str]
    fields: Mapping[str, Any] = field(default_factory=dict)
    text_fields: Mapping[str, Any] = field(default_factory=dict)

    def token_id(self, text: str) -> int | None:
        return VOCAB_SIZE + self.tokens.index(text) if text in self.tokens else None


_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_VISION_NAMES = {
    "vision_start_token_id": _VISION_TOKENS[0],
    "vision_end_token_id": _VISION_TOKENS[1],
    "image_token_id": _VISION_TOKENS[2],
    "video_token_id": _VISION_TOKENS[3],
}
_WRITTEN = (_VISION_TOKENS[0], _VISION_TOKENS[2], _VISION_TOKENS[1])


def _qwen(family: str) -> Wrapper:
    vision = {**_VISION, "model_type": f"{family}_vision"}
    text_fields = {"rope_parameters": _ROPE}
    return Wrapper(
        family, f"{family}_text", vision, _QWEN2_VL, _WRITTEN, _VISION_TOKENS, _VISION_NAMES, text_fields=text_fields
    )


WRAPPERS: Mapping[str, Wrapper] = MappingProxyType(
    {
        "qwen3_5": _qwen("qwen3_5"),
        "qwen3_5_moe": _qwen("qwen3_5_moe"),
        "lfm3_vl": Wrapper(
            "lfm3",
            "lfm3",
            {
                "model_type": "lfm3_vl_vision",
                "hidden_size": 32,
                "intermediate_size": 64,
                "patch_size": 8,
                "num_hidden_layers": 2,
                "layer_types": ["conv", "full_attention"],
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
            },
            _QWEN2_VL,
            _WRITTEN,
            _VISION_TOKENS,
            _VISION_NAMES,
            {"projector_hidden_size": 64},
        ),
        "lfm2_vl": Wrapper(
            "lfm2",
            "lfm2",
            {**_SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
            {
                "image_processor_type": "Lfm2VlImageProcessorFast",
                "encoder_patch_size": 8,
                "downsample_factor": 2,
                "min_image_tokens": 4,
                "max_image_tokens": 16,
                "tile_size": 32,
                "min_tiles": 2,
                "max_tiles": _MOST_TILES,
                "max_pixels_tolerance": 1.5,
                **_NORMAL,
            },
            ("<image>",),
            (
                "<image>",
                "<|image_start|>",
                "<|image_end|>",
                "<|img_thumbnail|>",
                *(
                    f"<|img_row_{row}_col_{column}|>"
                    for row in range(1, _MOST_TILES + 1)
                    for column in range(1, _MOST_TILES + 1)
                ),
            ),
            {"image_token_id": "<image>"},
            {"projector_hidden_size": 64, "downsample_factor": 2},
        ),
        "gemma3": Wrapper(
            "gemma3",
            "gemma3_text",
            {**_SIGLIP, "model_type": "siglip_vision_model", "image_size": 64, "vision_use_head": False},
            {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 64, "width": 64}, **_NORMAL},
            ("<start_of_image>",),
            ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
            {
                "boi_token_index": "<start_of_image>",
                "eoi_token_index": "<end_of_image>",
                "image_token_index": "<image_soft_token>",
            },
            {"mm_tokens_per_image": 16},
        ),
    }
)
FAMILIES = tuple(WRAPPERS)
PAD = _VISION_TOKENS[2]
PAD_ID = VOCAB_SIZE + 2


def make_checkpoint(
    family: str,
    folder: Path,
    text_fields: Mapping[str, Any] = MappingProxyType({}),
    vision_fields: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a checkpoint to ``folder`` (not there yet) and return it; with the fields, of another size."""
    wrapper = WRAPPERS[family]
    text = {
        "vocab_size": VOCAB_SIZE + 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "max_position_embeddings": MAX_POSITION,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **wrapper.text_fields,
        **special_ids(),
        **CONFIGS[wrapper.text],
        **text_fields,
    }
    config = AutoConfig.for_model(
        family,
        text_config=AutoConfig.for_model(wrapper.text_type, **text).to_dict(),
        vision_config={**wrapper.vision, **vision_fields},
        tie_word_embeddings=False,
        **{name: wrapper.token_id(token) for name, token in wrapper.names.items()},
        **wrapper.fields,
        **special_ids(),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    give_long_memory(model, seed=5)
    tokenizer = build_tokenizer(VOCAB_SIZE, MAX_POSITION)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(wrapper.tokens)}, replace_extra_special_tokens=False
    )
    assert tokenizer.convert_tokens_to_ids(list(wrapper.tokens)) == [wrapper.token_id(each) for each in wrapper.tokens]
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", "".join(wrapper.written))
    scratch = save_checkpoint(model, tokenizer, folder)
    (scratch / "preprocessor_config.json").write_text(json.dumps(wrapper.processor), encoding="utf-8")
    return scratch


@functools.cache
def image_checkpoint(family: str = "qwen3_5") -> Path:
    """The shared checkpoint of ``family``, made on first use."""
    wrapper = WRAPPERS[family]
    content = repr((_VERSION, CONFIGS[wrapper.text], wrapper, _TEMPLATE))
    name = f"{family}-images-{hashlib.blake2b(content.encode(), digest_size=4).hexdigest()}"
    folder = Path(tempfile.gettempdir()) / f"tandem-tests-{getpass.getuser()}" / name
    names = ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json")
    return make_checkpoint(family, folder) if missing(folder, names) else folder


@functools.cache
def rules(family: str = "qwen3_5") -> ImageRules:
    config = json.loads((image_checkpoint(family) / "config.json").read_text(encoding="utf-8"))
    sees_images = MODEL_FAMILIES[family].sees_images
    assert sees_images is not None
    wrapper = WRAPPERS[family]
    return read_image_rules(config, wrapper.processor, wrapper.token_id, has_axes=sees_images.has_axes)


@functools.cache
def picture(seed: int, width: int = 64, height: int = 48, format: str = "PNG") -> bytes:
    """An encoded image: coloured boxes, others for each seed."""
    draw = random.Random(seed)
    image = Image.new("RGB", (width, height), tuple(draw.randrange(256) for _ in range(3)))
    for _ in range(6):
        left, top = draw.randrange(width), draw.randrange(height)
        colour = tuple(draw.randrange(256) for _ in range(3))
        image.paste(colour, (left, top, min(width, left + width // 3), min(height, top + height // 3)))
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    """Of a chat message."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def encoded(data: bytes) -> EncodedImage:
    return ImageSource("image", data_url(data)).read(LIMITS)


def prompt_with(*parts: Sequence[int] | bytes, family: str = "qwen3_5") -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Token ids of texts and images, each image between its marks, and where the images' pieces are."""
    token_ids: list[int] = []
    images: list[ImageSpan] = []
    own, found = rules(family), WRAPPERS[family].token_id
    start, end = (own.start_ids, own.end_ids) if own.start_ids else ((found(_WRITTEN[0]),), (found(_WRITTEN[2]),))
    if family == "gemma3":
        start, end = (found("<start_of_image>"),), (found("<end_of_image>"),)
    for part in parts:
        if not isinstance(part, bytes):
            token_ids += part
            continue
        image = encoded(part)
        token_ids += [] if own.start_ids else [each for each in start if each is not None]
        num_pieces = 0
        for each in own.layout(image.header, "image"):
            if not isinstance(each, Grid):
                token_ids.append(each)
                continue
            rows, columns = own.span_shape(each)
            digest = own.digest(image.data, each, num_pieces)
            images.append(ImageSpan(len(token_ids), rows, columns, digest))
            token_ids += [own.placeholder_id] * (rows * columns)
            num_pieces += 1
        token_ids += [] if own.end_ids else [each for each in end if each is not None]
    return token_ids, tuple(images)


@functools.cache
def stock_model(family: str = "qwen3_5") -> Any:
    return AutoModelForImageTextToText.from_pretrained(image_checkpoint(family), dtype=torch.float32).eval()


def stock_inputs(
    path: Path, token_ids: Sequence[int], pictures: Sequence[bytes], family: str = "qwen3_5"
) -> dict[str, Any]:
    """What ``generate`` of the checkpoint at ``path`` takes."""
    ids = torch.tensor([list(token_ids)])
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not pictures:
        return given
    opened = [Image.open(io.BytesIO(each)) for each in pictures]
    kinds = (ids == rules(family).placeholder_id).int()
    if family == "gemma3":
        processor: Any = Gemma3ImageProcessorPil.from_pretrained(path)
        return given | {
            "pixel_values": processor(images=opened, return_tensors="pt")["pixel_values"],
            "token_type_ids": kinds,
        }
    if family == "lfm2_vl":
        return given | {**lfm2_vl_processor(path)(images=opened, return_tensors="pt")}
    processor = Qwen2VLImageProcessorPil.from_pretrained(path)
    given |= {**processor(images=opened, return_tensors="pt")}
    return given | ({"mm_token_type_ids": kinds} if rules(family).has_axes else {})


@torch.inference_mode()
def stock_generate(
    token_ids: Sequence[int], pictures: Sequence[bytes], num_tokens: int, *, family: str = "qwen3_5"
) -> Greedy:
    """transformers' own greedy answer to a prompt whose placeholders stand for ``pictures``."""
    given = stock_inputs(image_checkpoint(family), token_ids, pictures, family)
    config = GenerationConfig(
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        eos_token_id=[],
    )
    output = stock_model(family).generate(**given, generation_config=config)
    logprobs = torch.log_softmax(torch.cat(output.logits).float(), dim=-1)
    return Greedy(output.sequences[0, len(token_ids) :].tolist(), logprobs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a tiny vision model of random weights and print its folder.")
    parser.add_argument("family", nargs="?", default="qwen3_5", choices=FAMILIES)
    print(image_checkpoint(parser.parse_args().family))
