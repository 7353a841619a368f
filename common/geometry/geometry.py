"""From a model's raw ``config.json`` to what its layers keep, without torch or transformers.

One function per family reads the fields that transformers' own config class reads, with the same defaults and the same
legacy names (checked against transformers 5.23), so that the planner, the simulator and the engine agree. The engine
compares the shapes it measures with these and refuses to start when they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.errors import ConfigError
from common.geometry import dense, linear, mamba
from common.geometry.parts import RawConfig
from common.geometry.refused import unsupported_family
from common.kv_cache.spec import DTYPE_BYTES, ModelGeometry

_WRAPPERS = frozenset({"gemma3", "lfm2_vl", "qwen3_5", "qwen3_5_moe"})
"""Vision-language checkpoints: the text model's fields are in ``text_config``."""


def model_geometry(raw_config: RawConfig, dtype: str) -> ModelGeometry:
    """What each layer of the model keeps between tokens; ``dtype`` is the model's (float32, bfloat16, float16).

    Raises ConfigError for families and layer kinds that are not supported, naming those that are.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}", param="--dtype")
    model_type = raw_config.get("model_type")
    config: object = raw_config
    if str(model_type) in _WRAPPERS:
        config = raw_config.get("text_config") or {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"config.json: text_config is not an object, got {config!r}", param="--model")
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise unsupported_family(model_type, _FAMILIES)
    try:
        return family(str(model_type), config, dtype)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as exc:
        raise ConfigError(f"config.json of model_type {model_type!r} is not usable: {exc!r}", param="--model") from exc


_FAMILIES: Mapping[str, Callable[[str, RawConfig, str], ModelGeometry]] = {
    "bailing_hybrid": linear.bailing_hybrid,
    "bamba": mamba.bamba,
    "falcon_h1": mamba.falcon_h1,
    "falcon_mamba": mamba.pure_mamba1,
    "gemma3": dense.gemma3,
    "gemma3_text": dense.gemma3,
    "granitemoehybrid": mamba.granitemoehybrid,
    "jamba": mamba.jamba,
    "kimi_linear": linear.kimi_linear,
    "lfm2": linear.lfm2,
    "lfm2_moe": linear.lfm2,
    "lfm2_vl": linear.lfm2,
    "lfm3": linear.lfm3,
    "llama": dense.llama,
    "mamba": mamba.pure_mamba1,
    "mamba2": mamba.pure_mamba2,
    "minimax": linear.minimax,
    "mistral": dense.mistral,
    "nemotron_h": mamba.nemotron_h,
    "olmo_hybrid": linear.olmo_hybrid,
    "qwen3": dense.qwen3,
    "qwen3_5": linear.qwen_gated_delta,
    "qwen3_5_moe": linear.qwen_gated_delta,
    "qwen3_5_moe_text": linear.qwen_gated_delta,
    "qwen3_5_text": linear.qwen_gated_delta,
    "qwen3_next": linear.qwen_gated_delta,
    "zamba": mamba.zamba,
    "zamba2": mamba.zamba2,
}
