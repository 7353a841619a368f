"""``--generation-config``: where sampling's defaults come from, and that requests go before them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.node.generation_config import FILE, read_sampling_defaults
from common.openai.protocol import common_sampling_params, parse_chat, to_sampling_params
from common.openai.sampling import SamplingDefaults

CONFIG = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 30, "do_sample": True, "eos_token_id": 2}


def write(folder: Path, value: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps(value), encoding="utf-8")
    return folder


def test_defaults_when_read_then_are_the_files_of_the_model_or_of_the_folder_or_none(tmp_path: Path) -> None:
    model, other = write(tmp_path / "model", CONFIG), write(tmp_path / "other", {"repetition_penalty": 1.2})
    expected = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, max_tokens=30)
    assert read_sampling_defaults("auto", model) == expected
    assert read_sampling_defaults("vllm", model) == SamplingDefaults()
    assert read_sampling_defaults(str(other), model) == SamplingDefaults(repetition_penalty=1.2)
    assert read_sampling_defaults("auto", tmp_path / "none") == SamplingDefaults()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"temperature": 5}, "temperature must be a number between 0 and 2, got 5"),
        ({"max_new_tokens": "many"}, "max_new_tokens must be an integer"),
        ([1], "must hold an object"),
    ],
)
def test_file_when_no_request_could_say_it_then_the_flag_the_file_and_the_value_are_named(
    tmp_path: Path, value: Any, words: str
) -> None:
    folder = write(tmp_path, value)
    with pytest.raises(ConfigError, match=words) as refused:
        read_sampling_defaults(str(folder), tmp_path)
    assert "--generation-config" in refused.value.message
    assert FILE in refused.value.message


def test_folder_when_it_has_no_such_file_then_the_start_fails(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sampling_defaults(str(tmp_path / "none"), tmp_path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0.6, 20, 0.95, 1.0, 30)),
        ({"temperature": 0, "max_tokens": 50}, (0.0, 20, 0.95, 1.0, 30)),
        ({"temperature": None, "top_k": -1, "top_p": 1, "max_tokens": 7}, (0.6, 0, 1.0, 1.0, 7)),
        ({"repetition_penalty": 1.5}, (0.6, 20, 0.95, 1.5, 30)),
    ],
)
def test_request_when_it_says_it_itself_then_goes_before_the_defaults_but_for_the_bound(
    fields: dict[str, Any], expected: tuple[float, ...]
) -> None:
    request = parse_chat({"messages": [{"role": "user", "content": "hi"}], **fields})
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, max_tokens=30)
    common = common_sampling_params(request, vocab_size=50, defaults=defaults)
    made = to_sampling_params(request, common, num_prompt_tokens=5, max_model_len=100, defaults=defaults)
    assert (made.temperature, made.top_k, made.top_p, made.repetition_penalty, made.max_tokens) == expected
