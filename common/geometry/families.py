"""The model families that may run: how each one's config is read, and what is patched of it in the pinned transformers
version.

A family is listed once its numbers were compared with stock transformers (tests/engine). Another ``model_type`` is
refused at start, with this list in the message (``common.geometry.refused``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from common.geometry import dense, linear, mamba
from common.geometry.parts import RawConfig
from common.kv_cache.spec import ModelGeometry

CONV = "causal_conv1d_fn"
MAMBA2 = "mamba2_chunk_scan"
MAMBA1 = "mamba_selective_scan"
GATED_DELTA = "torch_chunk_gated_delta_rule"
KIMI_DELTA = "chunk_kimi_delta_attention"


@dataclass(frozen=True, slots=True)
class SeesImages:
    """How a family's text model takes images.

    Attributes:
        has_axes: rotary positions of an image's tokens are on three axes (Qwen2-VL's).
        is_whole: tokens of an image see each other in both directions, so that no step may end inside one.
    """

    has_axes: bool = False
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """
    Attributes:
        read_config: (model_type, config, dtype) -> what the layers keep.
        mixer_class: name of the recurrent mixer's class; None: dense.
        functions: globals of the mixer's module that are replaced by varlen ops; none: the mixer's forward is replaced.
        probe_tolerance: largest allowed float32 logit difference of the numeric probe, in standard deviations.
        is_wrapped: a vision-language checkpoint, whose text model's fields are in ``text_config``.
        has_mtp: checkpoints may bring a head for further tokens (``common.models.adapter.mtp``).
        sees_images: its images are computed too, not only its text.
    """

    read_config: Callable[[str, RawConfig, str], ModelGeometry]
    mixer_class: str | None = None
    functions: tuple[str, ...] = ()
    probe_tolerance: float = 5e-3
    is_wrapped: bool = False
    has_mtp: bool = False
    sees_images: SeesImages | None = None


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bailing_hybrid": Family(linear.bailing_hybrid, "BailingHybridDeltaAttention", (CONV, KIMI_DELTA), 5e-2),
        "bamba": Family(mamba.bamba, "BambaMixer", (CONV, MAMBA2)),
        "falcon_h1": Family(mamba.falcon_h1, "FalconH1Mixer", (CONV, MAMBA2)),
        "falcon_mamba": Family(mamba.pure_mamba1, "FalconMambaMixer", (CONV, MAMBA1)),
        "gemma3": Family(dense.gemma3, is_wrapped=True, sees_images=SeesImages(is_whole=True)),
        "gemma3_text": Family(dense.gemma3),
        "granitemoehybrid": Family(mamba.granitemoehybrid, "GraniteMoeHybridMambaLayer", (CONV, MAMBA2)),
        "jamba": Family(mamba.jamba, "JambaMambaMixer", (CONV, MAMBA1)),
        "kimi_linear": Family(linear.kimi_linear, "KimiLinearDeltaAttention", (CONV, KIMI_DELTA), 5e-2),
        "lfm2": Family(linear.lfm2, "Lfm2ShortConv", (CONV,)),
        "lfm2_moe": Family(linear.lfm2, "Lfm2MoeShortConv", (CONV,)),
        "lfm2_vl": Family(linear.lfm2, "Lfm2ShortConv", (CONV,), is_wrapped=True, sees_images=SeesImages()),
        "lfm3": Family(linear.lfm3, "Lfm3ShortConv", (CONV,)),
        "lfm3_vl": Family(linear.lfm3, "Lfm3ShortConv", (CONV,), is_wrapped=True, sees_images=SeesImages()),
        "llama": Family(dense.llama),
        "mamba": Family(mamba.pure_mamba1, "MambaMixer", (CONV, MAMBA1)),
        "mamba2": Family(mamba.pure_mamba2, "Mamba2Mixer", (CONV, MAMBA2)),
        "minimax": Family(linear.minimax, "MiniMaxLightningAttention"),
        "mistral": Family(dense.mistral),
        "nemotron_h": Family(mamba.nemotron_h, "NemotronHMamba2Mixer", (CONV, MAMBA2), has_mtp=True),
        "olmo_hybrid": Family(linear.olmo_hybrid, "OlmoHybridGatedDeltaNet", (CONV, GATED_DELTA), 5e-2),
        "qwen3": Family(dense.qwen3),
        "qwen3_5": Family(
            linear.qwen_gated_delta,
            "Qwen3_5GatedDeltaNet",
            (CONV, GATED_DELTA),
            5e-2,
            is_wrapped=True,
            has_mtp=True,
            sees_images=SeesImages(has_axes=True),
        ),
        "qwen3_5_moe": Family(
            linear.qwen_gated_delta,
            "Qwen3_5MoeGatedDeltaNet",
            (CONV, GATED_DELTA),
            5e-2,
            is_wrapped=True,
            has_mtp=True,
            sees_images=SeesImages(has_axes=True),
        ),
        "qwen3_5_moe_text": Family(
            linear.qwen_gated_delta, "Qwen3_5MoeGatedDeltaNet", (CONV, GATED_DELTA), 5e-2, has_mtp=True
        ),
        "qwen3_5_text": Family(
            linear.qwen_gated_delta, "Qwen3_5GatedDeltaNet", (CONV, GATED_DELTA), 5e-2, has_mtp=True
        ),
        "qwen3_next": Family(
            linear.qwen_gated_delta, "Qwen3NextGatedDeltaNet", (CONV, GATED_DELTA), 5e-2, has_mtp=True
        ),
        "zamba": Family(mamba.zamba, "ZambaMambaMixer", (CONV, MAMBA1)),
        "zamba2": Family(mamba.zamba2, "Zamba2MambaMixer", (CONV, MAMBA2)),
    }
)
"""By ``model_type``."""
