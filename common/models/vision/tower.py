"""A checkpoint's vision tower and what leads from it to the text model: transformers' own modules, and their wrapper's
own ``get_image_features`` to run them.

transformers loads some wrappers whole, since it has no class of their text alone; of those the modules are taken out,
so that a node which computes no images keeps none. For the others they are loaded here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from common.errors import ConfigError
from common.models.vision.processor import Inputs

MODULES = ("visual", "vision_tower", "multi_modal_projector")
"""Of a wrapper, beside its text model."""
_PREFIXES = ("model.visual.", "visual.")
"""Of its weights' names, in checkpoints of this transformers and of earlier ones."""


class VisionTower:
    """Runs on the engine's thread. One piece of an image a call: what it becomes does not depend on others."""

    def __init__(self, wrapper: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._wrapper = wrapper
        self._device, self._dtype = device, dtype

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return sum(each.numel() * each.element_size() for each in self._wrapper.parameters())

    @torch.inference_mode()
    def encode(self, inputs: Inputs, num_tokens: int) -> Tensor:
        """A piece of an image -> [num_tokens, hidden], row by row."""
        given = {
            name: each.to(self._device, self._dtype if each.is_floating_point() else None)
            for name, each in inputs.items()
        }
        embeddings: Tensor = self._wrapper.get_image_features(**given, return_dict=True).pooler_output[0]
        assert embeddings.shape[0] == num_tokens, f"{embeddings.shape[0]} vectors for {num_tokens} tokens"
        return embeddings


def take_vision(model: Any) -> Mapping[str, nn.Module]:
    """The vision modules of a model that was loaded, which has them no longer; none: it is a model of text."""
    base = model.base_model
    found = {name: getattr(base, name) for name in MODULES if isinstance(getattr(base, name, None), nn.Module)}
    for name in found:
        delattr(base, name)
    return found


def create_tower(
    folder: Path, modules: Mapping[str, nn.Module], *, dtype: torch.dtype, device: torch.device
) -> VisionTower:
    """``modules``: as ``take_vision`` gives them; without any they are loaded. Raises ConfigError when weights are
    missing or do not fit the config."""
    try:
        config = AutoConfig.from_pretrained(folder)
        wrapper_class: Any = AutoModel._model_mapping[type(config)]
        modules = modules or {"visual": _load(folder, config)}
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as exc:
        raise ConfigError(
            f"--model {str(folder)!r}: its vision tower cannot be loaded: {exc}", param="--model"
        ) from exc
    wrapper = wrapper_class.__new__(wrapper_class)  # without its text model, which it does not need for this
    nn.Module.__init__(wrapper)
    wrapper.config = config
    for name, module in modules.items():
        setattr(wrapper, name, module.to(dtype=dtype, device=device).eval().requires_grad_(False))
    return VisionTower(wrapper, device, dtype)


def _load(folder: Path, config: Any) -> nn.Module:
    module: Any = AutoModel.from_config(config.vision_config)
    wanted = module.state_dict().keys()
    missing, unexpected = module.load_state_dict(dict(_weights(folder)), strict=False)
    if missing or unexpected:
        examples = ", ".join([*missing, *unexpected][:3])
        raise ValueError(
            f"of its {len(wanted)} weights {len(missing)} are missing and {len(unexpected)} unknown, e.g. {examples}"
        )
    return module


def _weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names within the tower, and weights; those of the text model are not read."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                prefix = next((each for each in _PREFIXES if name.startswith(each)), None)
                if prefix is not None:
                    yield name.removeprefix(prefix), file.get_tensor(name)
