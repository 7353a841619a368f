"""The head with which some checkpoints predict the tokens after the next one (multi-token prediction; their weights
``mtp.*``, which transformers leaves out).

A row of it joins a token's embedding with the model's hidden row *before* that token, runs one more attention layer and
gives a hidden row of its own, from which the model's output head draws the token after. So what it keeps at a position
depends on the tokens up to there alone, as K/V of every layer does: its layer is one more of the model's attention
group, and the hidden row before a position is its state there.

``keep``, in every forward of the model: K/V of the forward's rows. ``draft``, between forwards: one row of each
sequence, after which the next one is made of the row that came out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from common.models.adapter.engine_cache import EngineCache
from common.models.adapter.forward_context import get_forward_context


class _Kept(Exception):  # noqa: N818  # no error: the rest of a layer is not wanted
    """The K/V of the rows are in their blocks."""


class _KeepingCache(EngineCache):
    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        super().update(*args, **kwargs)
        raise _Kept


class MtpHead(nn.Module, ABC):
    """``base``: the text model, whose embedding and rotary positions are the head's too. ``config``: its config, with
    the head's layers behind the model's; the first of them, ``layer_idx``, is the only one with attention."""

    layers: nn.ModuleList

    def __init__(self, base: Any, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        # In a tuple: they are the model's modules, and not this one's to pack or to load.
        self._shared = (base.get_input_embeddings(), getattr(base, "rotary_emb", None))
        self._cache, self._keeping = EngineCache(), _KeepingCache()
        self._previous: Tensor | None = None

    def keep(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, embeddings: Tensor | None) -> None:
        """In a forward context: of all its rows, whose last hidden rows are ``hidden`` [num_tokens, hidden]. The others
        as in ``draft``; ``embeddings`` [num_tokens, hidden]: instead of the tokens' own."""
        context = get_forward_context()
        assert context is not None
        context.layer_idx = self.layer_idx
        if self._previous is None:
            # A causal convolution that takes of two rows the one before.
            self._previous = torch.tensor([1, 0], dtype=hidden.dtype, device=hidden.device).repeat(hidden.shape[1], 1)
        before = context.ops.conv1d(hidden, self._previous, None, context.metadata, context.state_pool("conv"))
        rows = self._join(self._shared[0](token_ids) if embeddings is None else embeddings, before)
        with suppress(_Kept):
            self._layer(self.layers[0], rows[None], self._positions(rows, positions), self._keeping)

    def draft(self, hidden: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
        """In a forward context, of decode rows alone: ``hidden`` [num_tokens, hidden] before ``token_ids`` [num_tokens]
        at ``positions`` [num_tokens] or [4, num_tokens] -> [num_tokens, hidden], from which the next tokens come."""
        rows = self._join(self._shared[0](token_ids), hidden)[None]
        at = self._positions(rows[0], positions)
        for layer in self.layers:
            rows = self._layer(layer, rows, at, self._cache)
        return self._end(rows[0]).to(hidden.dtype)

    def _positions(self, rows: Tensor, positions: Tensor) -> dict[str, Any]:
        rotary = self._shared[1]
        if rotary is None:
            return {}
        at = positions.unsqueeze(-2)  # [1, num_tokens] or [4, 1, num_tokens]: in the text, and on the three axes
        return {"position_embeddings": rotary(rows[None], at if at.ndim == 2 else at[1:])}

    @staticmethod
    def _layer(layer: nn.Module, rows: Tensor, at: dict[str, Any], cache: EngineCache) -> Tensor:
        out: Tensor = layer(rows, past_key_values=cache, use_cache=False, **at)
        return out

    @abstractmethod
    def _join(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden] each."""

    @abstractmethod
    def _end(self, rows: Tensor) -> Tensor:
        """The norm after the last layer."""


class QwenMtp(MtpHead):
    """qwen3_next, qwen3_5, qwen3_5_moe: a full-attention layer of the model's own kind."""

    def __init__(self, base: Any, config: Any, layer_idx: int) -> None:
        super().__init__(base, config, layer_idx)
        hidden, norm = config.hidden_size, type(base.norm)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = norm(hidden, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([type(base.layers[0])(config, layer_idx)])
        self.norm = norm(hidden, eps=config.rms_norm_eps)

    def _join(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        joined = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1)
        rows: Tensor = self.fc(joined)
        return rows

    def _end(self, rows: Tensor) -> Tensor:
        out: Tensor = self.norm(rows)
        return out


class NemotronMtp(MtpHead):
    """nemotron_h: the blocks of ``mtp_layers_block_type``; norms and projection are in the first and the last one."""

    def __init__(self, base: Any, config: Any, layer_idx: int) -> None:
        super().__init__(base, config, layer_idx)
        hidden, norm, epsilon = config.hidden_size, type(base.norm_f), config.layer_norm_epsilon
        block = type(base.layers[0])
        count = len(config.layers_block_type) - layer_idx
        self.layers = nn.ModuleList(block(config, layer_idx + index) for index in range(count))
        first, last = self.layers[0], self.layers[-1]
        first.enorm, first.hnorm = norm(hidden, eps=epsilon), norm(hidden, eps=epsilon)
        first.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        last.final_layernorm = norm(hidden, eps=epsilon)

    def _join(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        first: Any = self.layers[0]
        rows: Tensor = first.eh_proj(torch.cat([first.enorm(embeddings), first.hnorm(hidden)], dim=-1))
        return rows

    def _end(self, rows: Tensor) -> Tensor:
        last: Any = self.layers[-1]
        out: Tensor = last.final_layernorm(rows)
        return out


def head_layers(config: Any) -> Sequence[str]:
    """Kinds of the head's layers, of a text config."""
    return ["full_attention"] if config.model_type.startswith("qwen") else list(config.mtp_layers_block_type)


def create_head(base: Any, config: Any) -> MtpHead:
    """Without weights. ``config``: the text model's own, a copy of which gets the head's layers."""
    kind: type[MtpHead] = QwenMtp if config.model_type.startswith("qwen") else NemotronMtp
    name = "layer_types" if kind is QwenMtp else "layers_block_type"
    layer_idx = len(getattr(config, name))
    setattr(config, name, [*getattr(config, name), *head_layers(config)])
    return kind(base, config, layer_idx)
