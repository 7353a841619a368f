"""Who was in a forward that raised, and runs alone until it has caught up: so that the one whose fault it is fails
alone."""

from __future__ import annotations

from collections.abc import Iterable

from common.engine.sequence import Sequence, SequenceStatus

LONE_STEPS_FACTOR = 8
"""A suspect that caught up in one step by itself, and was in a forward that raised again, has to be alone 8 times as
long: the fault may be one that only a step of one token shows."""


class Suspects:
    """Owned by the engine thread. A sequence is one as long as its ``num_lone_steps`` is not 0."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    @property
    def is_any_alone(self) -> bool:
        """Whether one of them has still to run alone."""
        return any(each.num_lone_steps for each in self._sequences)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """One of these made a forward raise."""
        for sequence in sequences:
            sequence.num_lone_steps = LONE_STEPS_FACTOR**sequence.num_failed_forwards
            sequence.num_failed_forwards += 1
            if sequence not in self._sequences:
                self._sequences.append(sequence)

    def next_alone(self) -> Sequence | None:
        """Who runs alone now."""
        self._sequences = [each for each in self._sequences if each.num_lone_steps]
        # What is read from a tier for one of them takes its time: the next one need not wait for that.
        ready = (each for each in self._sequences if each.status is not SequenceStatus.TRANSFERRING)
        return next(ready, None)

    @staticmethod
    def caught_up(sequence: Sequence) -> None:
        """A step has computed the last of the sequence's tokens."""
        if sequence.num_lone_steps:
            sequence.num_lone_steps -= 1

    @staticmethod
    def forget(sequence: Sequence) -> None:
        """It has ended."""
        sequence.num_lone_steps = 0
