"""The ops' sizes in published models, and what others have measured of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpShape:
    """One op at one layer's size. ``sizes``: as its maker in ``op_calls.py`` takes them."""

    op: str
    model: str
    sizes: tuple[int, ...]


SHAPES = (
    OpShape("mamba2", "nemotron-nano-9b-v2", (128, 80, 128, 8)),
    OpShape("gated_delta", "qwen3.5-4b", (16, 32, 128, 128)),
    OpShape("gated_delta", "qwen3-next tp2", (8, 16, 128, 128)),
    OpShape("attention", "nemotron-nano-9b-v2", (40, 8, 128, 128)),
    OpShape("attention", "qwen3.5-4b", (16, 4, 256, 256)),
    OpShape("conv1d", "nemotron-nano-9b-v2", (12288, 4)),
    OpShape("write_kv", "nemotron-nano-9b-v2", (40, 8, 128, 128)),
    OpShape("rms_norm", "nemotron-nano-9b-v2", (4480, 4480, 0)),
    OpShape("gated_norm", "nemotron-nano-9b-v2", (10240, 1280, 1)),
    OpShape("silu_mul", "qwen3.5-4b", (9216,)),
    OpShape("kimi_delta", "kimi-linear-48b", (32, 32, 128, 128)),
    OpShape("mamba2", "granite-4-h-tiny", (48, 64, 128, 1)),
    OpShape("attention", "granite-4-h-tiny", (12, 4, 128, 128)),
    OpShape("attention", "kimi-linear-48b mla", (32, 1, 576, 512)),
    OpShape("conv1d", "qwen3.5-4b", (8192, 4)),
    OpShape("gated_norm", "qwen3.5-4b", (128, 128, 2)),
    OpShape("mamba1", "falcon-mamba-7b", (8192, 16)),
    OpShape("gated_delta", "8 heads", (8, 8, 128, 128)),
)
"""What says most first: a part that is ended has those."""
SMOKE_SHAPES = (
    OpShape("mamba2", "tiny", (4, 8, 16, 1)),
    OpShape("gated_delta", "tiny", (2, 4, 8, 8)),
    OpShape("kimi_delta", "tiny", (4, 4, 8, 8)),
    OpShape("mamba1", "tiny", (16, 4)),
    OpShape("conv1d", "tiny", (32, 4)),
    OpShape("attention", "tiny", (4, 2, 16, 16)),
    OpShape("attention", "tiny mla", (4, 1, 24, 16)),
    OpShape("write_kv", "tiny", (4, 2, 16, 16)),
    OpShape("rms_norm", "tiny", (32, 32, 0)),
    OpShape("gated_norm", "tiny", (32, 16, 1)),
    OpShape("silu_mul", "tiny", (32,)),
)

ANCHORS_US: Mapping[tuple[str, str, str], tuple[float, str]] = {
    ("gated_delta", "qwen3-next tp2", "decode 32"): (20.0, "vLLM #31722, H200"),
    ("gated_delta", "qwen3-next tp2", "decode 128"): (59.0, "vLLM #31722, H200"),
    ("gated_delta", "qwen3-next tp2", "decode 256"): (111.0, "vLLM #31722, H200"),
    ("gated_delta", "8 heads", "prefill 1x8192"): (259.0, "fla on an H100 (FlashInfer 114, #3866)"),
}
