"""How many GPUs the nodes of this environment will find, without importing torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Callable
from typing import Any

DRIVER = "libcuda.so.1"


def count_gpus(load: Callable[[str], Any] = ctypes.CDLL) -> int:
    """As the driver counts, which reads CUDA_VISIBLE_DEVICES; 0 without a driver, or beside torch's CPU build. Makes no
    context."""
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return 0
        driver = load(DRIVER)
    except (importlib.metadata.PackageNotFoundError, OSError):
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
