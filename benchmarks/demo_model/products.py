"""In which dtype training multiplies matrices."""

from __future__ import annotations

import torch


def product_dtype() -> torch.dtype:
    """bfloat16, but float32 where the CPU has no vectors of 512 bits: torch's products in bfloat16 take six times as
    long there."""
    capability = torch.backends.cpu.get_cpu_capability()
    return torch.float32 if capability in ("AVX2", "NO AVX") else torch.bfloat16
