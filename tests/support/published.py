"""Sizes of published checkpoints: what their configs say is kept between tokens, with a few layers of each kind.

At least one for each function that reads configs (``common.geometry``). *defaults*: those of transformers' config
class, for families whose checkpoints we have not seen.
"""

from __future__ import annotations

from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "bailing-hybrid (defaults)": {
        "model_type": "bailing_hybrid", "hidden_size": 2560, "num_attention_heads": 32, "head_dim": 128,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "short_conv_kernel_size": 4, "num_hidden_layers": 2,
        "layer_group_size": 2,
    },
    "bamba-9b": {
        "model_type": "bamba", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
        "mamba_expand": 2, "num_hidden_layers": 2, "attn_layer_indices": [1],
    },
    "falcon-h1-0.5b": {
        "model_type": "falcon_h1", "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_n_groups": 1,
        "mamba_d_state": 128, "mamba_d_conv": 4, "num_hidden_layers": 1,
    },
    "falcon-h1-1.5b": {
        "model_type": "falcon_h1", "hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1,
        "mamba_d_state": 256, "mamba_d_conv": 4, "num_hidden_layers": 1,
    },
    "falcon-mamba-7b": {
        "model_type": "falcon_mamba", "hidden_size": 4096, "intermediate_size": 8192, "state_size": 16,
        "conv_kernel": 4, "expand": 16, "num_hidden_layers": 1,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 2, "num_hidden_layers": 2,
    },
    "gemma-3-4b": {
        "model_type": "gemma3", "text_config": {
            "hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "sliding_window": 1024, "sliding_window_pattern": 2, "num_hidden_layers": 2,
        },
    },
    "granite-4.0-h-tiny": {
        "model_type": "granitemoehybrid", "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4,
        "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
        "mamba_expand": 2, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
    },
    "jamba-mini-1.6": {
        "model_type": "jamba", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "num_hidden_layers": 2, "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear", "hidden_size": 2304, "num_attention_heads": 32, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "num_hidden_layers": 2, "linear_attn_config": {
            "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4, "full_attn_layers": [2], "kda_layers": [1],
        },
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "conv_L_cache": 3, "num_hidden_layers": 2, "full_attn_idxs": [1],
    },
    "lfm3 (defaults)": {
        "model_type": "lfm3", "hidden_size": 2048, "num_key_value_heads": 4, "head_dim": 128, "conv_L_cache": 7,
        "sliding_window": 256, "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "sliding_attention"],
    },
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 1,
    },
    "mamba-130m": {
        "model_type": "mamba", "hidden_size": 768, "intermediate_size": 1536, "state_size": 16, "conv_kernel": 4,
        "num_hidden_layers": 1,
    },
    "mamba2-2.7b": {
        "model_type": "mamba2", "hidden_size": 2560, "num_heads": 80, "head_dim": 64, "n_groups": 1,
        "state_size": 128, "conv_kernel": 4, "num_hidden_layers": 1,
    },
    "mamba-codestral-7b": {
        "model_type": "mamba2", "hidden_size": 4096, "num_heads": 128, "head_dim": 64, "n_groups": 8,
        "state_size": 128, "conv_kernel": 4, "num_hidden_layers": 1,
    },
    "minimax-text-01": {
        "model_type": "minimax", "hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 2,
    },
    "mistral-7b": {
        "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "sliding_window": 4096, "num_hidden_layers": 1,
    },
    "nemotron-nano-9b-v2": {
        "model_type": "nemotron_h", "hidden_size": 4480, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8, "ssm_state_size": 128,
        "conv_kernel": 4, "num_hidden_layers": 3, "hybrid_override_pattern": "M-*",
    },
    "olmo-hybrid (defaults)": {
        "model_type": "olmo_hybrid", "hidden_size": 3840, "num_attention_heads": 30, "num_key_value_heads": 30,
        "linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_key_head_dim": 96,
        "linear_value_head_dim": 192, "linear_conv_kernel_dim": 4, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 1,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_hidden_layers": 2,
        "full_attention_interval": 2,
    },
    "qwen3.5 (defaults)": {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_hidden_layers": 2,
        "full_attention_interval": 2,
    },
    "zamba-7b-v1": {
        "model_type": "zamba", "hidden_size": 3712, "num_attention_heads": 16, "num_key_value_heads": 16,
        "n_mamba_heads": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "hybrid"],
    },
    "zamba2-1.2b": {
        "model_type": "zamba2", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 32,
        "n_mamba_heads": 64, "mamba_headdim": 64, "mamba_ngroups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
        "mamba_expand": 2, "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"],
    },
    "zamba2-7b": {
        "model_type": "zamba2", "hidden_size": 3584, "num_attention_heads": 32, "num_key_value_heads": 32,
        "attention_head_dim": 224, "n_mamba_heads": 112, "mamba_headdim": 64, "mamba_ngroups": 2,
        "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "hybrid"],
    },
}  # fmt: skip

CANNOT_DIVIDE: dict[str, dict[int, str]] = {
    "olmo-hybrid (defaults)": dict.fromkeys((4, 8), "attention of layer 1: 30 heads of 'kv_heads'"),
    "zamba-7b-v1": dict.fromkeys((4, 8), "conv state of layer 0 (mamba1): 2 heads of 'x'"),
}
"""Model -> tensor-parallel sizes of 2, 4, 8 that cannot be, and what cannot be dealt out."""
