"""From a model's raw ``config.json`` to what its layers keep, without torch or transformers.

One function per family reads the fields that transformers' own config class reads, with the same defaults and the same
legacy names (checked against transformers 5.23), so that the planner, the simulator and the engine agree. The engine
compares the shapes it measures with these and refuses to start when they differ.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import ConfigError
from common.geometry.families import FAMILIES
from common.geometry.parts import RawConfig
from common.geometry.refused import unsupported_family
from common.kv_cache.spec import DTYPE_BYTES, ModelGeometry


def model_geometry(raw_config: RawConfig, dtype: str) -> ModelGeometry:
    """What each layer of the model keeps between tokens; ``dtype`` is the model's (float32, bfloat16, float16).

    Raises ConfigError for families and layer kinds that are not supported, naming those that are.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}", param="--dtype")
    model_type = str(raw_config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        raise unsupported_family(raw_config.get("model_type"), FAMILIES)
    config: object = (raw_config.get("text_config") or {}) if family.is_wrapped else raw_config
    if not isinstance(config, Mapping):
        raise ConfigError(f"config.json: text_config is not an object, got {config!r}", param="--model")
    try:
        return family.read_config(model_type, config, dtype)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as exc:
        raise ConfigError(f"config.json of model_type {model_type!r} is not usable: {exc!r}", param="--model") from exc
