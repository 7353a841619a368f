"""Tiny deterministic checkpoints of every supported family, with a tokenizer, on disk.

Made once per content version in a shared temporary folder, so that test modules and the processes they start use the
same files.
"""

from __future__ import annotations

import getpass
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.models.synthetic import build_tokenizer, give_long_memory, missing, save_checkpoint, special_ids

_VERSION = 1
VOCAB_SIZE = 512
MAX_POSITION = 16384

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}

CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "granitemoehybrid": {
            **_MAMBA2,
            "shared_intermediate_size": 128,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "nope",
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 1.0,
            "logits_scaling": 2.0,
        },
        "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3], "mamba_expand": 2},
        "nemotron_h": {
            "layers_block_type": ["mamba", "moe", "attention", "mamba", "mlp", "attention"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
        },
        "qwen3_next": {
            **_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        "qwen3_5": _DELTA,
        "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        "jamba": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
        },
        "llama": {},
        "qwen3": {"head_dim": 16},
    }
)
FAMILIES: tuple[str, ...] = tuple(CONFIGS)
RECURRENT_FAMILIES: tuple[str, ...] = tuple(f for f in FAMILIES if f not in ("llama", "qwen3"))

_MODEL_TYPES = MappingProxyType({"qwen3_5": "qwen3_5_text"})


def make_checkpoint(family: str, folder: Path) -> Path:
    """Write the tiny checkpoint of ``family`` to ``folder`` (not there yet) and return it."""
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "max_position_embeddings": MAX_POSITION,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        **_ATTENTION,
        **special_ids(),
    }
    fields = {**common, **CONFIGS[family]}
    if "layers_block_type" in fields:
        del fields["num_hidden_layers"]
    config = AutoConfig.for_model(_MODEL_TYPES.get(family, family), **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    give_long_memory(model, seed=1 + FAMILIES.index(family))
    return save_checkpoint(model, build_tokenizer(VOCAB_SIZE, MAX_POSITION), folder)


def checkpoint(family: str) -> Path:
    """The shared checkpoint of ``family``, made on first use."""
    folder = Path(tempfile.gettempdir()) / f"tandem-tests-{getpass.getuser()}" / f"v{_VERSION}" / family
    return make_checkpoint(family, folder) if missing(folder) else folder
