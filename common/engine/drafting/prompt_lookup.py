"""Drafts by looking the last tokens up in what the sequence has already (prompt lookup, method ``ngram``).

Where the longest run of last tokens (``max_match`` at most, ``min_match`` at least) occurred before, most recently, is
continued as it was then. Places are found by their last ``min_match`` tokens, each linked to the one before it with the
same tokens, as in LZ77; a token costs one entry, whenever it came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.engine.drafting.drafter import Drafter

MAX_INDEXED = 8192
"""Tokens that one call takes into the index: about 4 ms. A longer prompt is looked up in as it gets known."""
MAX_PLACES = 32
"""Earlier places that a call compares: a run of spaces has thousands."""


class TokenIndex:
    """The earlier places of a growing sequence by the ``size`` tokens before them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._last: dict[tuple[int, ...], int] = {}
        self._before: dict[int, int] = {}
        self._num_indexed = 0

    def places(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Positions before the end of ``token_ids`` that the same ``size`` tokens stand before as before the end, the
        latest first. Takes up to ``MAX_INDEXED`` new tokens into the index."""
        size, last, before = self._size, self._last, self._before
        # The end itself is left out: it is what is looked up.
        end = min(len(token_ids), self._num_indexed + MAX_INDEXED)
        for position in range(max(size, self._num_indexed), end):
            key = tuple(token_ids[position - size : position])
            previous = last.get(key)
            if previous is not None:
                before[position] = previous
            last[key] = position
        self._num_indexed = max(self._num_indexed, end)
        place = last.get(tuple(token_ids[-size:])) if len(token_ids) >= size else None
        for _ in range(MAX_PLACES):
            if place is None:
                return
            yield place
            place = before.get(place)


def match_length(token_ids: Sequence[int], place: int, limit: int) -> int:
    """How many of the last tokens, at most ``limit``, stand before ``place`` too."""
    end, length = len(token_ids), 0
    while length < min(limit, place) and token_ids[place - 1 - length] == token_ids[end - 1 - length]:
        length += 1
    return length


class PromptLookup(Drafter):
    def __init__(self, min_match: int, max_match: int) -> None:
        self._max_match = max_match
        self._index = TokenIndex(min_match)

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        best, longest = 0, 0
        for place in self._index.places(token_ids):
            length = match_length(token_ids, place, self._max_match)
            if length > longest:
                best, longest = place, length
            if length == self._max_match:
                break
        return repeat_from(token_ids, best, max_tokens) if longest else []


def repeat_from(token_ids: Sequence[int], place: int, count: int) -> list[int]:
    """``count`` tokens from ``place`` on; what runs into the end goes on as a repetition of what is between."""
    period = len(token_ids) - place
    return [token_ids[place + index % period] for index in range(count)]
