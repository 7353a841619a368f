"""A checkpoint's vision tower, loaded beside the text model: transformers' own module, with its own weights alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModel

from common.errors import ConfigError

_PREFIXES = ("model.visual.", "visual.")
"""Of its weights' names, in checkpoints of this transformers and of earlier ones."""


class VisionTower:
    """Runs on the engine's thread. One image a call: what an image becomes does not depend on others beside it."""

    def __init__(self, module: Any, merge_size: int, device: torch.device) -> None:
        self._module = module
        self._merge_size = merge_size
        self._device = device

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return sum(each.numel() * each.element_size() for each in self._module.parameters())

    @torch.inference_mode()
    def encode(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """[num_patches, patch_values] of an image -> [rows * columns, hidden], row by row."""
        merge = self._merge_size
        grid = torch.tensor([[1, rows * merge, columns * merge]], device=self._device)
        output = self._module(pixels.to(self._device, self._module.dtype), grid_thw=grid)
        embeddings: Tensor = output.pooler_output
        assert embeddings.shape[0] == rows * columns, f"{embeddings.shape[0]} vectors for {rows} x {columns} tokens"
        return embeddings


def load_tower(folder: Path, *, merge_size: int, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """Raises ConfigError when its weights are missing or do not fit the config."""
    try:
        module: Any = AutoModel.from_config(AutoConfig.from_pretrained(folder).vision_config)
        wanted = module.state_dict().keys()
        missing, unexpected = module.load_state_dict(dict(_weights(folder)), strict=False)
    except (OSError, ValueError, RuntimeError, SafetensorError) as exc:
        raise ConfigError(
            f"--model {str(folder)!r}: its vision tower cannot be loaded: {exc}", param="--model"
        ) from exc
    if missing or unexpected:
        examples = ", ".join([*missing, *unexpected][:3])
        raise ConfigError(
            f"--model {str(folder)!r}: of the vision tower's {len(wanted)} weights {len(missing)} are missing and "
            f"{len(unexpected)} are unknown, e.g. {examples}",
            param="--model",
        )
    module = module.to(dtype=dtype, device=device).eval().requires_grad_(False)
    return VisionTower(module, merge_size, device)


def _weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names within the tower, and weights; those of the text model are not read."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                prefix = next((each for each in _PREFIXES if name.startswith(each)), None)
                if prefix is not None:
                    yield name.removeprefix(prefix), file.get_tensor(name)
