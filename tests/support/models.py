"""Tiny deterministic checkpoints of every supported family, with a tokenizer, on disk.

Made once per content version in a shared temporary folder, so that test modules and the processes they start use the
same files.
"""

from __future__ import annotations

import getpass
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from common.demo_model import FOLDER
from common.models.synthetic import build_tokenizer, give_long_memory, missing, save_checkpoint, special_ids

_VERSION = 1
VOCAB_SIZE = 512
MAX_POSITION = 16384
WINDOW = 21
"""Tokens that a sliding-attention layer sees: fewer than the load probe's, and no multiple of a block size."""

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
_LATENTS = {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
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
        "mistral": {"sliding_window": WINDOW},
        "gemma3": {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": False,
        },
        "kimi_linear": {
            **_LATENTS,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        },
        "bailing_hybrid": {
            **_LATENTS,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "n_group": 2,
            "topk_group": 1,
        },
        "lfm3": {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        },
        "granitemoehybrid_moe": {
            **_MAMBA2,
            "shared_intermediate_size": 64,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "position_embedding_type": "rope",
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 1.0,
            "logits_scaling": 2.0,
        },
        "falcon_h1": {
            **_MAMBA2,
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            "head_dim": 16,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "key_multiplier": 0.75,
            "ssm_multipliers": [1.0, 0.75, 1.25, 0.5, 1.5],
        },
        "zamba2": {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
            "num_hidden_layers": 5,
            "num_key_value_heads": 4,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "use_mem_rope": True,
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
            "chunk_size": 32,
        },
        "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 32},
        "qwen3_5_moe": {
            **_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        "olmo_hybrid": {
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "layer_types": _DELTA["layer_types"],
        },
        "lfm2_moe": {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
        "falcon_mamba": {"state_size": 16},
        "mamba": {"state_size": 16},
        "zamba": {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_key_value_heads": 4,
            "n_mamba_heads": 2,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
        },
        "minimax": {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "block_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "linear_attn_beta_factor": 0.75,
        },
    }
)
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
_SIGLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {"image_size": 256, "patch_size": 16}
WRAPPERS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = MappingProxyType(
    {
        "qwen3_5_vl": ("qwen3_5", "qwen3_5", {**_QWEN_VISION, "model_type": "qwen3_5_vision"}),
        "qwen3_5_moe_vl": ("qwen3_5_moe", "qwen3_5_moe", {**_QWEN_VISION, "model_type": "qwen3_5_moe_vision"}),
        "gemma3_vl": ("gemma3", "gemma3", {**_SIGLIP, **_IMAGE, "model_type": "siglip_vision_model"}),
        "lfm2_vl": ("lfm2_vl", "lfm2", {**_SIGLIP, "model_type": "siglip2_vision_model"}),
        "lfm3_vl": (
            "lfm3_vl",
            "lfm3",
            {**_SIGLIP, "model_type": "lfm3_vl_vision", "layer_types": ["full_attention"], "num_key_value_heads": 1},
        ),
    }
)
"""Vision-language checkpoints: model type, the family above whose text model they hold, vision config."""

_WRAPPERS_SEED = 26
"""Of the first; not counted from the number of families, so that a new one changes no weights."""

FAMILIES: tuple[str, ...] = (*CONFIGS, *WRAPPERS)
_DENSE = ("llama", "qwen3", "mistral", "gemma3", "gemma3_vl")
RECURRENT_FAMILIES: tuple[str, ...] = tuple(f for f in FAMILIES if f not in _DENSE)
ATTENTION_FAMILIES: tuple[str, ...] = tuple(f for f in FAMILIES if f not in ("mamba", "mamba2", "falcon_mamba"))
DEMO = "demo"
"""No family of its own: the built-in model, a granitemoehybrid with trained weights."""
SHORT_TIER = (
    "granitemoehybrid",
    "jamba",
    "qwen3_5",
    "lfm2",
    "falcon_h1",
    "zamba2",
    "mamba2",
    "minimax",
    "llama",
    "kimi_linear",
    "gemma3",
    "mistral",
)
"""One family per kind of mixer, then attention beside the mixer, shared attention, no attention at all, a mixer with a
forward of ours, and no state at all; latents, windows beside full attention, windows alone."""

CACHE_SHAPES = ("granitemoehybrid", "lfm2", "mamba2", "llama", "kimi_linear", "gemma3")
"""One for each shape of cache: what is kept, shared and moved does not depend on the rest of a model."""


def tiered(values: Sequence[Any], short: Sequence[Any] = SHORT_TIER) -> list[Any]:
    """Parameters of a test that runs for ``values``, families mostly: those outside of ``short`` only in the whole
    matrix."""
    return [value if value in short else pytest.param(value, marks=pytest.mark.full) for value in values]


_MODEL_TYPES = MappingProxyType(
    {
        "gemma3": "gemma3_text",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
        "granitemoehybrid_moe": "granitemoehybrid",
    }
)


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
    model_type, text_family, vision = WRAPPERS.get(family, (None, family, {}))
    fields = {**common, **CONFIGS[text_family]}
    if family == "nemotron_h":
        del fields["num_hidden_layers"]
    config = AutoConfig.for_model(_MODEL_TYPES.get(text_family, text_family), **fields)
    if model_type is not None:
        whole = {"text_config": config.to_dict(), "vision_config": dict(vision), "tie_word_embeddings": False}
        config = AutoConfig.for_model(model_type, **whole, **special_ids())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class(family).from_config(config, dtype=torch.float32)
    give_long_memory(model, seed=_seed(family))
    return save_checkpoint(model, build_tokenizer(VOCAB_SIZE, MAX_POSITION), folder)


def _seed(family: str) -> int:
    return 1 + [*CONFIGS].index(family) if family in CONFIGS else _WRAPPERS_SEED + [*WRAPPERS].index(family)


def auto_class(family: str) -> Any:
    """The class that stock loads the checkpoint with; a vision-language model is asked as a whole."""
    return AutoModelForImageTextToText if family in WRAPPERS else AutoModelForCausalLM


def checkpoint(family: str) -> Path:
    """The shared checkpoint of ``family``, made on first use; of :data:`DEMO`, the one that is shipped."""
    if family == DEMO:
        return FOLDER
    content = repr((_VERSION, _seed(family), CONFIGS.get(family), WRAPPERS.get(family)))
    name = f"{family}-{hashlib.blake2b(content.encode(), digest_size=4).hexdigest()}"
    folder = Path(tempfile.gettempdir()) / f"tandem-tests-{getpass.getuser()}" / name
    return make_checkpoint(family, folder) if missing(folder) else folder
