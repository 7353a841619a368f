"""What drafts may cost that bring nothing: a bound on what they lose, whatever the estimates say.

A step with drafts is paid with what it took longer than its tokens would have taken without; one that was worth it pays
in. Beside that each step earns a small share of its time. When nothing is left no drafts are run until enough was
earned for one: so at most ``EARNED`` of the time is lost, and what there is at the start. What a step takes without
drafts is measured for each number of sequences by itself, before the first draft there and now and then after it.
"""

from __future__ import annotations

EARNED = 0.005
"""Of a step's time."""
_FIRST = 0.5
"""Steps' time that there is at the start."""
_MOST = 8.0
"""Steps' time that is kept: what has paid for long may lose so much before it is stopped."""
_MIN_PLAIN = 3
"""Steps without drafts of as many sequences, before the first one with drafts: the first is not replayed, the second is
recorded."""
_UNTYPICAL = 2
"""Steps of as many sequences and rows that say nothing of what drafts cost: the first is not replayed, the second is
recorded."""
_PLAIN_EVERY = 64
"""Steps with drafts of as many sequences, before one without."""
_SLOWER = 2.0
"""Times as long as without drafts, that a step of several sequences may take: those that have none wait for it too."""
_UNKNOWN_ROW = 0.3
"""Of a step's time, what a row more of a small batch takes as long as nobody knows: a CPU without bfloat16."""


_LEAST_ROW = 0.01
"""Of a step's time, what a row is taken to need at least before it is run."""
_OUTLIER = 2.5
"""Times the expected time from which a step with drafts is not believed: the machine is busy."""


class _Batch:
    """Steps of one number of sequences: ``plain_s`` without drafts, ``row_s`` for each row more; None: nobody knows."""

    __slots__ = ("_num_steps", "num_plain", "plain_s", "row_s", "since_plain")

    def __init__(self, seconds: float) -> None:
        self.num_plain, self.plain_s, self.since_plain = 0, seconds, 0
        self.row_s: float | None = None
        self._num_steps: dict[int, int] = {}  # by rows more

    def observe(self, seconds: float) -> None:
        self.num_plain, self.since_plain = self.num_plain + 1, 0
        if seconds < self.plain_s:
            self.plain_s += 0.5 * (seconds - self.plain_s)
        else:  # one slow step is the machine's
            self.plain_s += 0.1 * (min(seconds, 2 * self.plain_s) - self.plain_s)

    def is_typical(self, num_rows: int) -> bool:
        """Whether a step with so many rows more, which is over, took what such steps take. Asked once for each."""
        self._num_steps[num_rows] = self._num_steps.get(num_rows, 0) + 1
        return self._num_steps[num_rows] > _UNTYPICAL

    def observe_rows(self, num_rows: int, seconds: float) -> None:
        row_s = max(0.0, seconds - self.plain_s) / num_rows
        self.row_s = row_s if self.row_s is None else self.row_s + 0.2 * (row_s - self.row_s)


class Allowance:
    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._left_s: float | None = None
        self._num_rows = 0

    def cost(self, num_sequences: int) -> tuple[float, float]:
        """Seconds of a step of so many sequences without drafts, and of each row more; in a unit of their own."""
        batch = self._batches.get(num_sequences)
        plain_s = 1.0 if batch is None else batch.plain_s
        if batch is None or batch.row_s is None:
            return plain_s, plain_s * min(_UNKNOWN_ROW, 1 / num_sequences)
        return plain_s, batch.row_s

    def begin_step(self, num_sequences: int) -> None:
        """A step of so many sequences is planned."""
        self._num_rows = 0
        batch = self._batches.get(num_sequences)
        if batch is None or batch.num_plain < _MIN_PLAIN or batch.since_plain >= _PLAIN_EVERY or self._left_s is None:
            return
        plain_s, row_s = self.cost(num_sequences)
        row_s = max(row_s, _LEAST_ROW * plain_s)
        rows = self._left_s / row_s
        if num_sequences > 1:
            rows = min(rows, (_SLOWER - 1.0) * plain_s / row_s)
        self._num_rows = max(0, int(rows))

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
            plain_s, row_s = self.cost(num_sequences)
            num_more = num_rows - num_sequences
            expected = plain_s + row_s * num_more
            if batch.is_typical(num_more) and seconds <= _OUTLIER * expected:
                batch.observe_rows(num_more, seconds)
            else:
                seconds = expected
            self._left_s += plain_s * (num_sequences + num_accepted) / num_sequences - seconds
            self._earn(plain_s)

    def end_step_with_prompts(self, num_sequences: int, num_drafted: int, num_accepted: int) -> None:
        """A step that computed prompts too: what its drafts cost is not seen, so it is what it would be by itself."""
        batch = self._batches.get(num_sequences)
        if num_drafted and batch is not None and self._left_s is not None:
            plain_s, row_s = self.cost(num_sequences)
            self._left_s += plain_s * num_accepted / num_sequences - row_s * num_drafted
            self._earn(plain_s)

    def _earn(self, step_s: float) -> None:
        assert self._left_s is not None
        self._left_s = min(self._left_s + EARNED * step_s, _MOST * step_s)
