"""Values from the host to a device without waiting for what runs there."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A copy of ``values``, from host memory, behind what was launched so far. From pageable memory CUDA would first
    wait for all of that."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
