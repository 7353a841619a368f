"""What a step of a whole model needs at least: bytes that must cross the memory bus, products that must be made.

Activations, and what recurrent layers compute beside their products, are not counted: both are a few per cent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common.kv_cache.spec import DTYPE_BYTES, ModelGeometry


@dataclass(frozen=True, slots=True)
class Weights:
    """Of a model, split by when they are read.

    Attributes:
        dense_bytes: read by every step: all but experts and the table of embeddings, of which a step reads a row a
            token (where the head shares it, the head reads all of it).
        expert_bytes: of all experts together; of ``num_experts`` a token takes ``num_per_token``.
        dense_parameters: multiplied with every token, the head's left out: a prompt needs it for one row.
    """

    dense_bytes: int
    expert_bytes: int
    num_experts: int
    num_per_token: int
    dense_parameters: int
    expert_parameters: int

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> Weights:
        """As transformers makes the model of this config: a loaded one may have merged some of them."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        config = config.get_text_config()
        counts = (getattr(config, name, 0) or 0 for name in ("num_local_experts", "num_experts", "n_routed_experts"))
        num_experts = max(counts) if _has_experts(model) else 0
        tied = bool(config.tie_word_embeddings)
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        dense_bytes = expert_bytes = dense = expert = 0
        for parameter in {id(p): p for p in model.parameters()}.values():
            num_bytes = parameter.numel() * parameter.element_size()
            if num_experts and parameter.ndim == 3 and parameter.shape[0] == num_experts:
                expert_bytes, expert = expert_bytes + num_bytes, expert + parameter.numel()
                continue
            if tied or parameter is not table:
                dense_bytes += num_bytes
            if parameter is not table and parameter is not head:
                dense += parameter.numel()
        per_token = int(getattr(config, "num_experts_per_tok", 0) or 0)
        return cls(dense_bytes, expert_bytes, num_experts, per_token, dense, expert)

    def read_bytes(self, num_tokens: int) -> float:
        """Of a step of ``num_tokens`` tokens. With random routing each of E experts is missed by one token with
        probability 1 - k / E, by n tokens with (1 - k / E)^n; the others are read once."""
        if not self.num_experts:
            return float(self.dense_bytes)
        missed = (1 - self.num_per_token / self.num_experts) ** num_tokens
        return self.dense_bytes + self.expert_bytes * (1 - missed)

    def flops_per_token(self) -> float:
        """Two for each parameter that a token is multiplied with."""
        share = self.num_per_token / self.num_experts if self.num_experts else 0.0
        return 2.0 * (self.dense_parameters + self.expert_parameters * share)


def _has_experts(model: Any) -> bool:
    return any(p.ndim == 3 and p.shape[-1] > 16 for p in model.parameters())


def state_bytes(geometry: ModelGeometry) -> int:
    """Of one sequence."""
    return sum(tensor.num_bytes for layer in geometry.state_layers for tensor in layer.tensors)


def kv_bytes(geometry: ModelGeometry, context: float) -> float:
    """K and V that one token reads of ``context`` tokens before it, in windows at most so many."""
    return sum(
        layer.num_kv_heads
        * (layer.head_size + layer.head_size_v)
        * DTYPE_BYTES[layer.dtype]
        * (min(context, layer.window) if layer.window else context)
        for layer in geometry.attention_layers
    )


def decode_bytes(weights: Weights, geometry: ModelGeometry, batch: int, context: float) -> float:
    """Weights once; of each sequence its states read and written, and its K and V read."""
    return weights.read_bytes(batch) + batch * (2.0 * state_bytes(geometry) + kv_bytes(geometry, context))


def prefill_flops(weights: Weights, geometry: ModelGeometry, num_heads: int, num_tokens: int) -> float:
    """Products with weights, and attention's two products over a triangle: ``num_heads`` query heads times (key +
    value columns) times n^2 / 2 pairs, two operations each."""
    pairs = num_tokens * num_tokens / 2
    columns = sum(layer.head_size + (layer.head_size_v or layer.head_size) for layer in geometry.attention_layers)
    return weights.flops_per_token() * num_tokens + 2.0 * num_heads * columns * pairs
