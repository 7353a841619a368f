"""How many drafted tokens pay: from how often a sequence's were right, and how long steps took with how many rows.

With p of the drafts right, k of them bring (1 - p**(k + 1)) / (1 - p) tokens of a step that has k rows more. As many
are run as bring most tokens a second beside the other sequences of the step: none, when a row more costs about what it
can bring, as in a large batch. Then one is tried now and then, so that what changes is seen.
"""

from __future__ import annotations

from common.engine.drafting.allowance import StepCost

_FADE = 0.8
"""What earlier drafts of a sequence count for beside a new one: answers change from quoting to own words and back."""
_USUAL_FADE = 0.99
"""The same of all sequences together."""
_FIRST_RATE = 0.6
"""Share of right ones before any draft was run."""
_FIRST_TRIED = 3.0
"""Drafted tokens that the rate of the beginning counts for: one wrong draft is no reason to give up."""
_TRY_EVERY = 64
"""Steps without drafts, before one token is tried again."""


class Acceptance:
    """Of one sequence, or (``usual``) of all: what a new one begins with."""

    __slots__ = ("_fade", "_num_held_back", "_right", "_tried")

    def __init__(self, rate: float = _FIRST_RATE, fade: float = _FADE) -> None:
        self._right, self._tried, self._fade = rate * _FIRST_TRIED, _FIRST_TRIED, fade
        self._num_held_back = 0

    @classmethod
    def usual(cls, rate: float = _FIRST_RATE) -> Acceptance:
        return cls(rate, _USUAL_FADE)

    @property
    def rate(self) -> float:
        """Estimated share of drafted tokens that are right, each after right ones."""
        return self._right / self._tried

    def observe(self, num_drafts: int, num_right: int) -> None:
        """``num_right`` of ``num_drafts`` were right; the first wrong one ends what is known of them."""
        self._right = self._right * self._fade + num_right
        self._tried = self._tried * self._fade + min(num_drafts, num_right + 1)

    def hold_back(self) -> int:
        """A draft would not pay: how much of one to run nevertheless."""
        self._num_held_back += 1
        return int(self._num_held_back % _TRY_EVERY == 0)


def num_paying(
    rate: float, max_drafts: int, num_sequences: int, cost: StepCost, num_again: int = 0, *, runs_again: bool = False
) -> int:
    """How many drafts of one sequence to run, 0 .. ``max_drafts``, in a step of ``num_sequences``.

    ``num_again``: rows of known tokens that the step runs beside one of each sequence, behind drafts of before.
    ``runs_again``: what is right of a draft that is wrong somewhere costs such a row in the next step.
    """
    tokens, gain = float(num_sequences), 1.0
    best, best_speed = 0, tokens / cost.seconds(num_again)
    for count in range(1, max_drafts + 1):
        gain *= rate
        tokens += gain
        seconds = cost.seconds(num_again + count)
        if runs_again:
            expected = tokens - num_sequences - count * gain
            seconds += cost.seconds(count + expected) - cost.seconds(count)
        if tokens / seconds > best_speed:
            best, best_speed = count, tokens / seconds
    return best
