"""Models with random weights, made on the spot: a Mamba-2, a gated-delta and a short-conv hybrid in three sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.models.loading.quiet import quiet_transformers

MAX_TOKENS = 2048
FAMILIES = ("granitemoehybrid", "qwen3_5", "lfm2")
SIZES: Mapping[str, Mapping[str, int]] = {
    "S": {"hidden": 256, "layers": 6, "mlp": 512, "heads": 4, "vocab": 4096},
    "M": {"hidden": 768, "layers": 12, "mlp": 1792, "heads": 12, "vocab": 16384},
    "L": {"hidden": 1536, "layers": 24, "mlp": 2560, "heads": 24, "vocab": 32768},
}


def make_config(family: str, size: str) -> Any:
    """One layer in four is attention with heads of 64; recurrent layers are twice as wide as the hidden size, with
    states of 128."""
    hidden, layers, mlp, heads, vocab = (SIZES[size][k] for k in ("hidden", "layers", "mlp", "heads", "vocab"))
    attention = {i for i in range(layers) if i % 4 == 3}
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }

    def kinds(recurrent: str, full: str) -> list[str]:
        return [full if i in attention else recurrent for i in range(layers)]

    if family == "granitemoehybrid":
        fields |= {
            "layer_types": kinds("mamba", "attention"),
            "shared_intermediate_size": mlp,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 2 * hidden // 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "position_embedding_type": "nope",
            "attention_multiplier": 0.125,
        }
    elif family == "qwen3_5":
        fields |= {
            "layer_types": kinds("linear_attention", "full_attention"),
            "head_dim": 64,
            "linear_num_key_heads": hidden // 128,
            "linear_num_value_heads": 2 * hidden // 128,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        }
    else:
        fields |= {"layer_types": kinds("conv", "full_attention"), "block_auto_adjust_ff_dim": False}
    return AutoConfig.for_model("qwen3_5_text" if family == "qwen3_5" else family, **fields)


def make_checkpoint(family: str, size: str, dtype: torch.dtype, folder: Path) -> Path:
    """Write a checkpoint of ``dtype`` to ``folder`` and return it. Nothing of it stays in memory."""
    torch.manual_seed(0)
    with quiet_transformers():
        AutoModelForCausalLM.from_config(make_config(family, size), dtype=dtype).save_pretrained(folder)
    return folder
