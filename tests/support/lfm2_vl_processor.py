"""transformers' own image processor of LFM2-VL, which needs torchvision: with what it calls of that written down here,
since torchvision has no build for every build of torch.

``resize`` and ``normalize`` do what torchvision 0.28's do of tensors, to the bit.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def _resize(image: Tensor, size: Sequence[int], interpolation: Any = None, antialias: bool = True) -> Tensor:
    if image.shape[-2:] == tuple(size):
        return image
    has_bytes = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    given = image if has_bytes else image.to(torch.float32)
    found = torch.nn.functional.interpolate(given, size=list(size), mode="bilinear", antialias=antialias)
    return found if has_bytes else found.clamp_(min=0, max=255).round_().to(torch.uint8)


def _normalize(image: Tensor, mean: Tensor, std: Tensor, inplace: bool = False) -> Tensor:
    return image.sub(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))


@functools.cache
def lfm2_vl_processor(folder: Path) -> Any:
    stand_in = SimpleNamespace(
        resize=_resize, normalize=_normalize, InterpolationMode=SimpleNamespace(BILINEAR="bilinear", LANCZOS="lanczos")
    )
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].functional = stand_in  # type: ignore[attr-defined]
    from transformers import image_processing_backends as backends

    with mock.patch.dict(sys.modules, modules):
        theirs = importlib.import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")
    backends.tvF = stand_in  # type: ignore[attr-defined]
    backends.pil_torch_interpolation_mapping = {2: "bilinear"}  # type: ignore[attr-defined]
    return theirs.Lfm2VlImageProcessor.from_pretrained(folder)
