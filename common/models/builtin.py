"""A small hybrid model that needs no download: for the quick start, smoke tests and demos. Its answers are noise, its
cache behaviour is real: Mamba-2 and attention layers, a tokenizer, a chat template.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

from common.models.fingerprint import user_cache_dir
from common.models.synthetic import build_tokenizer, give_long_memory, missing, save_checkpoint, special_ids

_VERSION = 1
_SEED = 20
_VOCAB_SIZE = 2048
_MAX_POSITION = 32768


def ensure_builtin_checkpoint(cache_dir: Path | None = None) -> Path:
    """The folder of the built-in checkpoint (about 3 million parameters), made on first use.

    It lies under ``cache_dir`` (the user's cache folder by default) and is written in one move, so that processes
    that start together do not meet half a file.
    """
    folder = (user_cache_dir() if cache_dir is None else cache_dir) / "models" / f"tandem-tiny-hybrid-v{_VERSION}"
    if missing(folder):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model = AutoModelForCausalLM.from_config(_config(), dtype=torch.float32)
        give_long_memory(model, _SEED)
        save_checkpoint(model, build_tokenizer(_VOCAB_SIZE, _MAX_POSITION), folder)
    return folder


def _config() -> GraniteMoeHybridConfig:
    return GraniteMoeHybridConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=256,
        shared_intermediate_size=256,
        num_hidden_layers=6,
        layer_types=["mamba", "mamba", "attention", "mamba", "mamba", "attention"],
        num_attention_heads=6,
        num_key_value_heads=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=12,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_chunk_size=64,
        max_position_embeddings=_MAX_POSITION,
        position_embedding_type="nope",
        embedding_multiplier=1.0,
        attention_multiplier=0.17,
        residual_multiplier=1.0,
        logits_scaling=1.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        **special_ids(),
    )
