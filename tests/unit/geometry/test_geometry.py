"""Raw configs of every supported family, current and legacy field names, to what their layers keep."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import ConfigError
from common.geometry.geometry import model_geometry
from common.geometry.refused import REFUSED_FAMILIES
from common.kv_cache.spec import GroupKind, ModelGeometry, StateLayerSpec

ATTENTION = {GroupKind.FULL_ATTENTION: "A", GroupKind.SLIDING_WINDOW: "W", GroupKind.MLA: "L"}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
GDN = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 8,
    "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip


def kinds(geometry: ModelGeometry) -> str:
    """One letter a layer: A attention, W a sliding window, L latents; the mixer's first letter, in capitals with
    attention too; '.' neither."""
    letters = ["."] * geometry.num_layers
    for layer in geometry.attention_layers:
        letters[layer.layer_idx] = ATTENTION[layer.kind]
    for state in geometry.state_layers:
        has_both = letters[state.layer_idx] == "A"
        letters[state.layer_idx] = state.mixer[0].upper() if has_both else state.mixer[0]
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
        ({"model_type": "qwen3_5_moe", "text_config": GDN, "vision_config": {"depth": 2}}, "gggA"),
        ({"model_type": "qwen3_5_moe_text", **GDN, "layer_types": ["linear_attention", "full_attention"]}, "gA"),
        ({"model_type": "lfm2_moe", "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}, "sAs"),
        ({"model_type": "lfm2_vl", "text_config": {"num_hidden_layers": 2, "full_attn_idxs": [1]}}, "sA"),
        ({"model_type": "olmo_hybrid", "num_hidden_layers": 5}, "gggAg"),
        ({"model_type": "olmo_hybrid", "num_hidden_layers": 2}, "gA"),
        ({"model_type": "falcon_h1", "num_hidden_layers": 2}, "MM"),
        ({"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid", "mamba"]}, "mMm"),
        ({"model_type": "zamba2", "layer_types": ["linear_attention", "hybrid"]}, "mM"),
        ({"model_type": "zamba2"}, "m" + "mmmmmM" * 7 + "mmmmM" + "mmmM" + "mm"),
        ({"model_type": "zamba", "layers_block_type": ["mamba", "hybrid", "mamba"]}, "mMm"),
        ({"model_type": "zamba", "num_hidden_layers": 9}, "mmMmmmmMm"),
        ({"model_type": "mamba2", "num_hidden_layers": 2}, "mm"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "mm"),
        ({"model_type": "falcon_mamba", "num_hidden_layers": 2}, "mm"),
        ({"model_type": "minimax", "num_hidden_layers": 3}, "AlA"),
        ({"model_type": "minimax", "layer_types": ["linear_attention", "attention"]}, "lA"),
        ({"model_type": "llama", "num_hidden_layers": 2}, "AA"),
        ({"model_type": "qwen3", "num_hidden_layers": 2}, "AA"),
        ({"model_type": "qwen3", "num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 2}, "AAW"),
        ({"model_type": "mistral", "num_hidden_layers": 2}, "WW"),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}, "AA"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 7}, "WWWWWAW"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 2}, "WAW"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "AA"),
        ({"model_type": "lfm3", "num_hidden_layers": 7}, "ssAsWsA"),
        ({"model_type": "kimi_linear", "num_hidden_layers": 5}, "kkkkL"),
        (
            {
                "model_type": "kimi_linear",
                "num_hidden_layers": 3,
                "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2]},
            },
            "kLk",
        ),
        ({"model_type": "bailing_hybrid", "num_hidden_layers": 4, "layer_group_size": 2}, "kLkL"),
    ],
)
def test_layers_when_config_is_of_a_supported_family_then_each_is_recognised(
    config: dict[str, Any], expected: str
) -> None:
    geometry = model_geometry(config, "bfloat16")
    assert kinds(geometry) == expected
    documented = re.findall(r"[a-z0-9_]+", (StateLayerSpec.__doc__ or "").partition("``mixer`` is")[2])
    assert {layer.mixer for layer in geometry.state_layers} <= set(documented)


def test_shapes_when_mixer_is_mamba2_then_conv_in_model_dtype_and_recurrent_in_float32() -> None:
    config = {"model_type": "granitemoehybrid", **MAMBA2, "layer_types": ["mamba", "attention", "mamba"]}
    geometry = model_geometry(config, "bfloat16")
    assert shapes(geometry) == {"conv": ((64 + 32, 3), "bfloat16"), "recurrent": ((8, 8, 16), "float32")}
    attention = geometry.attention_layers[0]
    assert (attention.num_kv_heads, attention.head_size, attention.head_size_v, attention.dtype) == (
        4,
        8,
        8,
        "bfloat16",
    )


def test_shapes_when_mixer_is_gated_delta_then_value_heads_by_key_and_value_dims() -> None:
    geometry = model_geometry({"model_type": "qwen3_next", **GDN}, "float32")
    assert shapes(geometry) == {"conv": ((2 * 16 + 16, 3), "float32"), "recurrent": ((4, 8, 4), "float32")}
    assert geometry.attention_layers[0].num_kv_heads == 2


def test_shapes_when_mixer_is_mamba1_or_short_conv_then_their_own() -> None:
    jamba = model_geometry({"model_type": "jamba", "hidden_size": 32, "mamba_d_state": 8}, "float16")
    assert shapes(jamba) == {"conv": ((64, 3), "float16"), "recurrent": ((64, 8), "float32")}
    lfm2 = model_geometry({"model_type": "lfm2", "hidden_size": 64, "full_attn_idxs": [1]}, "float32")
    assert shapes(lfm2) == {"conv": ((64, 2), "float32")}


def test_shapes_when_mixer_is_kimi_delta_then_one_convolution_and_a_square_state_a_head() -> None:
    linear = {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 3}
    fields = {"linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 3}
    expected = {"conv": ((48, 2), "bfloat16"), "recurrent": ((2, 8, 8), "float32")}
    for config in ({"linear_attn_config": linear}, fields):
        assert shapes(model_geometry({"model_type": "kimi_linear", **config}, "bfloat16")) == expected
    bailing = {"model_type": "bailing_hybrid", "num_attention_heads": 2, "head_dim": 8, "short_conv_kernel_size": 3}
    assert shapes(model_geometry(bailing, "bfloat16")) == expected


def test_groups_when_attention_is_latent_then_one_row_a_token_for_all_heads() -> None:
    config = {"model_type": "kimi_linear", "kv_lora_rank": 24, "qk_rope_head_dim": 8, "model_max_length": 77}
    geometry = model_geometry(config, "bfloat16")
    (group,) = geometry.attention_groups
    assert (group.kind, group.window, len(group.layers)) == (GroupKind.MLA, 0, 6)
    layer = group.layers[0]
    assert (layer.num_kv_heads, layer.head_size, layer.head_size_v, layer.dtype) == (1, 32, 0, "bfloat16")
    assert geometry.max_position == 77


def test_groups_when_some_layers_slide_then_one_each_with_the_configured_window() -> None:
    geometry = model_geometry({"model_type": "gemma3_text", "sliding_window": 100, "head_dim": 32}, "float32")
    assert [(group.kind, group.window) for group in geometry.attention_groups] == [
        (GroupKind.FULL_ATTENTION, 0),
        (GroupKind.SLIDING_WINDOW, 100),
    ]
    assert {layer.head_size for layer in geometry.attention_layers} == {32}


def test_shapes_when_the_mixer_has_a_width_of_its_own_then_that_one() -> None:
    falcon_h1 = {"model_type": "falcon_h1", "mamba_n_heads": 4, "mamba_d_state": 8}
    assert shapes(model_geometry({**falcon_h1, "mamba_d_ssm": 64}, "float32")) == {
        "conv": ((64 + 16, 3), "float32"), "recurrent": ((4, 16, 8), "float32"),
    }  # fmt: skip
    explicit_null = {**falcon_h1, "mamba_d_ssm": None, "hidden_size": 128, "num_attention_heads": 4}
    assert shapes(model_geometry(explicit_null, "float32"))["recurrent"] == ((4, 64, 8), "float32")
    # falcon-mamba-7b says expand 16 and intermediate_size 8192 at a hidden size of 4096: the latter is what it is
    mamba = {"model_type": "falcon_mamba", "hidden_size": 64, "expand": 16, "intermediate_size": 128}
    assert shapes(model_geometry(mamba, "bfloat16")) == {
        "conv": ((128, 3), "bfloat16"), "recurrent": ((128, 16), "float32"),
    }  # fmt: skip


def test_shapes_when_attention_is_shared_then_it_sees_twice_the_hidden_size() -> None:
    zamba2 = model_geometry(
        {"model_type": "zamba2", "hidden_size": 64, "num_attention_heads": 4, "layers_block_type": ["mamba", "hybrid"]},
        "float32",
    )
    assert [(layer.layer_idx, layer.num_kv_heads, layer.head_size) for layer in zamba2.attention_layers] == [(1, 4, 32)]
    assert shapes(zamba2)["recurrent"] == ((8, 16, 64), "float32")
    assert model_geometry({"model_type": "zamba2", "use_long_context": True}, "float32").max_position == 16384
    zamba = model_geometry({"model_type": "zamba", "hidden_size": 64, "layers_block_type": ["hybrid"]}, "float32")
    assert (zamba.attention_layers[0].num_kv_heads, zamba.attention_layers[0].head_size) == (16, 8)
    assert shapes(zamba)["recurrent"] == ((2, 64, 16), "float32")


def test_shapes_when_fields_are_missing_then_olmo_hybrid_derives_them_from_its_heads() -> None:
    geometry = model_geometry({"model_type": "olmo_hybrid", "hidden_size": 64, "num_attention_heads": 4}, "float32")
    assert shapes(geometry) == {"conv": ((2 * 48 + 96, 3), "float32"), "recurrent": ((4, 12, 24), "float32")}
    assert geometry.attention_layers[0].num_kv_heads == 4


def test_shapes_when_attention_is_lightning_then_one_square_state_and_no_convolution() -> None:
    geometry = model_geometry({"model_type": "minimax", "hidden_size": 64, "num_attention_heads": 4}, "bfloat16")
    assert shapes(geometry) == {"recurrent": ((4, 16, 16), "float32")}


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba"])
def test_position_limit_when_there_is_no_attention_then_none_and_no_blocks(model_type: str) -> None:
    geometry = model_geometry({"model_type": model_type}, "float32")
    assert (geometry.max_position, geometry.attention_layers, geometry.attention_groups) == (0, (), ())


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


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "qwen3", "max_position_embeddings": 40960, "rope_scaling": YARN}, 131072),
        ({"model_type": "qwen3", "max_position_embeddings": 262144, "rope_parameters": YARN}, 262144),
        ({"model_type": "qwen3_5", "text_config": {"rope_parameters": {"full_attention": YARN}}}, 131072),
        (
            {"model_type": "qwen3", "max_position_embeddings": 40960, "rope_scaling": {"type": "yarn", "factor": 4}},
            40960,
        ),
        ({"model_type": "llama", "max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
        ({"model_type": "llama", "max_position_embeddings": 4096, "rope_scaling": LLAMA3}, 4096),
    ],
)
def test_position_limit_when_yarn_extends_the_trained_one_then_the_extended_one(
    fields: dict[str, Any], expected: int
) -> None:
    assert model_geometry(fields, "float32").max_position == expected


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        ({"model_type": "gpt2"}, "float32", "granitemoehybrid"),
        ({"model_type": "minimax", "sliding_window": 8}, "float32", "sliding_attention"),
        ({"model_type": "lfm2_moe"}, "float32", "not usable"),
        ({}, "float32", "not supported"),
        ({"model_type": "llama"}, "int8", "dtype"),
        ({"model_type": "granitemoehybrid", "layer_types": ["sliding_attention"]}, "float32", "sliding_attention"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "float32", "bidirectional"),
        ({"model_type": "llama", "num_attention_heads": 0}, "float32", "not usable"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "float32", "not usable"),
    ],
)
def test_geometry_when_config_cannot_be_served_then_config_error_says_why(
    config: dict[str, Any], dtype: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model_geometry(config, dtype)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@pytest.mark.parametrize(
    ("nest", "field"),
    [
        (lambda kind: {"rope_parameters": {"rope_type": kind}}, "rope_parameters.rope_type"),
        (lambda kind: {"rope_scaling": {"type": kind, "factor": 2.0}}, "rope_scaling.type"),
        (
            lambda kind: {"rope_parameters": {"sliding_attention": None, "full_attention": {"rope_type": kind}}},
            "rope_parameters.full_attention.rope_type",
        ),
    ],
)
def test_geometry_when_rotary_frequencies_depend_on_the_step_then_config_error_names_the_field(
    rope_type: str, nest: Callable[[str], dict[str, Any]], field: str
) -> None:
    for config in (
        {"model_type": "llama", **nest(rope_type)},
        {"model_type": "gemma3", "text_config": nest(rope_type)},
    ):
        with pytest.raises(ConfigError) as caught:
            model_geometry(config, "float32")
        assert f"{field} is {rope_type!r}, must be one of default, linear, llama3, yarn, " in caught.value.message


@pytest.mark.parametrize("rope_type", [None, "default", "linear", "llama3", "yarn", "proportional", "axial"])
def test_geometry_when_rotary_frequencies_are_fixed_then_is_read(rope_type: str | None) -> None:
    for name in ("rope_parameters", "rope_scaling"):
        config = {"model_type": "llama", "max_position_embeddings": 77, name: {"rope_type": rope_type, "type": "mrope"}}
        assert model_geometry(config, "float32").max_position == 77


@pytest.mark.parametrize(("model_type", "reason"), REFUSED_FAMILIES.items())
def test_geometry_when_the_family_is_known_and_refused_then_says_its_own_reason(model_type: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_geometry({"model_type": model_type}, "float32")
    assert f"model_type {model_type!r} is not supported: {reason}; supported: " in caught.value.message
    assert caught.value.param == "--model"
