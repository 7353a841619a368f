"""What a request says of tokens, as the sampler needs it in each step: made once, of 100,000 ids it takes 5 ms.

Made for the first row that is sampled with its parameters, shared by the request's continuations, gone with the
parameters; so however many requests have lists of their own, none is made twice.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from common.request import SamplingParams


class TokenLists:
    """Of one request, on the device of its scores.

    Attributes:
        allowed: [n] int64, ascending: what alone may come. None: everything.
    """

    __slots__ = ("allowed",)

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        allowed = params.allowed_token_ids
        self.allowed = torch.tensor(sorted(allowed), dtype=torch.long, device=device) if allowed is not None else None


class KeptTokenLists:
    """The lists of all parameters that were asked for and are still somebody's. Owned by the engine thread; the
    parameters may go on any."""

    def __init__(self) -> None:
        self._by_id: dict[int, TokenLists] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, params: SamplingParams, device: torch.device) -> TokenLists:
        kept, key = self._by_id, id(params)
        found = kept.get(key)
        if found is None:
            found = kept[key] = TokenLists(params, device)
            weakref.finalize(params, lambda: kept.pop(key, None)).atexit = False
        return found
