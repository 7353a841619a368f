"""Which backend runs the ops: the one that the flag names, or the fastest that works here."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from common.errors import ConfigError
from common.ops.cpu.backend import CppOps
from common.ops.cpu.build import BuildError, load_library
from common.ops.cpu.launch import DTYPES
from common.ops.interface import Ops
from common.ops.torch.backend import TorchOps

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "cpp")
"""Values of ``--ops-backend``; "cpp" is :mod:`common.ops.cpu`."""


def create_ops(
    backend: str, *, dtype: torch.dtype, device: torch.device, cache_dir: Path, prebuilt_dir: Path | None = None
) -> Ops:
    """The ops for a model of ``dtype`` on ``device``.

    ``auto`` is cpp where it can run and else torch: silently on another device or in float16, with one warning when it
    cannot be compiled. ``cache_dir`` is where compiled libraries are kept, ``prebuilt_dir`` where they are looked for
    first.

    Raises:
        ConfigError: cpp was asked for and cannot run, with the reason.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"--ops-backend {backend} is not one of {', '.join(BACKENDS)}", param="--ops-backend")
    if backend == "torch":
        return TorchOps()
    if device.type != "cpu" or dtype not in DTYPES:
        if backend == "cpp":
            known = " and ".join(str(each).removeprefix("torch.") for each in DTYPES)
            what = f"{str(dtype).removeprefix('torch.')} on {device.type}"
            raise ConfigError(f"--ops-backend cpp runs {known} on cpu, not {what}", param="--ops-backend")
        return TorchOps()
    try:
        return CppOps(load_library(cache_dir, prebuilt_dir=prebuilt_dir))
    except BuildError as exc:
        if backend == "cpp":
            raise ConfigError(f"--ops-backend cpp cannot run here: {exc}", param="--ops-backend") from exc
        logger.warning("the C++ ops are not available, torch runs instead (slower): %s", exc)
        return TorchOps()
