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
_PLAIN_EVERY = 64
"""Steps with drafts of as many sequences, before one without."""
_SLOWER = 2.0
"""Times as long as without drafts, that a step of several sequences may take: those that have none wait for it too."""
_UNKNOWN_ROW = 0.3
"""Of a step's time, what a row more of a small batch takes as long as nobody knows: a CPU without bfloat16."""


class _Plain:
    """Steps without drafts of one number of sequences."""

    __slots__ = ("count", "seconds", "since")

    def __init__(self, seconds: float) -> None:
        self.count, self.seconds, self.since = 0, seconds, 0

    def observe(self, seconds: float) -> None:
        self.count, self.since = self.count + 1, 0
        if seconds < self.seconds:
            self.seconds += 0.5 * (seconds - self.seconds)
        else:  # one slow step is the machine's
            self.seconds += 0.1 * (min(seconds, 2 * self.seconds) - self.seconds)


class Allowance:
    def __init__(self) -> None:
        self._plain: dict[int, _Plain] = {}
        self._left_s: float | None = None
        self._row_s = 0.0
        self._num_rows = 0

    def begin_step(self, num_sequences: int, row_s: float | None) -> None:
        """A step of so many sequences is planned. ``row_s``: what a row more takes; None: nobody knows."""
        self._num_rows = 0
        plain = self._plain.get(num_sequences)
        if plain is None or plain.count < _MIN_PLAIN or plain.since >= _PLAIN_EVERY or self._left_s is None:
            return
        self._row_s = row_s or plain.seconds * min(_UNKNOWN_ROW, 1 / num_sequences)
        rows = self._left_s / self._row_s
        if num_sequences > 1:
            rows = min(rows, (_SLOWER - 1.0) * plain.seconds / self._row_s)
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
        plain = self._plain.get(num_sequences)
        if num_rows == num_sequences:
            if plain is None:
                plain = self._plain[num_sequences] = _Plain(seconds)
            plain.observe(seconds)
            if self._left_s is None:
                self._left_s = _FIRST * seconds
            self._earn(plain.seconds)
        elif plain is not None and self._left_s is not None:
            plain.since += 1
            # Beyond what the rows by themselves would take it is no draft's fault: a step is recorded, or interrupted.
            taken = min(seconds, plain.seconds * num_rows / num_sequences)
            self._left_s += plain.seconds * (num_sequences + num_accepted) / num_sequences - taken
            self._earn(plain.seconds)

    def end_step_with_prompts(self, num_sequences: int, num_drafted: int, num_accepted: int) -> None:
        """A step that computed prompts too: what its drafts cost is not seen, so it is what it would be by itself."""
        plain = self._plain.get(num_sequences)
        if num_drafted and plain is not None and self._left_s is not None:
            self._left_s += plain.seconds * num_accepted / num_sequences - self._row_s * num_drafted
            self._earn(plain.seconds)

    def _earn(self, step_s: float) -> None:
        assert self._left_s is not None
        self._left_s = min(self._left_s + EARNED * step_s, _MOST * step_s)
