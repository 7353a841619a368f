"""The model families that may run, and what is patched of each in the pinned transformers version.

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
KIMI_DELTA = "chunk_kimi_delta_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """``mixer_class``: name of the recurrent mixer's class (None: dense). ``functions``: globals of its module that are
    replaced by varlen ops (none: the mixer's forward is replaced). ``probe_tolerance``: largest allowed float32
    logit difference, in standard deviations."""

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
        "kimi_linear": Family("KimiLinearDeltaAttention", (CONV, KIMI_DELTA), 5e-2),
        "bailing_hybrid": Family("BailingHybridDeltaAttention", (CONV, KIMI_DELTA), 5e-2),
        "lfm3": Family("Lfm3ShortConv", (CONV,)),
        "falcon_h1": Family("FalconH1Mixer", (CONV, MAMBA2)),
        "zamba2": Family("Zamba2MambaMixer", (CONV, MAMBA2)),
        "mamba2": Family("Mamba2Mixer", (CONV, MAMBA2)),
        "qwen3_5_moe": Family("Qwen3_5MoeGatedDeltaNet", (CONV, GATED_DELTA), 5e-2),
        "qwen3_5_moe_text": Family("Qwen3_5MoeGatedDeltaNet", (CONV, GATED_DELTA), 5e-2),
        "olmo_hybrid": Family("OlmoHybridGatedDeltaNet", (CONV, GATED_DELTA), 5e-2),
        "lfm2_vl": Family("Lfm2ShortConv", (CONV,)),
        "lfm2_moe": Family("Lfm2MoeShortConv", (CONV,)),
        "falcon_mamba": Family("FalconMambaMixer", (CONV, MAMBA1)),
        "mamba": Family("MambaMixer", (CONV, MAMBA1)),
        "minimax": Family("MiniMaxLightningAttention"),
        "zamba": Family("ZambaMambaMixer", (CONV, MAMBA1)),
        "llama": Family(None),
        "mistral": Family(None),
        "gemma3": Family(None),
        "gemma3_text": Family(None),
        "qwen3": Family(None),
    }
)
