"""How a model is called for one step: most take positions and ``past_key_values``, the pure state-space ones
``cache_params`` and no positions."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor


@functools.cache
def _takes_positions(model_class: Any) -> bool:
    # The signature is the class's: the object's own forward may be the one that ``Head`` put there.
    return "position_ids" in inspect.signature(model_class.forward).parameters


def step_arguments(model: Any, cache: Any, positions: Tensor) -> dict[str, Any]:
    """Keyword arguments of a packed step for ``model`` (a causal LM or its base model); ``positions``: [num_tokens], or
    [4, num_tokens] where images are: in the text, in time, height and width.

    A given cache is used whatever ``use_cache`` says; with it minimax would insist on a cache class of its own.
    """
    model_class: Any = type(model)
    if _takes_positions(model_class):
        return {"position_ids": positions.unsqueeze(-2), "past_key_values": cache, "use_cache": False}
    return {"cache_params": cache, "use_cache": False}


def stock_cache(output: Any) -> Any:
    """The cache in a model's output, under either of its names."""
    cache = getattr(output, "past_key_values", None)
    return getattr(output, "cache_params", None) if cache is None else cache
