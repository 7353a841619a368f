"""Families with Mamba-1 or Mamba-2 mixers: what their layers keep."""

from __future__ import annotations

from common.geometry.parts import (
    RawConfig,
    assemble,
    by_head,
    common_fields,
    get,
    layer_kinds,
    mamba1_state,
    mamba2_state,
)
from common.kv_cache.spec import ModelGeometry, ShardPart, StateTensorSpec

_NEMOTRON_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""The letters of ``hybrid_override_pattern``."""


def _bamba_mixer(config: RawConfig, dtype: str, hidden_size: int) -> tuple[str, tuple[StateTensorSpec, ...]]:
    """Granite and Bamba share the mixer and its field names."""
    num_heads = int(get(config, "mamba_n_heads", 128))
    head_dim = get(config, "mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = int(get(config, "mamba_expand", 2)) * hidden_size // num_heads
    return mamba2_state(
        dtype,
        num_heads=num_heads,
        head_dim=int(head_dim),
        state_size=int(get(config, "mamba_d_state", 256)),
        num_groups=int(get(config, "mamba_n_groups", 1)),
        kernel=int(get(config, "mamba_d_conv", 4)),
    )


def granitemoehybrid(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=4096, vocab=32000, positions=2048)
    num_layers = int(get(config, "num_hidden_layers", 32))
    num_heads = int(get(config, "num_attention_heads", 32))
    listed = config.get("layer_types") or config.get("layers_block_type") or ["linear_attention"] * num_layers
    return assemble(
        model_type,
        dtype,
        layer_kinds(listed)[:num_layers],
        num_kv_heads=int(get(config, "num_key_value_heads", num_heads)),
        head_dim=int(get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=_bamba_mixer(config, dtype, common["hidden_size"]),
        **common,
    )


def bamba(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=4096, vocab=128000, positions=262144)
    num_layers = int(get(config, "num_hidden_layers", 32))
    num_heads = int(get(config, "num_attention_heads", 32))
    listed = config.get("layers_block_type") or config.get("layer_types")
    indices = config.get("attn_layer_indices")
    if indices is not None or listed is None:
        attention = set(indices or ())
        listed = ["full_attention" if index in attention else "linear_attention" for index in range(num_layers)]
    # An explicit null stands for one K/V head per query head; a missing field for the class's default.
    num_kv_heads = config.get("num_key_value_heads", 8)
    return assemble(
        model_type,
        dtype,
        layer_kinds(listed),
        num_kv_heads=int(num_heads if num_kv_heads is None else num_kv_heads),
        head_dim=int(get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=_bamba_mixer(config, dtype, common["hidden_size"]),
        **common,
    )


def nemotron_h(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=4096, vocab=131072, positions=4096)
    listed = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    if listed is None:
        listed = (
            [_NEMOTRON_PATTERN[char] for char in pattern]
            if pattern is not None
            else ["linear_attention", "moe", "full_attention", "mlp"]
        )
    num_heads = int(get(config, "num_attention_heads", 32))
    num_kv_heads = config.get("num_key_value_heads", 8)
    return assemble(
        model_type,
        dtype,
        layer_kinds(listed),
        num_kv_heads=int(num_heads if num_kv_heads is None else num_kv_heads),
        head_dim=int(get(config, "head_dim", 128)),
        state=mamba2_state(
            dtype,
            num_heads=int(get(config, "mamba_num_heads", 128)),
            head_dim=int(get(config, "mamba_head_dim", 64)),
            state_size=int(get(config, "ssm_state_size", 128)),
            num_groups=int(get(config, "mamba_n_groups", get(config, "n_groups", 8))),
            kernel=int(get(config, "mamba_d_conv", get(config, "conv_kernel", 4))),
        ),
        **common,
    )


def jamba(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=4096, vocab=65536, positions=262144)
    num_layers = int(get(config, "num_hidden_layers", 32))
    num_heads = int(get(config, "num_attention_heads", 32))
    period, offset = int(get(config, "attn_layer_period", 8)), int(get(config, "attn_layer_offset", 4))
    listed = ["full_attention" if index % period == offset else "linear_attention" for index in range(num_layers)]
    num_kv_heads = config.get("num_key_value_heads", 8)
    intermediate = int(get(config, "mamba_expand", 2)) * common["hidden_size"]
    state = mamba1_state(
        dtype,
        width=intermediate,
        state_size=int(get(config, "mamba_d_state", 16)),
        kernel=int(get(config, "mamba_d_conv", 4)),
    )
    return assemble(
        model_type,
        dtype,
        listed,
        num_kv_heads=int(num_heads if num_kv_heads is None else num_kv_heads),
        head_dim=int(get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=state,
        **common,
    )


def falcon_h1(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=4096, vocab=128000, positions=8192)
    num_heads = int(get(config, "num_attention_heads", 32))
    num_kv_heads = config.get("num_key_value_heads", 8)
    # The width of the mixer is a field of its own; an explicit null stands for the usual multiple of the hidden size.
    width = config.get("mamba_d_ssm", 1024)
    if width is None:
        width = int(get(config, "mamba_expand", 2)) * common["hidden_size"]
    num_mixer_heads = int(get(config, "mamba_n_heads", 128))
    head_dim = get(config, "mamba_d_head", "auto")
    return assemble(
        model_type,
        dtype,
        ["hybrid"] * int(get(config, "num_hidden_layers", 32)),
        num_kv_heads=int(num_heads if num_kv_heads is None else num_kv_heads),
        head_dim=int(get(config, "head_dim", common["hidden_size"] // num_heads)),
        state=mamba2_state(
            dtype,
            num_heads=num_mixer_heads,
            head_dim=int(width) // num_mixer_heads if head_dim == "auto" else int(head_dim),
            state_size=int(get(config, "mamba_d_state", 256)),
            num_groups=int(get(config, "mamba_n_groups", 1)),
            kernel=int(get(config, "mamba_d_conv", 4)),
        ),
        **common,
    )


def zamba2(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=2560, vocab=32000, positions=4096)
    if config.get("use_long_context"):
        common["max_position"] = 16384
    num_heads = int(get(config, "num_attention_heads", 32))
    num_mixer_heads = int(get(config, "n_mamba_heads", 8))
    mixer, hybrid = "linear_attention", "hybrid"
    default = [mixer, *[*[mixer] * 5, hybrid] * 7, *[mixer] * 4, hybrid, *[mixer] * 3, hybrid, mixer, mixer]
    # The shared block sees the hidden rows beside the embeddings: twice the hidden size.
    head_dim = get(config, "attention_head_dim", get(config, "head_dim", 2 * common["hidden_size"] // num_heads))
    width = int(get(config, "mamba_expand", 2) * common["hidden_size"])
    return assemble(
        model_type,
        dtype,
        layer_kinds(config.get("layers_block_type") or config.get("layer_types") or default),
        num_kv_heads=int(get(config, "num_key_value_heads", num_heads)),
        head_dim=int(head_dim),
        state=mamba2_state(
            dtype,
            num_heads=num_mixer_heads,
            head_dim=int(get(config, "mamba_headdim", width // num_mixer_heads)),
            state_size=int(get(config, "mamba_d_state", 64)),
            num_groups=int(get(config, "mamba_ngroups", 1)),
            kernel=int(get(config, "mamba_d_conv", 4)),
        ),
        **common,
    )


def zamba(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    common = common_fields(config, hidden=3712, vocab=32000, positions=4096)
    num_layers = int(get(config, "num_hidden_layers", 76))
    period, offset = int(get(config, "attn_layer_period", 6)), int(get(config, "attn_layer_offset", 4))
    default = ["linear_attention", "linear_attention", "hybrid"] + [
        "hybrid" if index % period == offset else "linear_attention" for index in range(num_layers - 3)
    ]
    head_dim = 2 * common["hidden_size"] // int(get(config, "num_attention_heads", 16))
    num_mixer_heads, state_size = int(get(config, "n_mamba_heads", 2)), int(get(config, "mamba_d_state", 16))
    width = int(get(config, "mamba_expand", 2)) * common["hidden_size"]
    x = ShardPart("x", num_mixer_heads, width // num_mixer_heads)
    return assemble(
        model_type,
        dtype,
        layer_kinds(config.get("layers_block_type") or config.get("layer_types") or default),
        num_kv_heads=int(get(config, "num_key_value_heads", 16)),
        head_dim=int(get(config, "attention_head_dim", get(config, "head_dim", head_dim))),
        state=(
            "mamba1",
            (
                StateTensorSpec("conv", (width, int(get(config, "mamba_d_conv", 4)) - 1), dtype, (x,)),
                by_head("recurrent", (num_mixer_heads, width // num_mixer_heads, state_size), "float32"),
            ),
        ),
        **common,
    )


def pure_mamba2(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    """No attention, no positions: nothing in the config bounds the length."""
    return assemble(
        model_type,
        dtype,
        ["linear_attention"] * int(get(config, "num_hidden_layers", 64)),
        num_kv_heads=0,
        head_dim=0,
        state=mamba2_state(
            dtype,
            num_heads=int(get(config, "num_heads", 128)),
            head_dim=int(get(config, "head_dim", 64)),
            state_size=int(get(config, "state_size", 128)),
            num_groups=int(get(config, "n_groups", 8)),
            kernel=int(get(config, "conv_kernel", 4)),
        ),
        **common_fields(config, hidden=4096, vocab=32768, positions=0),
    )


def pure_mamba1(model_type: str, config: RawConfig, dtype: str) -> ModelGeometry:
    """mamba and falcon_mamba. A given ``intermediate_size`` wins over ``expand`` (falcon-mamba-7b has 16 there)."""
    common = common_fields(config, hidden=768, vocab=50280, positions=0)
    width = get(config, "intermediate_size", int(get(config, "expand", 2) * common["hidden_size"]))
    return assemble(
        model_type,
        dtype,
        ["linear_attention"] * int(get(config, "num_hidden_layers", 32)),
        num_kv_heads=0,
        head_dim=0,
        state=mamba1_state(
            dtype,
            width=int(width),
            state_size=int(get(config, "state_size", 16)),
            kernel=int(get(config, "conv_kernel", 4)),
        ),
        **common,
    )
