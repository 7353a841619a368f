"""Families with attention only: what their layers keep."""

from __future__ import annotations

from common.errors import ConfigError
from common.geometry.parts import RawConfig, assemble, common_fields, get, layer_kinds
from common.kv_cache.spec import ModelGeometry


def llama(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=4096, vocab=32000, positions=2048)
    num_heads = int(get(config, "num_attention_heads", 32))
    return assemble(
        model_type,
        dtype,
        ["full_attention"] * int(get(config, "num_hidden_layers", 32)),
        num_kv_heads=int(get(config, "num_key_value_heads", num_heads)),
        head_dim=int(get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=None,
        **common,
    )


def qwen3(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=4096, vocab=151936, positions=32768)
    num_layers = int(get(config, "num_hidden_layers", 32))
    num_heads = int(get(config, "num_attention_heads", 32))
    listed = config.get("layer_types")
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if listed is None:
        first_window = int(get(config, "max_window_layers", 28)) if window is not None else num_layers
        listed = ["sliding_attention" if index >= first_window else "full_attention" for index in range(num_layers)]
    num_kv_heads = config.get("num_key_value_heads", 32)
    return assemble(
        model_type,
        dtype,
        layer_kinds(listed)[:num_layers],
        num_kv_heads=int(num_heads if num_kv_heads is None else num_kv_heads),
        head_dim=int(get(config, "head_dim", 128)),
        state=None,
        window=int(window or 0),
        **common,
    )


def mistral(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    """All layers slide, or none (``sliding_window`` null)."""
    common = common_fields(config, hidden=4096, vocab=32000, positions=4096 * 32)
    num_heads = int(get(config, "num_attention_heads", 32))
    window = config.get("sliding_window", 4096)
    num_kv_heads = config.get("num_key_value_heads", 8)
    layer_type = "full_attention" if window is None else "sliding_attention"
    return assemble(
        model_type,
        dtype,
        [layer_type] * int(get(config, "num_hidden_layers", 32)),
        num_kv_heads=int(num_heads if num_kv_heads is None else num_kv_heads),
        head_dim=int(get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=None,
        window=int(window or 0),
        **common,
    )


def gemma3(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    if config.get("use_bidirectional_attention"):
        raise ConfigError(f"{model_type} with use_bidirectional_attention does not generate text", param="--model")
    common = common_fields(config, hidden=2304, vocab=262_208, positions=131_072)
    num_layers = int(get(config, "num_hidden_layers", 26))
    pattern = int(get(config, "sliding_window_pattern", 6))
    listed = config.get("layer_types") or [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(num_layers)
    ]
    return assemble(
        model_type,
        dtype,
        layer_kinds(listed)[:num_layers],
        num_kv_heads=int(get(config, "num_key_value_heads", 4)),
        head_dim=int(get(config, "head_dim", 256)),
        state=None,
        window=int(get(config, "sliding_window", 4096)),
        **common,
    )
