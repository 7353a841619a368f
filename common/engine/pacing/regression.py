"""Least squares over observations that fade: seconds = sum of coefficient * feature, no coefficient below zero.

Relative errors are what counts, so that steps of 5 ms are fitted as well as those of 500. Observations of a size fade
with every later one of that size, and all with time: a thousand steps with a few tokens say nothing of how long one
with many takes. Where observations say nothing about a coefficient (they are all alike), it stays where it was: each is
held to its last value by a weight that is little against observations which do say something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_SECONDS = 1e-6
"""Shorter times are taken for this long: a clock that stood still must not weigh everything."""


SETTLED_WEIGHT = 16.0
"""Observations from which on one more changes little: the coefficients are found again at every ``SOLVE_EVERY``-th. An
observation takes 13 us then instead of 28 (AVX2 machine, three features)."""
SOLVE_EVERY = 8


LEAST_LEFT = 0.01
"""What time leaves of an observation: a node that was idle for a night still knows what it is."""


@dataclass(slots=True)
class _Sums:
    """Of the observations of one size, as they counted at ``observed_s``."""

    products: list[list[float]]
    targets: list[float]
    weight: float = 0.0
    observed_s: float = 0.0


class FadingRegression:
    """``holds``: by feature, how strongly its coefficient is held where it is, in observations in which the whole time
    is the feature's. An observation counts half after ``half_life`` later ones of its size, and after ``half_life_s``
    seconds. One thread observes; any may read ``coefficients``, which is replaced as a whole, and ``weight``: how many
    observations there are, the older ones in part."""

    def __init__(self, holds: Sequence[float], half_life: float, half_life_s: float) -> None:
        self._holds = tuple(holds)
        self._fade, self._half_life_s = 0.5 ** (1 / half_life), half_life_s
        self._sizes: dict[int, _Sums] = {}
        self._num_unsolved = 0
        self.weight = 0.0
        self.coefficients: tuple[float, ...] = (0.0,) * len(holds)

    def observe(self, features: Sequence[float], seconds: float, *, size: int = 0, now: float = 0.0) -> None:
        """``now``: seconds of a clock that does not go back."""
        sums = self._sizes.get(size)
        if sums is None:
            num = len(self._holds)
            sums = self._sizes[size] = _Sums([[0.0] * num for _ in range(num)], [0.0] * num)
        fade, scale = self._fade * self._left(sums, now), 1.0 / max(seconds, MIN_SECONDS)
        relative = [feature * scale for feature in features]
        for row, value in zip(sums.products, relative, strict=True):
            for column, other in enumerate(relative):
                row[column] = row[column] * fade + value * other
        sums.targets = [
            target * fade + value * seconds * scale for target, value in zip(sums.targets, relative, strict=True)
        ]
        sums.weight, sums.observed_s = sums.weight * fade + 1.0, now
        self._num_unsolved += 1
        if self.weight < SETTLED_WEIGHT or self._num_unsolved >= SOLVE_EVERY or fade < 0.5:
            self.coefficients, self._num_unsolved = self._solve(now), 0

    def _left(self, sums: _Sums, now: float) -> float:
        return max(LEAST_LEFT, 0.5 ** ((now - sums.observed_s) / self._half_life_s)) if sums.weight else 1.0

    def predict(self, features: Sequence[float]) -> float:
        return sum(map(float.__mul__, self.coefficients, map(float, features)))

    def _solve(self, now: float) -> tuple[float, ...]:
        """The best coefficients of which none is negative: those that would be are zero, the worst first."""
        all_sizes = [(sums, self._left(sums, now)) for sums in self._sizes.values()]
        indices = range(len(self._holds))
        self.weight = sum(left * sums.weight for sums, left in all_sizes)
        products = [[sum(left * s.products[i][j] for s, left in all_sizes) for j in indices] for i in indices]
        targets = [sum(left * s.targets[i] for s, left in all_sizes) for i in indices]
        free = [index for index in indices if products[index][index] > 0.0]
        found = list(self.coefficients)
        while free:
            solved = self._solve_free(free, products, targets)
            worst = min(range(len(free)), key=solved.__getitem__)
            if solved[worst] >= 0.0:
                for index, value in zip(free, solved, strict=True):
                    found[index] = value
                return tuple(found)
            found[free.pop(worst)] = 0.0
        return tuple(found)

    def _solve_free(
        self, free: Sequence[int], products: Sequence[Sequence[float]], targets: Sequence[float]
    ) -> list[float]:
        """Gaussian elimination over ``free``; the holds make every pivot positive."""
        mean = 1.0 / self.weight
        rows: list[list[float]] = []
        for index in free:
            row = [products[index][other] for other in free]
            hold = self._holds[index] * products[index][index] * mean
            row[len(rows)] += hold
            rows.append([*row, targets[index] + hold * self.coefficients[index]])
        size = len(free)
        for pivot in range(size):
            top = rows[pivot]
            for below in range(pivot + 1, size):
                factor = rows[below][pivot] / top[pivot]
                if factor:
                    rows[below] = [value - factor * other for value, other in zip(rows[below], top, strict=True)]
        solved = [0.0] * size
        for pivot in reversed(range(size)):
            rest = sum(rows[pivot][column] * solved[column] for column in range(pivot + 1, size))
            solved[pivot] = (rows[pivot][size] - rest) / rows[pivot][pivot]
        return solved
