"""Tiny vision-language checkpoints whose answers depend on their images, images for them, and what transformers itself
answers.
"""

from __future__ import annotations

import base64
import functools
import getpass
import hashlib
import io
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from common.images.rules import ImageLimits, ImageRules, read_image_rules
from common.images.source import EncodedImage, ImageSource
from common.images.span import ImageSpan
from common.models.synthetic import build_tokenizer, give_long_memory, missing, save_checkpoint, special_ids
from tests.support.models import CONFIGS, MAX_POSITION, VOCAB_SIZE
from tests.support.reference import Greedy

_VERSION = 1
START, END, PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
START_ID, END_ID, PAD_ID = VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 2
FAMILIES = ("qwen3_5", "qwen3_5_moe")
LIMITS = ImageLimits()

_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ '" + START + PAD + END + "' }}"
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
# Every axis of an image has frequencies of its own in the text model's rotary embedding.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [3, 3, 2]}
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def make_checkpoint(
    family: str,
    folder: Path,
    text_fields: Mapping[str, Any] = MappingProxyType({}),
    vision_fields: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a checkpoint to ``folder`` (not there yet) and return it; with the fields, of another size."""
    text = {
        "vocab_size": VOCAB_SIZE + 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "max_position_embeddings": MAX_POSITION,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": _ROPE,
        **special_ids(),
        **CONFIGS[family],
        **text_fields,
    }
    config = AutoConfig.for_model(
        family,
        text_config=AutoConfig.for_model(f"{family}_text", **text).to_dict(),
        vision_config={**_VISION, "model_type": f"{family}_vision", **vision_fields},
        tie_word_embeddings=False,
        image_token_id=PAD_ID,
        video_token_id=VOCAB_SIZE + 3,
        vision_start_token_id=START_ID,
        vision_end_token_id=END_ID,
        **special_ids(),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    give_long_memory(model, seed=5)
    tokenizer = build_tokenizer(VOCAB_SIZE, MAX_POSITION)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END, PAD]}, replace_extra_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids([START, END, PAD]) == [START_ID, END_ID, PAD_ID]
    tokenizer.chat_template = _TEMPLATE
    scratch = save_checkpoint(model, tokenizer, folder)
    (scratch / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR), encoding="utf-8")
    return scratch


@functools.cache
def image_checkpoint(family: str = "qwen3_5") -> Path:
    """The shared checkpoint of ``family``, made on first use."""
    content = repr((_VERSION, CONFIGS[family], _VISION, _ROPE, _PROCESSOR, _TEMPLATE))
    name = f"{family}-images-{hashlib.blake2b(content.encode(), digest_size=4).hexdigest()}"
    folder = Path(tempfile.gettempdir()) / f"tandem-tests-{getpass.getuser()}" / name
    names = ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json")
    return make_checkpoint(family, folder) if missing(folder, names) else folder


@functools.cache
def rules(family: str = "qwen3_5") -> ImageRules:
    config = json.loads((image_checkpoint(family) / "config.json").read_text(encoding="utf-8"))
    return read_image_rules(config, _PROCESSOR)


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
    """Token ids of texts and images, each image between its marks, and where the images are."""
    token_ids: list[int] = []
    images: list[ImageSpan] = []
    for part in parts:
        if not isinstance(part, bytes):
            token_ids += part
            continue
        image = encoded(part)
        rows, columns = rules(family).grid(image.header, "image")
        images.append(ImageSpan(len(token_ids) + 1, rows, columns, rules(family).digest(image.data, rows, columns)))
        token_ids += [START_ID, *[PAD_ID] * (rows * columns), END_ID]
    return token_ids, tuple(images)


@functools.cache
def stock_model(family: str = "qwen3_5") -> Any:
    return AutoModelForImageTextToText.from_pretrained(image_checkpoint(family), dtype=torch.float32).eval()


def stock_inputs(path: Path, token_ids: Sequence[int], pictures: Sequence[bytes]) -> dict[str, Any]:
    """What ``generate`` of the checkpoint at ``path`` takes."""
    ids = torch.tensor([list(token_ids)])
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pictures:
        processor = Qwen2VLImageProcessorPil.from_pretrained(path)
        opened = [Image.open(io.BytesIO(each)) for each in pictures]
        given |= {**processor(images=opened, return_tensors="pt"), "mm_token_type_ids": (ids == PAD_ID).int()}
    return given


@torch.inference_mode()
def stock_generate(
    token_ids: Sequence[int], pictures: Sequence[bytes], num_tokens: int, *, family: str = "qwen3_5"
) -> Greedy:
    """transformers' own greedy answer to a prompt whose placeholders stand for ``pictures``."""
    given = stock_inputs(image_checkpoint(family), token_ids, pictures)
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
