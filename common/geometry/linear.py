"""Families with delta rules, lightning attention or short convolutions: what their layers keep."""

from __future__ import annotations

from common.geometry.parts import (
    RawConfig,
    assemble,
    by_head,
    common_fields,
    delta_state,
    get,
    kimi_delta_state,
    layer_kinds,
    short_conv_state,
)
from common.kv_cache.spec import ModelGeometry

_QWEN_DEFAULTS = {
    "qwen3_next": (2048, 151936, 48, 2),
    "qwen3_5": (4096, 248320, 32, 4),
    "qwen3_5_moe": (2048, 248320, 40, 2),
}
"""Defaults of the config classes: hidden size, vocabulary, layers, K/V heads."""


def qwen_gated_delta(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    hidden, vocab, layers, kv_heads = _QWEN_DEFAULTS[model_type.removesuffix("_text")]
    common = common_fields(config, hidden=hidden, vocab=vocab, positions=32768)
    num_layers = int(get(config, "num_hidden_layers", layers))
    interval = int(get(config, "full_attention_interval", 4))
    listed = config.get("layer_types") or [
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)
    ]
    return assemble(
        model_type,
        dtype,
        layer_kinds(listed)[:num_layers],
        num_kv_heads=int(get(config, "num_key_value_heads", kv_heads)),
        head_dim=int(get(config, "head_dim", 256)),
        state=delta_state(
            dtype,
            num_key_heads=int(get(config, "linear_num_key_heads", 16)),
            num_value_heads=int(get(config, "linear_num_value_heads", 32)),
            key_dim=int(get(config, "linear_key_head_dim", 128)),
            value_dim=int(get(config, "linear_value_head_dim", 128)),
            kernel=int(get(config, "linear_conv_kernel_dim", 4)),
        ),
        **common,
    )


def olmo_hybrid(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=3840, vocab=100352, positions=65536)
    num_layers = int(get(config, "num_hidden_layers", 32))
    num_heads = int(get(config, "num_attention_heads", 30))
    listed = config.get("layer_types")
    if listed is None:
        listed = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(num_layers)]
        if "full_attention" not in listed:
            listed[-1] = "full_attention"
    num_key_heads = int(get(config, "linear_num_key_heads", num_heads))
    key_dim = int(get(config, "linear_key_head_dim", int(0.75 * common["hidden_size"] / num_key_heads)))
    return assemble(
        model_type,
        dtype,
        layer_kinds(listed),
        num_kv_heads=int(get(config, "num_key_value_heads", num_heads)),
        head_dim=int(get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=delta_state(
            dtype,
            num_key_heads=num_key_heads,
            num_value_heads=int(get(config, "linear_num_value_heads", num_heads)),
            key_dim=key_dim,
            value_dim=int(get(config, "linear_value_head_dim", 2 * key_dim)),
            kernel=int(get(config, "linear_conv_kernel_dim", 4)),
        ),
        **common,
    )


def kimi_linear(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    """Checkpoints from before transformers had the family name layers in ``linear_attn_config``, counted from 1."""
    common = common_fields(config, hidden=2304, vocab=163_840, positions=1_048_576)
    if config.get("model_max_length") is not None:
        common["max_position"] = int(config["model_max_length"])
    num_layers = int(get(config, "num_hidden_layers", 27))
    linear = get(config, "linear_attn_config", {})
    listed = config.get("layer_types")
    if listed is None and "full_attn_layers" in linear and "kda_layers" in linear:
        attention = {int(index) - 1 for index in linear["full_attn_layers"]}
        listed = ["full_attention" if index in attention else "linear_attention" for index in range(num_layers)]
    elif listed is None:
        listed = ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(num_layers)]
    return assemble(
        model_type,
        dtype,
        layer_kinds(listed)[:num_layers],
        num_kv_heads=1,
        head_dim=0,
        state=kimi_delta_state(
            dtype,
            num_heads=int(get(linear, "num_heads", get(config, "linear_num_heads", 32))),
            head_dim=int(get(linear, "head_dim", get(config, "linear_head_dim", 128))),
            kernel=int(get(linear, "short_conv_kernel_size", get(config, "linear_conv_kernel_dim", 4))),
        ),
        latent_size=int(get(config, "kv_lora_rank", 512)) + int(get(config, "qk_rope_head_dim", 64)),
        **common,
    )


def bailing_hybrid(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=2560, vocab=157_184, positions=262_144)
    if config.get("model_max_length") is not None:
        common["max_position"] = int(config["model_max_length"])
    num_layers = int(get(config, "num_hidden_layers", 42))
    interval = int(get(config, "layer_group_size", 6))
    listed = config.get("layer_types") or [
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)
    ]
    # What transformers saves has the attention's rotary size as ``head_dim``, and the mixer's beside it.
    head_dim = get(config, "linear_head_dim", get(config, "head_dim", 128))
    return assemble(
        model_type,
        dtype,
        layer_kinds(listed)[:num_layers],
        num_kv_heads=1,
        head_dim=0,
        state=kimi_delta_state(
            dtype,
            num_heads=int(get(config, "num_attention_heads", 32)),
            head_dim=int(head_dim),
            kernel=int(get(config, "short_conv_kernel_size", 4)),
        ),
        latent_size=int(get(config, "kv_lora_rank", 512)) + int(get(config, "qk_rope_head_dim", 64)),
        **common,
    )


def minimax(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=4096, vocab=32000, positions=4096 * 32)
    num_layers = int(get(config, "num_hidden_layers", 32))
    num_heads = int(get(config, "num_attention_heads", 32))
    head_dim = int(get(config, "head_dim", common["hidden_size"] // num_heads))
    listed = config.get("layer_types")
    if listed is None:
        listed = ["linear_attention" if index % 2 else "full_attention" for index in range(num_layers)]
    if config.get("sliding_window") is not None:
        listed = ["sliding_attention" if kind == "full_attention" else kind for kind in layer_kinds(listed)]
    num_kv_heads = config.get("num_key_value_heads", 8)
    return assemble(
        model_type,
        dtype,
        layer_kinds(listed),
        num_kv_heads=int(num_heads if num_kv_heads is None else num_kv_heads),
        head_dim=head_dim,
        state=("lightning", (by_head("recurrent", (num_heads, head_dim, head_dim), "float32"),)),
        **common,
    )


def lfm2(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    is_moe = model_type == "lfm2_moe"
    common = common_fields(config, hidden=2048 if is_moe else 2560, vocab=65536, positions=128_000)
    num_layers = int(get(config, "num_hidden_layers", 32))
    num_heads = int(get(config, "num_attention_heads", 32))
    listed = config["layer_types"] if is_moe else config.get("layer_types")
    if listed is None:
        attention = set(get(config, "full_attn_idxs", range(num_layers)))
        listed = ["full_attention" if index in attention else "conv" for index in range(num_layers)]
    return assemble(
        model_type,
        dtype,
        layer_kinds(listed)[:num_layers],
        num_kv_heads=int(get(config, "num_key_value_heads", 8)),
        head_dim=int(get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=short_conv_state(dtype, width=common["hidden_size"], kernel=int(get(config, "conv_L_cache", 3))),
        **common,
    )


def lfm3(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=2048, vocab=128_000, positions=128_000)
    num_layers = int(get(config, "num_hidden_layers", 24))
    listed = config.get("layer_types") or [
        "full_attention" if index % 4 == 2 else "sliding_attention" if index % 4 == 0 and index > 0 else "conv"
        for index in range(num_layers)
    ]
    return assemble(
        model_type,
        dtype,
        layer_kinds(listed)[:num_layers],
        num_kv_heads=int(get(config, "num_key_value_heads", 4)),
        head_dim=int(get(config, "head_dim", 128)),
        state=short_conv_state(dtype, width=common["hidden_size"], kernel=int(get(config, "conv_L_cache", 7))),
        window=int(get(config, "sliding_window", 256)),
        **common,
    )
