"""How long a step takes, learned from the steps that were run: the scheduler sizes prompts' chunks by it, tiers compare
reading with computing, and the proxy's placement asks for it.

Two fits, because what a step costs at least differs where larger steps, with prompt tokens in them, run through the
model's code: seconds = fixed + per row that generates + per prompt token + per attended position. Neither the number of
rows nor that of prompt tokens changes a step's time evenly (a kernel takes rows by groups, and few tokens take as long
as reading the weights), so what the fit misses of each number of rows, and of each power of two of prompt tokens, is
remembered beside it.

Life of an observation: 1 ``observe``, compared with what was predicted (``on_error``), 2 believed, or put aside when it
took several times as long (a recording, a machine that stood still), unless that goes on, 3 fades, with every later one
of about its size and with time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from common.engine.pacing.regression import FadingRegression
from common.engine.pacing.shares import TARGET_SHARE
from common.engine.rates import HALF_LIFE, Line

HALF_LIFE_S = 300.0
"""Seconds after which an observation counts half, however few came after it: the machine has other work by then."""
MIN_WEIGHT = 3.0
"""Observations before which nothing is predicted."""
OUTLIER = 2.5
"""Times the predicted time from which a step is not believed."""
MAX_OUTLIERS = 8
"""In a row; then it is not the steps that are wrong."""
_CORRECTION_SHARE = 0.2
"""What a new step counts in what is remembered of its number of rows."""
_MAX_CORRECTION = 4.0
_LEAST_MARGIN, _MOST_MARGIN = 1 / TARGET_SHARE, 1.3
"""A step is planned to be so many times shorter than the time that it has, at least and at most: time that is left
unused makes prompts slower, and targets are kept on average."""
_LATE_PART = 0.01
"""Of the steps beside rows, how many may take longer than they have."""
_MARGIN_STEP = 0.06
"""By how much the margin grows when one did."""
MAX_ROW_KINDS = 256
"""Numbers of rows that are remembered by themselves; larger ones share the last place."""

# How strongly each coefficient is held (``FadingRegression``). The per-token ones are free to explain the first
# observations, the fixed ones and those of attended positions come in when observations tell them apart.
_DECODE_HOLDS = (0.02, 0.05, 0.2)
_PROMPT_HOLDS = (1.0, 0.2, 0.02, 0.5)


class StepShape(NamedTuple):
    """What a step computes. ``num_rows``: tokens of sequences that generate, drafted ones too, which look at
    ``num_row_attended`` positions together; ``num_prompt_tokens`` of prompts look at ``num_prompt_attended``."""

    num_rows: int = 0
    num_row_attended: int = 0
    num_prompt_tokens: int = 0
    num_prompt_attended: int = 0


def chunk_attended(start: int, num_tokens: int) -> int:
    """Positions at which ``num_tokens`` tokens from ``start`` on look together."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class StepModel:
    """The engine thread observes and predicts; lines and means are readable from any thread. ``on_error``: called with
    "prompt" or "decode" and the share by which a prediction was wrong. ``decode_totals``: of the steps that only
    generated, but for those that were put aside: how many, their rows, and seconds; ``prompt_totals``: of the others
    how many, their prompt tokens, the rows that generated in them, and seconds; each replaced as a whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._decode = _Fit(_DECODE_HOLDS)
        self._prompt = _Fit(_PROMPT_HOLDS)
        self._corrections: dict[tuple[int, int], float] = {}
        self._margin = _LEAST_MARGIN
        self._had_rows = False
        self._mean_context = 0.0  # of a row
        self._mean_attended = 0.0  # of a prompt token
        self.decode_totals = (0, 0, 0.0)
        self.prompt_totals = (0, 0, 0, 0.0)
        self.on_error: Callable[[str, float], None] = lambda _kind, _share: None

    def observe(self, shape: StepShape, seconds: float, gap_s: float | None = None) -> None:
        """One step that ran a forward. ``gap_s``: since the one before it ended."""
        now = self._clock()
        if not shape.num_prompt_tokens and not shape.num_rows:
            return
        predicted = self.predict(shape)
        if predicted is not None:
            kind = "prompt" if shape.num_prompt_tokens else "decode"
            self.on_error(kind, abs(predicted - seconds) / max(seconds, 1e-9))
            if shape.num_prompt_tokens and shape.num_rows and self._had_rows:
                self._learn_margin(max(seconds, gap_s or 0.0) > self._margin * predicted)
        self._had_rows = shape.num_rows > 0
        fit = self._fit(shape)
        if not fit.believes(predicted, seconds):
            return
        fit.observe(_features(shape), seconds, shape, now)
        if not shape.num_prompt_tokens:
            num_steps, num_rows, total_s = self.decode_totals
            self.decode_totals = (num_steps + 1, num_rows + shape.num_rows, total_s + seconds)
        else:
            num_steps, num_tokens, num_rows, total_s = self.prompt_totals
            num_tokens, num_rows = num_tokens + shape.num_prompt_tokens, num_rows + shape.num_rows
            self.prompt_totals = (num_steps + 1, num_tokens, num_rows, total_s + seconds)
            self._mean_attended = _mixed(self._mean_attended, shape.num_prompt_attended / shape.num_prompt_tokens)
        if shape.num_rows:
            self._mean_context = _mixed(self._mean_context, shape.num_row_attended / shape.num_rows)
        if fit.is_known:
            self._correct(shape, seconds)

    def predict(self, shape: StepShape) -> float | None:
        """Seconds of such a step; None: too few were seen."""
        fit = self._fit(shape)
        if not fit.is_known:
            return None
        seconds = fit.predict(_features(shape)) * self._corrections.get(_size_of(shape), 1.0)
        return seconds if seconds > 0.0 else None

    def max_prompt_tokens(self, rows: StepShape, start: int, limit: int, seconds: float) -> int | None:
        """How many tokens of a prompt, from ``start`` on, fit beside ``rows`` so that these get their next tokens
        within ``seconds``, all but a few times: 0 to ``limit``. None: not known yet."""
        if not self._prompt.is_known:
            return None
        low, high = 0, limit
        seconds /= self._margin
        while low < high:  # the time grows with the tokens, but for what corrections bring
            middle = (low + high + 1) // 2
            if self._with_prompt_s(rows, start, middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def prompt_rate(self, rows: StepShape, start: int, num_tokens: int) -> float | None:
        """Prompt tokens a second, in steps of ``num_tokens`` of a prompt beside ``rows``. None: not known yet."""
        seconds = self._with_prompt_s(rows, start, num_tokens) if self._prompt.is_known else 0.0
        return num_tokens / seconds if seconds > 0.0 else None

    def least_prompt_tokens(self, rows: StepShape, start: int, limit: int, rate: float) -> int:
        """The fewest tokens a step beside ``rows`` of which a prompt gets ``rate`` tokens a second; at most
        ``limit``."""
        low, high = 1, limit
        while low < high:  # the rate grows with the tokens
            middle = (low + high) // 2
            if rate * self._with_prompt_s(rows, start, middle) <= middle:
                high = middle
            else:
                low = middle + 1
        return low

    # --- for those who ask for lines

    @property
    def prompt_line(self) -> Line | None:
        """Of a step that only computes prompts, by their tokens. None before the first one."""
        fit = self._prompt
        if not fit.weight:
            return None
        fixed_s, _, token_s, attended_s = fit.coefficients
        return Line(fixed_s, token_s + attended_s * self._mean_attended, fit.weight)

    @property
    def prompt_row_s(self) -> float:
        """What a row that generates adds to a step with prompts."""
        _, row_s, _, attended_s = self._prompt.coefficients
        return row_s + attended_s * self._mean_context

    @property
    def decode_line(self) -> Line | None:
        """Of a step that only generates, by its rows. None before the first one."""
        fit = self._decode
        if not fit.weight:
            return None
        fixed_s, row_s, attended_s = fit.coefficients
        return Line(fixed_s, row_s + attended_s * self._mean_context, fit.weight)

    def age_s(self, *, of_prompts: bool) -> float:
        """Since the last step of the kind."""
        return self._clock() - (self._prompt if of_prompts else self._decode).observed_s

    # --- inside

    def _with_prompt_s(self, rows: StepShape, start: int, num_tokens: int) -> float:
        shape = rows._replace(num_prompt_tokens=num_tokens, num_prompt_attended=chunk_attended(start, num_tokens))
        return self._prompt.predict(_features(shape)) * self._corrections.get(_size_of(shape), 1.0)

    def _fit(self, shape: StepShape) -> _Fit:
        return self._prompt if shape.num_prompt_tokens else self._decode

    def _learn_margin(self, was_late: bool) -> None:
        """Towards the quantile that ``_LATE_PART`` of the gaps are beyond: machines that others use too need more."""
        step = _MARGIN_STEP * (1.0 - _LATE_PART) if was_late else -_MARGIN_STEP * _LATE_PART
        self._margin = min(_MOST_MARGIN, max(_LEAST_MARGIN, self._margin + step))

    def _correct(self, shape: StepShape, seconds: float) -> None:
        fitted = self._fit(shape).predict(_features(shape))
        if fitted <= 0.0:
            return
        size = _size_of(shape)
        missed = min(_MAX_CORRECTION, max(1 / _MAX_CORRECTION, seconds / fitted))
        last = self._corrections.get(size, 1.0)
        self._corrections[size] = last + _CORRECTION_SHARE * (missed - last)


class _Fit:
    """One kind of steps."""

    def __init__(self, holds: tuple[float, ...]) -> None:
        self._regression = FadingRegression(holds, HALF_LIFE, HALF_LIFE_S)
        self._num_outliers = 0
        self.observed_s = 0.0

    @property
    def weight(self) -> float:
        return self._regression.weight

    @property
    def coefficients(self) -> tuple[float, ...]:
        return self._regression.coefficients

    @property
    def is_known(self) -> bool:
        return self._regression.weight >= MIN_WEIGHT

    def believes(self, predicted: float | None, seconds: float) -> bool:
        is_outlier = predicted is not None and seconds > OUTLIER * predicted
        self._num_outliers = self._num_outliers + 1 if is_outlier else 0
        return not 0 < self._num_outliers <= MAX_OUTLIERS

    def observe(self, features: tuple[float, ...], seconds: float, shape: StepShape, now: float) -> None:
        size = (shape.num_prompt_tokens or shape.num_rows).bit_length()
        self._regression.observe(features, seconds, size=size, now=now)
        self.observed_s = now

    def predict(self, features: tuple[float, ...]) -> float:
        return self._regression.predict(features)


def _size_of(shape: StepShape) -> tuple[int, int]:
    """What steps have in common whose times are missed by about as much: rows, or prompt tokens to a power of two."""
    if shape.num_prompt_tokens:
        return 0, shape.num_prompt_tokens.bit_length()
    return min(shape.num_rows, MAX_ROW_KINDS), 0


def _features(shape: StepShape) -> tuple[float, ...]:
    attended = float(shape.num_row_attended + shape.num_prompt_attended)
    if shape.num_prompt_tokens:
        return 1.0, float(shape.num_rows), float(shape.num_prompt_tokens), attended
    return 1.0, float(shape.num_rows), attended


def _mixed(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean * 0.95 + value * 0.05
