"""The model families that may run, and what their seam looks like in the pinned transformers version.

A family is listed once its numbers were compared with stock transformers (tests/engine). Another ``model_type`` is
refused at start, with this list in the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

CONV = "causal_conv1d_fn"
MAMBA2 = "mamba2_chunk_scan"
MAMBA1 = "mamba_selective_scan"
GATED_DELTA = "torch_chunk_gated_delta_rule"


@dataclass(frozen=True, slots=True)
class Family:
    """``mixer_class``: name of the recurrent mixer's class (None: dense). ``functions``: globals of its module that are
    replaced by varlen ops. ``probe_tolerance``: largest allowed float32 logit difference, in standard deviations."""

    mixer_class: str | None
    functions: tuple[str, ...] = ()
    probe_tolerance: float = 5e-3


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "granitemoehybrid": Family("GraniteMoeHybridMambaLayer", (CONV, MAMBA2)),
        "bamba": Family("BambaMixer", (CONV, MAMBA2)),
        "nemotron_h": Family("NemotronHMamba2Mixer", (CONV, MAMBA2)),
        "qwen3_next": Family("Qwen3NextGatedDeltaNet", (CONV, GATED_DELTA), 5e-2),
        "qwen3_5": Family("Qwen3_5GatedDeltaNet", (CONV, GATED_DELTA), 5e-2),
        "qwen3_5_text": Family("Qwen3_5GatedDeltaNet", (CONV, GATED_DELTA), 5e-2),
        "lfm2": Family("Lfm2ShortConv", (CONV,)),
        "jamba": Family("JambaMambaMixer", (CONV, MAMBA1)),
        "llama": Family(None),
        "qwen3": Family(None),
    }
)
