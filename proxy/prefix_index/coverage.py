"""How much of one prompt one node has."""

from __future__ import annotations

from typing import NamedTuple


class Coverage(NamedTuple):
    """What one node has of one prompt, in tokens from its start.

    Attributes:
        attention_tokens: whose attention blocks it has (models without attention: as ``state_tokens``).
        state_tokens: the deepest position from which it can go on by itself: a checkpoint within those, exact to the
            token. A dense model needs no checkpoint. Less than the prompt, unless nothing at all needs computing.
        tier_tokens: the deepest position, beyond those, from which it can go on after reading from its tier of kind
            ``tier``; 0 when there is none.
    """

    attention_tokens: int
    state_tokens: int
    tier_tokens: int = 0
    tier: str = ""


NO_COVERAGE = Coverage(0, 0)
