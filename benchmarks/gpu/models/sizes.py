"""Published sizes: fields of each model's ``config.json``. The models are made in ``random_weights.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_TOKENS = 16_384
_NEMOTRON = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
_KINDS = {"M": "mamba", "-": "mlp", "*": "attention"}
_GRANITE_FACTORS = {
    "position_embedding_type": "nope",
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "nemotron-nano-9b-v2": {
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": 4480,
        "intermediate_size": 15680,
        "layers_block_type": [_KINDS[each] for each in _NEMOTRON],
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 80,
        "ssm_state_size": 128,
        "n_groups": 8,
        "chunk_size": 128,
    },
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": True,
    },
    "granite-4-h-tiny": {
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "tie_word_embeddings": True,
        **_GRANITE_FACTORS,
    },
    "tiny": {
        "model_type": "granitemoehybrid",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 32,
        "shared_intermediate_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "tie_word_embeddings": True,
        **_GRANITE_FACTORS,
    },
}
"""Fields of each ``config.json``; 8.9, 4.2 and 6.9 thousand million parameters. The last one is for trying things."""
SMOKE_MODEL = "tiny"
