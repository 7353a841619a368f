"""Models of published sizes with random weights, made on the device: no weight is ever on a disk.

The checkpoint folder holds a ``config.json`` alone. Loading goes the node's own way but for two steps: weights are made
where they would be read, and a numeric probe that fails is noted in the results instead of refusing the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.models.sizes import MAX_TOKENS, MODELS
from common.errors import ConfigError
from common.models.loading import loader


def make_config(name: str) -> Any:
    fields = dict(MODELS[name])
    common = {"max_position_embeddings": MAX_TOKENS, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return AutoConfig.for_model(fields.pop("model_type"), **common, **fields)


def write_config(name: str, dtype: str, folder: Path) -> Path:
    config = make_config(name)
    config.dtype = dtype
    config.save_pretrained(folder)
    return folder


def make_weights(folder: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False) -> Any:
    """As :func:`common.models.loading.checkpoint.load_weights`, of the config alone."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


@contextmanager
def random_weights(notes: dict[str, str]) -> Iterator[None]:
    """Models that are loaded in here have random weights. ``notes`` gets what the numeric probe said."""
    check = loader.check_numbers

    def noted(*args: Any, **kwargs: Any) -> None:
        try:
            check(*args, **kwargs)
            notes["probe"] = "passed"
        except ConfigError as exc:
            notes["probe"] = str(exc)

    with mock.patch.object(loader, "load_weights", make_weights), mock.patch.object(loader, "check_numbers", noted):
        yield
