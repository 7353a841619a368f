"""Which backend runs the ops: the one that the flag names, or the fastest that works here."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
from pathlib import Path

import torch

from common.errors import ConfigError
from common.ops.cpu.backend import CppOps
from common.ops.cpu.build import BuildError, load_library
from common.ops.cpu.launch import DTYPES
from common.ops.interface import Ops
from common.ops.torch.backend import TorchOps

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "cpp", "triton")
"""Values of ``--ops-backend``; "cpp" is :mod:`common.ops.cpu`, "triton" :mod:`common.ops.triton`."""

_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPU whose matrix units take bfloat16."""


def create_ops(
    backend: str, *, dtype: torch.dtype, device: torch.device, cache_dir: Path, prebuilt_dir: Path | None = None
) -> Ops:
    """The ops for a model of ``dtype`` on ``device``.

    ``auto`` is triton on a GPU and cpp on a CPU, or torch where these cannot run: silently in float16 on a CPU, else
    with one warning. ``cache_dir`` is where compiled libraries are kept, ``prebuilt_dir`` where they are looked for
    first.

    Raises:
        ConfigError: cpp or triton was asked for and cannot run, with the reason.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"--ops-backend {backend} is not one of {', '.join(BACKENDS)}", param="--ops-backend")
    if backend == "torch":
        return TorchOps()
    if backend == "triton" or (backend == "auto" and device.type == "cuda"):
        return _create_triton(backend, dtype, device)
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


def _create_triton(backend: str, dtype: torch.dtype, device: torch.device) -> Ops:
    reason = _why_no_triton(dtype, device)
    if not reason:
        from common.ops.triton.backend import TritonOps  # a CPU needs no Triton

        return TritonOps()
    if backend == "triton":
        raise ConfigError(f"--ops-backend triton cannot run here: {reason}", param="--ops-backend")
    logger.warning("the Triton ops are not available, torch runs instead (slower): %s", reason)
    return TorchOps()


def _why_no_triton(dtype: torch.dtype, device: torch.device) -> str:
    """Empty: it can run."""
    if dtype not in _TRITON_DTYPES:
        return f"it computes float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    try:
        importlib.import_module("triton")
    except ImportError as exc:
        return f"Triton cannot be imported ({exc})"
    if device.type != "cuda":
        # Triton's own switch for computing kernels with numpy: slow, for tests.
        return "" if os.environ.get("TRITON_INTERPRET") == "1" else f"it runs on cuda, not on {device.type}"
    # Where it first runs it compiles what calls the driver, with $CC, else with the first of these.
    compilers = (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")
    if not any(shutil.which(each) for each in compilers):
        return f"it needs a C compiler: no {' or '.join(compilers)} in PATH (set CC)"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, must be 8.0 or more"
    return ""
