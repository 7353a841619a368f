"""Least squares over observations that fade: seconds = sum of coefficient * feature, no coefficient below zero.

Relative errors are what counts, so that steps of 5 ms are fitted as well as those of 500. Where the observations of a
while say nothing about a coefficient (they are all alike), it stays where it was: each is held to its last value by a
weight that is little against observations which do say something.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_SECONDS = 1e-6
"""Shorter times are taken for this long: a clock that stood still must not weigh everything."""


SETTLED_WEIGHT = 16.0
"""Observations from which on one more changes little: the coefficients are found again at every ``SOLVE_EVERY``-th. An
observation takes 13 us then instead of 28 (AVX2 machine, three features)."""
SOLVE_EVERY = 8


class FadingRegression:
    """``holds``: by feature, how strongly its coefficient is held where it is, in observations in which the whole time
    is the feature's. One thread observes; any may read ``coefficients``, which is replaced as a whole."""

    def __init__(self, holds: Sequence[float]) -> None:
        num = len(holds)
        self._holds = tuple(holds)
        self._products = [[0.0] * num for _ in range(num)]
        self._targets = [0.0] * num
        self.weight = 0.0
        self._num_unsolved = 0
        self.coefficients: tuple[float, ...] = (0.0,) * num

    def observe(self, features: Sequence[float], seconds: float, *, fade: float) -> None:
        """Older observations count ``fade`` times what they did."""
        scale = 1.0 / max(seconds, MIN_SECONDS)
        relative = [feature * scale for feature in features]
        for row, value in zip(self._products, relative, strict=True):
            for column, other in enumerate(relative):
                row[column] = row[column] * fade + value * other
        self._targets = [
            target * fade + value * seconds * scale for target, value in zip(self._targets, relative, strict=True)
        ]
        self.weight = self.weight * fade + 1.0
        self._num_unsolved += 1
        if self.weight < SETTLED_WEIGHT or self._num_unsolved >= SOLVE_EVERY:
            self.coefficients, self._num_unsolved = self._solve(), 0

    def predict(self, features: Sequence[float]) -> float:
        return sum(map(float.__mul__, self.coefficients, map(float, features)))

    def _solve(self) -> tuple[float, ...]:
        """The best coefficients of which none is negative: those that would be are zero, the worst first."""
        free = [index for index in range(len(self._holds)) if self._products[index][index] > 0.0]
        found = list(self.coefficients)
        while free:
            solved = self._solve_free(free)
            worst = min(range(len(free)), key=solved.__getitem__)
            if solved[worst] >= 0.0:
                for index, value in zip(free, solved, strict=True):
                    found[index] = value
                return tuple(found)
            found[free.pop(worst)] = 0.0
        return tuple(found)

    def _solve_free(self, free: Sequence[int]) -> list[float]:
        """Gaussian elimination over ``free``; the holds make every pivot positive."""
        mean = 1.0 / self.weight
        rows: list[list[float]] = []
        for index in free:
            row = [self._products[index][other] for other in free]
            hold = self._holds[index] * self._products[index][index] * mean
            row[len(rows)] += hold
            rows.append([*row, self._targets[index] + hold * self.coefficients[index]])
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
