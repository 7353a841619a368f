"""Which backend a model runs on: its device's, with the ops that the flag names or the fastest that work there."""

from __future__ import annotations

from pathlib import Path

import torch

from common.models.backends.backend import ModelBackend
from common.models.backends.cpu import CpuBackend
from common.models.backends.cuda import CudaBackend
from common.ops.select import create_ops


def create_backend(
    ops_backend: str, *, dtype: torch.dtype, device: torch.device, cache_dir: Path, prebuilt_dir: Path | None = None
) -> ModelBackend:
    """Arguments and errors are those of :func:`common.ops.select.create_ops`."""
    ops = create_ops(ops_backend, dtype=dtype, device=device, cache_dir=cache_dir, prebuilt_dir=prebuilt_dir)
    return CudaBackend(ops, device) if device.type == "cuda" else CpuBackend(ops, device)
