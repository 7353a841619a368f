"""What a request says of tokens, as the sampler needs it in each step: made once, of 100,000 ids it takes 5 ms.

Made for the first row that is sampled with its parameters, shared by the request's continuations, gone with the
parameters; so however many requests have lists of their own, none is made twice, and a step takes what it changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from common.request import SamplingParams


class TokenLists:
    """Of one request, on the device of its scores; ids are int64.

    Attributes:
        eos_token_ids: of the request.
        allowed: [n] what alone may come. None: everything.
        bias: [n] ids, and what is added to their scores, float32. None: nothing.
        stops: [n] what must not come before ``min_tokens`` are out. None: nothing, or nothing else is allowed.
    """

    __slots__ = ("_completing", "_device", "_left", "_lengths", "_words", "allowed", "bias", "eos_token_ids", "stops")

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._device = device
        self.eos_token_ids = eos_token_ids
        allowed = params.allowed_token_ids
        self.allowed = self._ids(sorted(allowed)) if allowed is not None else None
        self.bias: tuple[Tensor, Tensor] | None = None
        if params.logit_bias:
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
            self.bias = self._ids(params.logit_bias), values
        stops = eos_token_ids | params.stop_token_ids if params.min_tokens else frozenset()
        if allowed is not None and allowed <= stops:
            stops = frozenset()
        self.stops = self._ids(stops) if stops else None
        # Of the bad words: those of one token; what the others begin with, and what would complete them then; how long
        # these beginnings are, by their last token.
        words = {word[0] for word in params.bad_token_ids if len(word) == 1}
        self._words = self._ids(words) if words else None
        self._completing: dict[tuple[int, ...], set[int]] = {}
        self._lengths: dict[int, set[int]] = {}
        for word in params.bad_token_ids:
            if len(word) > 1:
                self._completing.setdefault(word[:-1], set()).add(word[-1])
                self._lengths.setdefault(word[-2], set()).add(len(word) - 1)
        # What is allowed besides ``words``, and besides stops too; None: more than other bad words could take away.
        self._left: list[frozenset[int] | None] = [None, None]
        if allowed is not None and params.bad_token_ids:
            left = allowed - words
            self._left = [each if len(each) <= len(params.bad_token_ids) else None for each in (left, left - stops)]

    def banned(self, output: Sequence[int], *, hides_stops: bool) -> list[Tensor]:
        """[n] each, ids that may be in several: what would complete a bad word behind ``output``; none when nothing
        else is allowed."""
        completing: set[int] = set()
        for length in self._lengths.get(output[-1], ()) if output else ():
            completing |= self._completing.get(tuple(output[-length:]), frozenset())
        left = self._left[hides_stops]
        if left is not None and left <= completing:
            return []
        found = [self._words] if self._words is not None else []
        return [*found, self._ids(completing)] if completing else found

    def _ids(self, token_ids: Iterable[int]) -> Tensor:
        """In the order in which they come."""
        return torch.tensor(list(token_ids), dtype=torch.long, device=self._device)


class KeptTokenLists:
    """The lists of all parameters that were asked for and are still somebody's. Owned by the engine thread; the
    parameters may go on any."""

    def __init__(self) -> None:
        self._by_id: dict[int, TokenLists] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, params: SamplingParams, eos_token_ids: frozenset[int], device: torch.device) -> TokenLists:
        kept, key = self._by_id, id(params)
        found = kept.get(key)
        if found is None:
            weakref.finalize(params, lambda: kept.pop(key, None)).atexit = False
        if found is None or found.eos_token_ids != eos_token_ids:
            found = kept[key] = TokenLists(params, eos_token_ids, device)
        return found
