"""The demo model's shape, and a forward pass made for training it on few CPU cores.

:func:`training_loss` computes what the stock transformers module computes (a test compares them), from the stock
module's own parameters, with less memory moved: B and C are not repeated per head, the convolution is four shifted
products, and the sums over a chunk are matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GraniteMoeHybridConfig

TRAINING_CHUNK = 64
"""Tokens per chunk of the training scan; a sequence's length must be a multiple."""


def build_config(vocab_size: int, special_ids: dict[str, int]) -> GraniteMoeHybridConfig:
    """A Mamba-2 layer, an attention layer without positions, a Mamba-2 layer.

    There is one attention layer on purpose: it can look up one thing per token. Which thing a question asks for has
    to come to it in the Mamba state, so an answer needs both, the blocks and the state.
    """
    return GraniteMoeHybridConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        shared_intermediate_size=512,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_n_groups=1,
        mamba_chunk_size=64,
        max_position_embeddings=32768,
        position_embedding_type="nope",
        embedding_multiplier=8.0,
        attention_multiplier=0.125,
        residual_multiplier=1.0,
        logits_scaling=1.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        **special_ids,
    )


def training_loss(model: Any, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy in nats of ``tokens`` [B, T + 1]; ``weights`` [B, T], on targets.

    Returns the weighted mean to train on, and the plain means over text (weight 1) and answers (weight above 1), 0
    where there are none.
    """
    logits = training_logits(model, tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    weights = weights.flatten()
    means = [loss.detach()[chosen].sum() / chosen.sum().clamp(min=1) for chosen in (weights == 1, weights > 1)]
    return (loss * weights).sum() / weights.sum(), means[0], means[1]


def training_logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits [B, T, vocab] of ``tokens`` [B, T]; T must be a multiple of :data:`TRAINING_CHUNK`."""
    config = model.config
    hidden = model.model.embed_tokens(tokens) * config.embedding_multiplier
    for layer in model.model.layers:
        normed = _rms_norm(hidden, layer.input_layernorm.weight, config.rms_norm_eps)
        mixed = _attention(layer.self_attn, normed) if layer.mamba is None else _mamba(layer.mamba, normed)
        hidden = hidden + mixed * config.residual_multiplier
        normed = _rms_norm(hidden, layer.post_attention_layernorm.weight, config.rms_norm_eps)
        gate, up = F.linear(normed, layer.shared_mlp.input_linear.weight).chunk(2, dim=-1)
        hidden = hidden + F.linear(F.silu(gate) * up, layer.shared_mlp.output_linear.weight) * (
            config.residual_multiplier
        )
    hidden = _rms_norm(hidden, model.model.norm.weight, config.rms_norm_eps)
    return F.linear(hidden, model.lm_head.weight) / config.logits_scaling


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _attention(module: Any, x: Tensor) -> Tensor:
    def heads(projection: Any) -> Tensor:
        return F.linear(x, projection.weight).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)

    q, k, v = heads(module.q_proj), heads(module.k_proj), heads(module.v_proj)
    k, v = (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=module.scaling)
    return F.linear(out.transpose(1, 2).flatten(2), module.o_proj.weight)


def _mamba(module: Any, x: Tensor) -> Tensor:
    n, p, heads = module.ssm_state_size, module.head_dim, module.num_heads
    gate, conv, dt = F.linear(x, module.in_proj.weight).split([module.intermediate_size, module.conv_dim, heads], -1)
    # The causal depthwise convolution as a sum of shifted copies: fuses with its neighbours when compiled.
    taps = module.conv1d.weight[:, 0]
    padded = F.pad(conv, (0, 0, taps.shape[1] - 1, 0))
    conv = sum(padded[:, i : i + x.shape[1]] * taps[:, i] for i in range(taps.shape[1])) + module.conv1d.bias
    inputs, B, C = F.silu(conv).split([heads * p, n, n], -1)
    dt = F.softplus(dt.float() + module.dt_bias)
    out = _scan(inputs.unflatten(-1, (heads, p)), dt, -torch.exp(module.A_log), B, C, module.D).flatten(2)
    out = out * F.silu(gate)
    return F.linear(_rms_norm(out, module.norm.weight, module.norm.variance_epsilon), module.out_proj.weight)


def _scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """The chunked scan of Mamba-2 with one group. x [b, T, h, p], dt [b, T, h], B and C [b, T, n]."""
    batch, length, heads, p = x.shape
    chunks, size = length // TRAINING_CHUNK, TRAINING_CHUNK
    residual = x * D[:, None]
    x = (x * dt[..., None]).view(batch, chunks, size, heads, p)
    B, C = B.view(batch, chunks, size, -1), C.view(batch, chunks, size, -1)
    log_decay = (dt * A).view(batch, chunks, size, heads).cumsum(2)  # [b, c, l, h], from the chunk's start
    total = log_decay[:, :, -1]  # [b, c, h]

    # Inside a chunk.
    by_head = log_decay.transpose(2, 3)  # [b, c, h, l]
    causal = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    decay = torch.where(causal, by_head[..., :, None] - by_head[..., None, :], -torch.inf).exp()
    mixing = (C @ B.transpose(2, 3))[:, :, None] * decay  # [b, c, h, l, s]
    inside = (mixing @ x.transpose(2, 3)).transpose(2, 3)  # [b, c, l, h, p]

    # Between chunks: what each chunk adds, then the state at each chunk's start.
    added = B.transpose(2, 3) @ (x * (total[:, :, None] - log_decay).exp()[..., None]).flatten(3)  # [b, c, n, h p]
    added = added.unflatten(-1, (heads, p))
    state, states = torch.zeros_like(added[:, 0]), []
    for index in range(chunks):
        states.append(state)
        state = state * total[:, index].exp()[:, None, :, None] + added[:, index]
    before = (C @ torch.stack(states, 1).flatten(3)).unflatten(-1, (heads, p)) * log_decay.exp()[..., None]
    return (inside + before).reshape(batch, length, heads, p) + residual
