"""Drafts by what followed the longest repeated suffix most often (``suffix``; after SuffixDecoding, arXiv 2411.04975).

Each earlier place that agrees with the end in at least ``min_match`` tokens, of the latest 32, has a vote that grows
with the length of the agreement; a draft follows the votes token by token, as long as most of those that agree so far
go on alike, and is no longer than the agreement itself: a long one is rarely chance.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.drafting.drafter import Drafter
from common.engine.drafting.prompt_lookup import TokenIndex, match_length

MAX_MATCH = 64
"""Tokens of an agreement that are compared: longer ones are no surer."""
MIN_SHARE = 0.5
"""Of the votes that the next token must have, or the draft ends."""


class SuffixLookup(Drafter):
    def __init__(self, min_match: int) -> None:
        self._index = TokenIndex(min_match)

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        votes = {place: match_length(token_ids, place, MAX_MATCH) for place in self._index.places(token_ids)}
        drafts: list[int] = []
        end = len(token_ids)
        limit = min(max_tokens, max(votes.values(), default=0))
        while votes and len(drafts) < limit:
            shares: dict[int, int] = {}
            following: dict[int, list[int]] = {}
            for place, vote in votes.items():
                at = place + len(drafts)
                token = token_ids[at] if at < end else drafts[at - end]
                shares[token] = shares.get(token, 0) + vote * vote
                following.setdefault(token, []).append(place)
            token = max(shares, key=lambda each: shares[each])
            if shares[token] < MIN_SHARE * sum(shares.values()):
                break
            drafts.append(token)
            votes = {place: votes[place] for place in following[token]}
        return drafts
