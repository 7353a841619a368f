"""What drafts may cost that bring nothing: a bound on what they lose, whatever the estimates say.

A step with drafts is paid with what it took longer than its tokens would have taken without; one that was worth it pays
in. Beside that each step earns a small share of its time. When nothing is left no drafts are run until enough was
earned for one: so at most ``EARNED`` of the time is lost, and what there is at the start. What a step takes without
drafts is measured for each number of sequences by itself, before the first draft there and now and then after it.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

EARNED = 0.005
"""Of a step's time."""
_FIRST = 0.5
"""Steps' time that there is at the start."""
_MOST = 8.0
"""Steps' time that is kept: what has paid for long may lose so much before it is stopped."""
_MIN_PLAIN = 3
"""Steps without drafts of as many sequences, before the first one with drafts: the first is not replayed, the second is
recorded."""
_UNTYPICAL = 3
"""Steps with drafts of as many rows that say nothing of what drafts cost: two are not replayed, the third is recorded
(``common.models.cpu.replay``). Each number of rows has them once in a node's life. Those of a lone sequence, few, are
taken for what such steps will cost: who paid for them at once would never come to know."""
_PLAIN_EVERY = 64
"""Steps with drafts of as many sequences, before one without."""
_FIRST_PLAIN_EVERY = 4
"""The same at the start; then twice as many, and so on: the first ones take longer than those that follow."""
_ROWS_FADE = 0.95
"""What a step with drafts counts for in the line when the next one has come."""
_LEAST_SPREAD = 0.02
"""Of the squared mean of the rows, their variance from which on a line is told from a point."""
_SLOWER = 2.0
"""Times as long as without drafts, that a step of several sequences may take: those that have none wait for it too."""
_UNKNOWN_ROW = 0.3
"""Of a step's time, what a row more of a small batch takes as long as nobody knows: a CPU without bfloat16."""


_LEAST_ROW = 0.01
"""Of a step's time, what a row is taken to need at least before it is run."""
_OUTLIER = 2.5
"""Times the expected time from which a step with drafts is not believed: the machine is busy."""


class StepCost(NamedTuple):
    """Seconds of a step without drafts; what drafted rows add in any case, and each of them. Below zero where the first
    rows are free: a processor without bfloat16 reads the weights as long as it multiplies four rows with them."""

    plain_s: float
    first_s: float
    row_s: float

    def seconds(self, num_more: float) -> float:
        """Of a step with so many rows more than sequences."""
        return self.plain_s + max(0.0, self.first_s + self.row_s * num_more) if num_more > 0.0 else self.plain_s


class _Batch:
    """Steps of one number of sequences: ``plain_s`` without drafts; those with drafts, a line over their rows more."""

    __slots__ = (
        "_rows",
        "_rows_squared",
        "_rows_time",
        "_time",
        "_weight",
        "num_plain",
        "plain_every",
        "plain_s",
        "since_plain",
    )

    def __init__(self, seconds: float) -> None:
        self.num_plain, self.plain_s, self.since_plain, self.plain_every = 0, seconds, 0, _FIRST_PLAIN_EVERY
        # Sums of those seen, which fade: of 1, rows, rows squared, seconds beside plain ones, rows times those.
        self._weight = self._rows = self._rows_squared = self._time = self._rows_time = 0.0

    def observe(self, seconds: float) -> None:
        self.num_plain, self.since_plain = self.num_plain + 1, 0
        if self.num_plain <= _MIN_PLAIN:
            self.plain_s = seconds  # those before were not replayed, or recorded
            return
        self.plain_every = min(_PLAIN_EVERY, 2 * self.plain_every)
        if seconds < self.plain_s:
            self.plain_s += 0.5 * (seconds - self.plain_s)
        else:  # one slow step is the machine's
            self.plain_s += 0.1 * (min(seconds, 2 * self.plain_s) - self.plain_s)

    def observe_rows(self, num_rows: int, seconds: float) -> None:
        more_s = max(0.0, seconds - self.plain_s)
        self._weight = _ROWS_FADE * self._weight + 1.0
        self._rows = _ROWS_FADE * self._rows + num_rows
        self._rows_squared = _ROWS_FADE * self._rows_squared + num_rows**2
        self._time = _ROWS_FADE * self._time + more_s
        self._rows_time = _ROWS_FADE * self._rows_time + num_rows * more_s

    def line(self) -> tuple[float, float] | None:
        """Seconds that a step with drafts takes longer: in any case, and for each row more. None: nobody knows. As long
        as all had about as many rows, half is taken for the one and half for the other: then more rows are tried, and
        it is known."""
        if not self._weight:
            return None
        rows, time = self._rows / self._weight, self._time / self._weight
        spread = self._rows_squared / self._weight - rows**2
        if spread < _LEAST_SPREAD * rows**2:
            return 0.5 * time, 0.5 * time / rows
        row_s = (self._rows_time / self._weight - rows * time) / spread
        return (time, 0.0) if row_s <= 0.0 else (time - row_s * rows, row_s)


class Allowance:
    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._left_s: float | None = None
        self._num_rows = 0
        self._num_steps: Counter[int] = Counter()  # with drafts, by their rows

    def cost(self, num_sequences: int) -> StepCost:
        """Of a step of so many sequences; in a unit of its own as long as none was seen."""
        batch = self._batches.get(num_sequences)
        plain_s = 1.0 if batch is None else batch.plain_s
        line = None if batch is None else batch.line()
        if line is None:
            return StepCost(plain_s, 0.0, plain_s * min(_UNKNOWN_ROW, 1 / num_sequences))
        return StepCost(plain_s, *line)

    def begin_step(self, num_sequences: int, num_again: int = 0) -> None:
        """A step of so many sequences is planned, and of ``num_again`` rows of known tokens beside one of each."""
        self._num_rows = 0
        batch = self._batches.get(num_sequences)
        if (
            batch is None
            or batch.num_plain < _MIN_PLAIN
            or batch.since_plain >= batch.plain_every
            or self._left_s is None
        ):
            return
        plain_s, first_s, row_s = self.cost(num_sequences)
        row_s = max(row_s, _LEAST_ROW * plain_s)
        most_s = self._left_s if num_sequences == 1 else min(self._left_s, (_SLOWER - 1.0) * plain_s)
        if most_s > 0.0:
            self._num_rows = max(0, int((most_s - first_s) / row_s) - num_again)

    def take(self, num_rows: int) -> int:
        """Of as many rows of drafts, those that this step may have."""
        taken = min(num_rows, self._num_rows)
        self._num_rows -= taken
        return taken

    def give_back(self, num_rows: int) -> None:
        self._num_rows += num_rows

    def end_step(self, num_sequences: int, num_rows: int, num_accepted: int, seconds: float) -> None:
        """A step that only generates took so long, with ``num_rows`` of ``num_sequences``."""
        batch = self._batches.get(num_sequences)
        if num_rows == num_sequences:
            if batch is None:
                batch = self._batches[num_sequences] = _Batch(seconds)
            batch.observe(seconds)
            if self._left_s is None:
                self._left_s = _FIRST * seconds
            self._earn(batch.plain_s)
        elif batch is not None and self._left_s is not None:
            batch.since_plain += 1
            cost = self.cost(num_sequences)
            plain_s, num_more = cost.plain_s, num_rows - num_sequences
            self._num_steps[num_rows] += 1
            expected = cost.seconds(num_more)
            is_typical = self._num_steps[num_rows] > _UNTYPICAL
            if is_typical and seconds <= _OUTLIER * expected:
                batch.observe_rows(num_more, seconds)
            elif is_typical or num_sequences == 1:
                seconds = expected
            self._left_s += plain_s * (num_sequences + num_accepted) / num_sequences - seconds
            self._earn(plain_s)

    def end_step_with_prompts(self, num_sequences: int, num_drafted: int, num_accepted: int) -> None:
        """A step that computed prompts too: what its drafts cost is not seen, so it is what it would be by itself."""
        batch = self._batches.get(num_sequences)
        if num_drafted and batch is not None and self._left_s is not None:
            plain_s, _, row_s = self.cost(num_sequences)
            self._left_s += plain_s * num_accepted / num_sequences - row_s * num_drafted
            self._earn(plain_s)

    def _earn(self, step_s: float) -> None:
        assert self._left_s is not None
        self._left_s = min(self._left_s + EARNED * step_s, _MOST * step_s)
