"""Raw configs of every supported family, current and legacy field names, to what their layers keep."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import ConfigError
from common.kv_cache.geometry import model_geometry
from common.kv_cache.spec import ModelGeometry

MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
GDN = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 8,
    "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip


def kinds(geometry: ModelGeometry) -> str:
    """One letter a layer: A attention, the mixer's first letter, '.' neither."""
    letters = ["."] * geometry.num_layers
    for layer in geometry.attention_layers:
        letters[layer.layer_idx] = "A"
    for state in geometry.state_layers:
        letters[state.layer_idx] = state.mixer[0]
    return "".join(letters)


def shapes(geometry: ModelGeometry) -> dict[str, tuple[tuple[int, ...], str]]:
    return {tensor.name: (tensor.shape, tensor.dtype) for tensor in geometry.state_layers[0].tensors}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "granitemoehybrid", **MAMBA2, "layer_types": ["mamba", "attention", "mamba"]}, "mAm"),
        (
            {
                "model_type": "granitemoehybrid",
                **MAMBA2,
                "layer_types": ["linear_attention", "full_attention", "mamba"],
            },
            "mAm",
        ),
        ({"model_type": "bamba", **MAMBA2, "attn_layer_indices": [1]}, "mAm"),
        ({"model_type": "bamba", **MAMBA2, "layers_block_type": ["mamba", "attention", "mamba"]}, "mAm"),
        ({"model_type": "bamba", **MAMBA2, "layer_types": ["linear_attention", "full_attention"]}, "mA"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*E", "num_hidden_layers": 5}, "m.mA."),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "mlp", "attention", "moe"]}, "m.A."),
        ({"model_type": "nemotron_h", "layer_types": ["linear_attention", "mlp", "full_attention"]}, "m.A"),
        ({"model_type": "qwen3_next", **GDN}, "gggA"),
        ({"model_type": "qwen3_5_text", **GDN, "full_attention_interval": 2}, "gAgA"),
        ({"model_type": "qwen3_5", "text_config": GDN, "vision_config": {"depth": 2}}, "gggA"),
        ({"model_type": "lfm2", "num_hidden_layers": 3, "full_attn_idxs": [2]}, "ssA"),
        ({"model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}, "sAs"),
        ({"model_type": "jamba", "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1}, "mAmA"),
        ({"model_type": "llama", "num_hidden_layers": 2}, "AA"),
        ({"model_type": "qwen3", "num_hidden_layers": 2}, "AA"),
    ],
)
def test_layers_when_config_is_of_a_supported_family_then_each_is_recognised(
    config: dict[str, Any], expected: str
) -> None:
    assert kinds(model_geometry(config, "bfloat16")) == expected


def test_shapes_when_mixer_is_mamba2_then_conv_in_model_dtype_and_recurrent_in_float32() -> None:
    config = {"model_type": "granitemoehybrid", **MAMBA2, "layer_types": ["mamba", "attention", "mamba"]}
    geometry = model_geometry(config, "bfloat16")
    assert shapes(geometry) == {"conv": ((64 + 32, 3), "bfloat16"), "recurrent": ((8, 8, 16), "float32")}
    attention = geometry.attention_layers[0]
    assert (attention.num_kv_heads, attention.head_size, attention.bytes_per_token) == (4, 8, 4 * 16 * 2)


def test_shapes_when_mixer_is_gated_delta_then_value_heads_by_key_and_value_dims() -> None:
    geometry = model_geometry({"model_type": "qwen3_next", **GDN}, "float32")
    assert shapes(geometry) == {"conv": ((2 * 16 + 16, 3), "float32"), "recurrent": ((4, 8, 4), "float32")}
    assert geometry.attention_layers[0].num_kv_heads == 2


def test_shapes_when_mixer_is_mamba1_or_short_conv_then_their_own() -> None:
    jamba = model_geometry({"model_type": "jamba", "hidden_size": 32, "mamba_d_state": 8}, "float16")
    assert shapes(jamba) == {"conv": ((64, 3), "float16"), "recurrent": ((64, 8), "float32")}
    lfm2 = model_geometry({"model_type": "lfm2", "hidden_size": 64, "full_attn_idxs": [1]}, "float32")
    assert shapes(lfm2) == {"conv": ((64, 2), "float32")}


def test_kv_heads_when_null_or_missing_then_as_the_config_class_reads_them() -> None:
    def heads(**fields: Any) -> int:
        return model_geometry({"attn_layer_indices": [0], **fields}, "float32").attention_layers[0].num_kv_heads

    assert heads(model_type="llama", num_attention_heads=4) == 4
    assert heads(model_type="bamba", num_attention_heads=4) == 8
    assert heads(model_type="bamba", num_attention_heads=4, num_key_value_heads=None) == 4


def test_position_limit_and_sizes_when_given_then_taken_over() -> None:
    config = {"model_type": "llama", "max_position_embeddings": 77, "vocab_size": 5, "hidden_size": 64}
    geometry = model_geometry(config, "float32")
    assert (geometry.max_position, geometry.vocab_size, geometry.hidden_size) == (77, 5, 64)


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        ({"model_type": "gpt2"}, "float32", "granitemoehybrid"),
        ({}, "float32", "not supported"),
        ({"model_type": "llama"}, "int8", "dtype"),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8}, "float32", "sliding_attention"),
        ({"model_type": "llama", "num_attention_heads": 0}, "float32", "not usable"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "float32", "not usable"),
    ],
)
def test_geometry_when_config_cannot_be_served_then_config_error_says_why(
    config: dict[str, Any], dtype: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model_geometry(config, dtype)
