"""Part ``machine``: what this is, and its two ceilings: bytes a second of a copy, operations a second of a product."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator

import torch

from benchmarks.gpu.measure.timing import find_device, measure_ceilings
from benchmarks.gpu.settings import Row, Settings

PACKAGES = ("torch", "triton", "transformers", "nixl", "nixl-cu13", "nixl-cu12")
TOOLS = ("nvcc", "ncu", "compute-sanitizer")


def run(settings: Settings) -> Iterator[Row]:
    device = find_device()
    facts = {"gpu": "none", "driver": "", "memory_gib": 0.0}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        major, minor = torch.cuda.get_device_capability(device)
        facts = {
            "gpu": f"{properties.name}, {properties.multi_processor_count} SMs, sm_{major}{minor}",
            "driver": _driver(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
    facts |= {"cuda": torch.version.cuda or "", "python": platform.python_version(), "cpus": os.cpu_count() or 0}
    facts |= {name: _version(name) for name in PACKAGES}
    facts |= {name: shutil.which(name) is not None for name in TOOLS}
    yield {"kind": "facts", **facts}
    ceilings = measure_ceilings(device)
    yield {
        "kind": "ceilings",
        "copy_gb_per_s": round(ceilings.bytes_per_s / 1e9, 1),
        "bf16_tflops": round(ceilings.flops / 1e12, 1),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError) as exc:
        return f"unknown: {exc}"
