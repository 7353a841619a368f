"""Which nodes are computing the beginnings of which prompts now: the prefix index cannot know of it yet.

Of requests that come together with the same new prefix, the first one's node will have it; its events say so only when
it is computed. Until then, and a moment longer, those behind it are told here that it will be there. Life of a claim:
1 ``begin``, with the placement, 2 ``end``, when the request has its first byte: kept for ``GRACE_S``, in which the
index hears of it; or when it failed: nothing will come of it. A claim nobody ends counts for ``LIFETIME_S``. A wrong
one costs time, never an answer.
"""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proxy.prefix_index.coverage import Coverage
from proxy.prefix_index.prompt_keys import PromptKeys

LIFETIME_S = 30.0
"""Seconds that a claim counts for which nobody says that it has ended."""
GRACE_S = 2.0
"""Seconds that a claim still counts when its prompt is computed: by then the node's events have come."""
MAX_KEYS = 50_000
"""Keys that are remembered, over all claims; the oldest claims are forgotten first."""
STRIDE = 8
"""Blocks between two keys that a claim keeps. What two prompts share is known to so many blocks; where one of them ends
is known exactly."""

NOTHING_EXPECTED: Mapping[str, int] = {}


@dataclass(eq=False, slots=True)
class Claim:
    """What one prompt's node will have. ``keys``: truncated boundary keys. ``until_s``: it counts until then."""

    url: str
    keys: Sequence[bytes]
    until_s: float
    is_computing: bool = True


class PromptsInProgress:
    """Bounded: the oldest claims are forgotten first. Called from the event loop only."""

    def __init__(
        self,
        *,
        max_keys: int = MAX_KEYS,
        lifetime_s: float = LIFETIME_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_keys = max_keys
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._claims: dict[bytes, list[Claim]] = {}
        self._in_order: collections.deque[Claim] = collections.deque()  # as they began
        self._ended: collections.deque[Claim] = collections.deque()  # those that came to something

    def __len__(self) -> int:
        """Places that are remembered."""
        return len(self._claims)

    def lookup(self, keys: PromptKeys, coverage: Mapping[str, Coverage]) -> Mapping[str, int]:
        """Tokens of the prompt that nodes will soon have, by URL. ``coverage``: what the index says; of a prompt that
        was computed it knows better, from the moment on in which it knows the blocks."""
        claims = self._claims
        if not claims:
            return NOTHING_EXPECTED
        truncated = keys.truncated_keys
        found: dict[str, int] = {}
        now = self._clock()
        for num_blocks in itertools.compress(range(len(truncated)), map(claims.__contains__, truncated)):
            num_tokens = num_blocks * keys.block_size
            for claim in claims[truncated[num_blocks]]:
                have = coverage.get(claim.url) if not claim.is_computing else None
                if claim.until_s > now and (have is None or have.attention_tokens < num_tokens):
                    found[claim.url] = num_tokens
        return found

    def begin(self, url: str, prompt: PromptKeys, num_known_tokens: int) -> Claim:
        """The node at ``url`` computes what it does not have of a prompt."""
        truncated, num_known = prompt.truncated_keys, num_known_tokens // prompt.block_size
        keys = list(truncated[num_known - num_known % STRIDE + STRIDE : -1 : STRIDE])
        if prompt.num_blocks > num_known:
            keys.append(truncated[-1])
        now = self._clock()
        claim = Claim(url, keys[: self._max_keys], now + self._lifetime_s)
        for key in claim.keys:
            others = self._claims.get(key)
            if others is None:
                self._claims[key] = [claim]
            else:
                others.append(claim)
        self._in_order.append(claim)
        # By itself each: one that computes for long must not keep all those that ended after it.
        for claims in (self._ended, self._in_order):
            while claims and claims[0].until_s <= now:
                self._forget(claims.popleft())
        while len(self._claims) > self._max_keys:
            self._forget(self._in_order.popleft())
        return claim

    def end(self, claim: Claim, *, is_computed: bool) -> None:
        """Once for each claim."""
        claim.is_computing = False
        claim.until_s = min(claim.until_s, self._clock() + GRACE_S)
        if is_computed:
            self._ended.append(claim)
        else:
            self._forget(claim)

    def _forget(self, claim: Claim) -> None:
        claim.until_s = -math.inf
        for key in claim.keys:
            claims = self._claims[key]
            if len(claims) == 1:
                del self._claims[key]
            else:
                claims.remove(claim)
        claim.keys = ()
