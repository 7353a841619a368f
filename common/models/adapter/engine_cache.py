"""What transformers' model code gets as its cache: an object that holds nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.models.adapter import mla
from common.models.adapter.forward_context import get_forward_context


class EngineCache:
    """Stands in for transformers' cache. It notes in the forward context which layer calls, and writes K/V to their
    blocks. To mixers it has no state to give."""

    is_compileable = False

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """key, value: [1, num_kv_heads, num_tokens, head_size]; with MLA a latent and the shared part of its key.

        Given back as they are (latents: cut short): attention reads the blocks itself."""
        context = get_forward_context()
        assert context is not None, "the engine's cache was used outside a forward context"
        context.layer_idx = layer_idx
        pool = context.attention_pool()
        if pool.is_latent:
            return mla.store(context, key, value)
        metadata = context.attention_metadata()
        context.ops.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), pool.key, pool.value, metadata)
        return key, value

    def update_conv_state(self, x: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        context = get_forward_context()
        assert context is not None, "the engine's cache was used outside a forward context"
        context.layer_idx, context.num_scanned = layer_idx, 0
        return x

    def update_recurrent_state(self, state: Tensor | None, *args: Any, **kwargs: Any) -> Tensor | None:
        return state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, *args: Any) -> int:
        return 0
