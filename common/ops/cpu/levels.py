"""Kinds of CPU that a library is compiled for ahead of time, where the machine that will run it is not known.

A level is what the sources tell apart: lanes of 8 or 16 floats, dot products in bfloat16, tiles. A library for the CPU
itself (``-march=native``) is made of the same arithmetic, so that results are the same bits.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Level:
    """``flags``: the compiler's. ``features``: what /proc/cpuinfo must say for the result to run."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


_V3 = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_BF16 = _V4 | {"avx512_bf16"}
_V4_FLAGS = ("-march=x86-64-v4", "-fopenmp", "-mavx512bf16")

LEVELS: Mapping[str, tuple[Level, ...]] = {
    "x86_64": (
        Level("amx", (*_V4_FLAGS, "-mamx-tile", "-mamx-bf16"), _V4_BF16 | {"amx_tile", "amx_bf16"}),
        Level("avx512bf16", _V4_FLAGS, _V4_BF16),
        Level("x86-64-v4", ("-march=x86-64-v4", "-fopenmp"), _V4),
        Level("x86-64-v3", ("-march=x86-64-v3", "-fopenmp"), _V3),
    ),
    "aarch64": (Level("armv8-a", ("-march=armv8-a", "-fopenmp"), frozenset()),),
}
"""By what :func:`platform.machine` says, the best first."""


def levels_of_machine() -> tuple[Level, ...]:
    """All levels of this machine's architecture; none where nobody has thought of it."""
    return LEVELS.get(platform.machine(), ())


def levels_here() -> list[Level]:
    """Those that run on this CPU, the best first."""
    features = _features()
    return [level for level in levels_of_machine() if level.features <= features]


def _features() -> frozenset[str]:
    with contextlib.suppress(OSError):  # not Linux: nothing is known
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, words = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(words.split())
    return frozenset()
