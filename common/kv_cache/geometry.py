"""From a model's raw ``config.json`` to what its layers keep, without torch or transformers.

One function per family reads the fields that transformers' own config class reads, with the same defaults and the same
legacy names (checked against transformers 5.23), so that the planner, the simulator and the engine agree. The engine
compares the shapes it measures with these and refuses to start when they differ.

Shapes: conv state [channels, kernel - 1] in the model's dtype; recurrent state in float32: Mamba-2 [heads, head_dim,
state], gated delta rule [value heads, key head_dim, value head_dim], Mamba-1 [intermediate, state].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.errors import ConfigError
from common.kv_cache.spec import (
    DTYPE_BYTES,
    AttentionLayerSpec,
    ModelGeometry,
    StateLayerSpec,
    StateTensorSpec,
)

RawConfig = Mapping[str, Any]

_LEGACY_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
_NEMOTRON_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_STATELESS = frozenset({"mlp", "moe"})


def model_geometry(raw_config: RawConfig, dtype: str) -> ModelGeometry:
    """What each layer of the model keeps between tokens; ``dtype`` is the model's (float32, bfloat16, float16).

    Raises ConfigError for families and layer kinds that are not supported, naming those that are.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}", param="--dtype")
    model_type = raw_config.get("model_type")
    config = raw_config
    if model_type == "qwen3_5":
        config = raw_config.get("text_config") or {}
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(_FAMILIES))}", param="--model"
        )
    try:
        return family(str(model_type), config, dtype)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as exc:
        raise ConfigError(f"config.json of model_type {model_type!r} is not usable: {exc!r}", param="--model") from exc


def _get(config: RawConfig, name: str, default: Any) -> Any:
    """A field, or the config class's default when it is missing or null."""
    value = config.get(name)
    return default if value is None else value


def _assemble(
    model_type: str,
    dtype: str,
    layer_types: Sequence[str],
    *,
    num_kv_heads: int,
    head_dim: int,
    state: tuple[str, tuple[StateTensorSpec, ...]] | None,
    hidden_size: int,
    vocab_size: int,
    max_position: int,
) -> ModelGeometry:
    """The layer's index in the model is the index that every family's modelling file gives to the cache."""
    attention, recurrent = [], []
    for layer_idx, layer_type in enumerate(layer_types):
        if layer_type == "full_attention":
            attention.append(AttentionLayerSpec(layer_idx, num_kv_heads, head_dim, head_dim, dtype))
        elif layer_type in ("linear_attention", "conv") and state is not None:
            recurrent.append(StateLayerSpec(layer_idx, state[0], state[1]))
        elif layer_type not in _STATELESS:
            raise ConfigError(
                f"layer {layer_idx} of this {model_type} model is {layer_type!r}, which is not supported",
                param="--model",
            )
    return ModelGeometry(
        model_type=model_type,
        num_layers=len(layer_types),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_position=max_position,
        attention_layers=tuple(attention),
        state_layers=tuple(recurrent),
    )


def _layer_types(raw: Sequence[str]) -> list[str]:
    return [_LEGACY_LAYER_TYPES.get(layer_type, layer_type) for layer_type in raw]


def _common(config: RawConfig, *, hidden: int, vocab: int, positions: int) -> dict[str, int]:
    return {
        "hidden_size": int(_get(config, "hidden_size", hidden)),
        "vocab_size": int(_get(config, "vocab_size", vocab)),
        "max_position": int(_get(config, "max_position_embeddings", positions)),
    }


def _mamba2(
    dtype: str, *, num_heads: int, head_dim: int, state_size: int, num_groups: int, kernel: int
) -> tuple[str, tuple[StateTensorSpec, ...]]:
    channels = num_heads * head_dim + 2 * num_groups * state_size
    return "mamba2", (
        StateTensorSpec("conv", (channels, kernel - 1), dtype),
        StateTensorSpec("recurrent", (num_heads, head_dim, state_size), "float32"),
    )


def _bamba_mixer(config: RawConfig, dtype: str, hidden_size: int) -> tuple[str, tuple[StateTensorSpec, ...]]:
    """Granite and Bamba share the mixer and its field names."""
    num_heads = int(_get(config, "mamba_n_heads", 128))
    head_dim = _get(config, "mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = int(_get(config, "mamba_expand", 2)) * hidden_size // num_heads
    return _mamba2(
        dtype,
        num_heads=num_heads,
        head_dim=int(head_dim),
        state_size=int(_get(config, "mamba_d_state", 256)),
        num_groups=int(_get(config, "mamba_n_groups", 1)),
        kernel=int(_get(config, "mamba_d_conv", 4)),
    )


def _granitemoehybrid(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = _common(config, hidden=4096, vocab=32000, positions=2048)
    num_layers = int(_get(config, "num_hidden_layers", 32))
    num_heads = int(_get(config, "num_attention_heads", 32))
    listed = config.get("layer_types") or config.get("layers_block_type") or ["linear_attention"] * num_layers
    return _assemble(
        model_type,
        dtype,
        _layer_types(listed)[:num_layers],
        num_kv_heads=int(_get(config, "num_key_value_heads", num_heads)),
        head_dim=int(_get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=_bamba_mixer(config, dtype, common["hidden_size"]),
        **common,
    )


def _bamba(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = _common(config, hidden=4096, vocab=128000, positions=262144)
    num_layers = int(_get(config, "num_hidden_layers", 32))
    num_heads = int(_get(config, "num_attention_heads", 32))
    listed = config.get("layers_block_type") or config.get("layer_types")
    indices = config.get("attn_layer_indices")
    if indices is not None or listed is None:
        attention = set(indices or ())
        listed = ["full_attention" if index in attention else "linear_attention" for index in range(num_layers)]
    # An explicit null stands for one K/V head per query head; a missing field for the class's default.
    num_kv_heads = config.get("num_key_value_heads", 8)
    return _assemble(
        model_type,
        dtype,
        _layer_types(listed),
        num_kv_heads=int(num_heads if num_kv_heads is None else num_kv_heads),
        head_dim=int(_get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=_bamba_mixer(config, dtype, common["hidden_size"]),
        **common,
    )


def _nemotron_h(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = _common(config, hidden=4096, vocab=131072, positions=4096)
    listed = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    if listed is None:
        listed = (
            [_NEMOTRON_PATTERN[char] for char in pattern]
            if pattern is not None
            else ["linear_attention", "moe", "full_attention", "mlp"]
        )
    num_heads = int(_get(config, "num_attention_heads", 32))
    num_kv_heads = config.get("num_key_value_heads", 8)
    return _assemble(
        model_type,
        dtype,
        _layer_types(listed),
        num_kv_heads=int(num_heads if num_kv_heads is None else num_kv_heads),
        head_dim=int(_get(config, "head_dim", 128)),
        state=_mamba2(
            dtype,
            num_heads=int(_get(config, "mamba_num_heads", 128)),
            head_dim=int(_get(config, "mamba_head_dim", 64)),
            state_size=int(_get(config, "ssm_state_size", 128)),
            num_groups=int(_get(config, "mamba_n_groups", _get(config, "n_groups", 8))),
            kernel=int(_get(config, "mamba_d_conv", _get(config, "conv_kernel", 4))),
        ),
        **common,
    )


def _qwen_gated_delta(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    is_next = model_type == "qwen3_next"
    common = _common(config, hidden=2048 if is_next else 4096, vocab=151936 if is_next else 248320, positions=32768)
    num_layers = int(_get(config, "num_hidden_layers", 48 if is_next else 32))
    interval = int(_get(config, "full_attention_interval", 4))
    listed = config.get("layer_types") or [
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)
    ]
    num_key_heads = int(_get(config, "linear_num_key_heads", 16))
    num_value_heads = int(_get(config, "linear_num_value_heads", 32))
    key_dim = int(_get(config, "linear_key_head_dim", 128))
    value_dim = int(_get(config, "linear_value_head_dim", 128))
    channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    kernel = int(_get(config, "linear_conv_kernel_dim", 4))
    state = (
        StateTensorSpec("conv", (channels, kernel - 1), dtype),
        StateTensorSpec("recurrent", (num_value_heads, key_dim, value_dim), "float32"),
    )
    return _assemble(
        model_type,
        dtype,
        _layer_types(listed)[:num_layers],
        num_kv_heads=int(_get(config, "num_key_value_heads", 2 if is_next else 4)),
        head_dim=int(_get(config, "head_dim", 256)),
        state=("gated_delta", state),
        **common,
    )


def _lfm2(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = _common(config, hidden=2560, vocab=65536, positions=128_000)
    num_layers = int(_get(config, "num_hidden_layers", 32))
    num_heads = int(_get(config, "num_attention_heads", 32))
    listed = config.get("layer_types")
    if listed is None:
        attention = set(_get(config, "full_attn_idxs", range(num_layers)))
        listed = ["full_attention" if index in attention else "conv" for index in range(num_layers)]
    conv = StateTensorSpec("conv", (common["hidden_size"], int(_get(config, "conv_L_cache", 3)) - 1), dtype)
    return _assemble(
        model_type,
        dtype,
        _layer_types(listed)[:num_layers],
        num_kv_heads=int(_get(config, "num_key_value_heads", 8)),
        head_dim=int(_get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=("short_conv", (conv,)),
        **common,
    )


def _jamba(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = _common(config, hidden=4096, vocab=65536, positions=262144)
    num_layers = int(_get(config, "num_hidden_layers", 32))
    num_heads = int(_get(config, "num_attention_heads", 32))
    period, offset = int(_get(config, "attn_layer_period", 8)), int(_get(config, "attn_layer_offset", 4))
    listed = ["full_attention" if index % period == offset else "linear_attention" for index in range(num_layers)]
    num_kv_heads = config.get("num_key_value_heads", 8)
    intermediate = int(_get(config, "mamba_expand", 2)) * common["hidden_size"]
    state = (
        StateTensorSpec("conv", (intermediate, int(_get(config, "mamba_d_conv", 4)) - 1), dtype),
        StateTensorSpec("recurrent", (intermediate, int(_get(config, "mamba_d_state", 16))), "float32"),
    )
    return _assemble(
        model_type,
        dtype,
        listed,
        num_kv_heads=int(num_heads if num_kv_heads is None else num_kv_heads),
        head_dim=int(_get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=("mamba1", state),
        **common,
    )


def _llama(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = _common(config, hidden=4096, vocab=32000, positions=2048)
    num_heads = int(_get(config, "num_attention_heads", 32))
    return _assemble(
        model_type,
        dtype,
        ["full_attention"] * int(_get(config, "num_hidden_layers", 32)),
        num_kv_heads=int(_get(config, "num_key_value_heads", num_heads)),
        head_dim=int(_get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=None,
        **common,
    )


def _qwen3(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = _common(config, hidden=4096, vocab=151936, positions=32768)
    num_layers = int(_get(config, "num_hidden_layers", 32))
    num_heads = int(_get(config, "num_attention_heads", 32))
    listed = config.get("layer_types")
    if listed is None:
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        first_window = int(_get(config, "max_window_layers", 28)) if window is not None else num_layers
        listed = ["sliding_attention" if index >= first_window else "full_attention" for index in range(num_layers)]
    num_kv_heads = config.get("num_key_value_heads", 32)
    return _assemble(
        model_type,
        dtype,
        _layer_types(listed)[:num_layers],
        num_kv_heads=int(num_heads if num_kv_heads is None else num_kv_heads),
        head_dim=int(_get(config, "head_dim", 128)),
        state=None,
        **common,
    )


_FAMILIES: Mapping[str, Callable[[str, RawConfig, str], ModelGeometry]] = {
    "bamba": _bamba,
    "granitemoehybrid": _granitemoehybrid,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "llama": _llama,
    "nemotron_h": _nemotron_h,
    "qwen3": _qwen3,
    "qwen3_5": _qwen_gated_delta,
    "qwen3_5_text": _qwen_gated_delta,
    "qwen3_next": _qwen_gated_delta,
}
