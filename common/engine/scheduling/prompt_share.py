"""How many tokens of prompts a step has beside rows that generate, and when one more row begins beside others.

Prompts get what fits into the time between two tokens that the rows' requests ask for, and more where they would miss
their own target by that; or a part of ``max_num_batched_tokens`` where none is asked for, so that no stream stands
still for a long prompt. How long a step takes is the step model's word: before it has one, no target counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.engine.pacing.shares import PACING_RESERVE, PROMPT_SHARE, SLOWEST_SHARE, USUAL_ANSWER_TOKENS
from common.engine.pacing.step_model import StepModel, StepShape
from common.engine.scheduling.schedule import Schedule, shape_of
from common.engine.sequence import Sequence

WASTEFUL = 2.0
"""A prompt's tokens are not worth computing beside rows where each takes more than so many times as long as without
them: a step with few of them may take as long as reading the weights once more."""

JOIN_SHARE, JOIN_BY = 0.95, 0.9
"""A stream begins later where its row would make steps longer than ``JOIN_SHARE`` of a target for the time between two
tokens, until ``JOIN_BY`` of its own time to the first token would be over two steps later."""


class PromptShare:
    """Owned by the engine thread."""

    def __init__(self, max_num_batched_tokens: int, step_model: StepModel, clock: Callable[[], float]) -> None:
        self._limit = max_num_batched_tokens
        self._step_model = step_model
        self._clock = clock

    def budget(self, num_rows: int, share: int) -> int:
        """Of ``share`` tokens beside ``num_rows`` rows, so many that the step has one of the usual sizes."""
        share = min(self._limit - num_rows, share)
        return max(_usual_size(num_rows + share) - num_rows, -(-share // 2))

    def tokens(self, schedule: Schedule, queue: list[Sequence]) -> int:
        """Tokens of the prompts in ``queue`` beside the rows that are planned: as many as let each of them have its
        next token in time; but what they are without targets where a prompt would miss its own, and a part of its speed
        in any case. None where so few would cost more than they do later, and all prompts can wait for that."""
        limit = self._limit
        share = max(1, limit // PROMPT_SHARE)
        targets = [each.request.itl_target_s for each in schedule.sequences]
        model = self._step_model
        # What a stream alone would miss is as if there were none: nobody could keep it, and all would wait for it.
        least_s = model.predict(StepShape(1, 0)) or 0.0
        known = [target for target in targets if target is not None and target >= least_s]
        if not known or not queue:
            return share
        start = queue[0].num_computed_tokens
        rows = shape_of(schedule)
        assert rows is not None, "those that generate compute no images"
        fits = model.max_prompt_tokens(rows, start, limit, min(known))
        full_rate = model.prompt_rate(StepShape(), start, limit)
        if fits is None or full_rate is None:
            return share
        if len(known) < len(targets):
            fits = min(fits, share)
        if fits >= limit:
            return limit
        slowest = SLOWEST_SHARE * full_rate
        rate = model.prompt_rate(rows, start, fits) if fits else None
        if rate is None or rate < slowest:
            fits = max(1, fits, model.least_prompt_tokens(rows, start, limit, slowest))
            rate = model.prompt_rate(rows, start, fits)
        alone_s = model.predict(rows)
        if rate is not None and not self._is_soon_enough(schedule, queue, fits, fits / rate, full_rate):
            return max(fits, share)
        is_wasteful = rate and alone_s and fits / rate - alone_s > WASTEFUL * fits / full_rate
        if any(each.remote is not None for each in queue):
            return fits  # a pull does not wait behind a prompt that does
        if is_wasteful and self._is_soon_enough(schedule, queue, 0, alone_s or 0.0, full_rate):
            return 0
        return fits

    def begins_later(self, sequence: Sequence, beside: Iterable[Sequence]) -> bool:
        """Whether a stream whose first token could be sampled now waits for the end of another one of those ``beside``
        it, because together they would be too slow for a target, and its first token has time yet."""
        ttft_s = sequence.request.ttft_target_s
        if ttft_s is None or sequence.request.is_prompt_only or sequence.num_output_tokens:
            return False
        rows = [sequence, *beside]
        alone_s = self._step_model.predict(StepShape(1, sequence.num_tokens))
        step_s = self._step_model.predict(StepShape(len(rows), sum(each.num_tokens for each in rows)))
        if len(rows) == 1 or alone_s is None or step_s is None:
            return False
        targets = [each.request.itl_target_s for each in rows if each.request.itl_target_s is not None]
        if not any(alone_s <= JOIN_SHARE * target < step_s for target in targets):
            return False
        # After another step without it, which may take twice as long.
        return self._clock() + 2.0 * step_s < sequence.request.arrival_s + JOIN_BY * ttft_s

    def _is_soon_enough(
        self, schedule: Schedule, queue: list[Sequence], num_tokens: int, step_s: float, full_rate: float
    ) -> bool:
        """Whether those in ``queue`` that have a target, and can keep it, do so with ``num_tokens`` in each step of
        ``step_s`` until the streams end, and at ``full_rate`` from then on. A prompt that has to be computed beside
        them takes as much of their time in small chunks as in large ones. Without tokens: all of them have to."""
        now, ahead = self._clock(), 0
        beside_s, rate = max(map(_num_left, schedule.sequences)) * step_s, num_tokens / step_s
        for sequence in queue:
            if sequence.remote is not None:
                continue  # what it lacks is computed elsewhere
            ahead += max(0, sequence.num_prompt_tokens - sequence.num_computed_tokens)
            target_s = sequence.request.ttft_target_s
            left_s = sequence.request.arrival_s + target_s - now if target_s is not None else 0.0
            if left_s <= 0.0:
                if not num_tokens:
                    return False
                continue
            slow_s = min(beside_s, left_s)
            if rate * slow_s + full_rate * (left_s - slow_s) < PACING_RESERVE * ahead:
                return False
        return True


def _num_left(sequence: Sequence) -> int:
    """Tokens that it is taken to generate yet."""
    if sequence.sampling is None:
        return 0
    return max(1, min(sequence.sampling.max_tokens - sequence.num_output_tokens, USUAL_ANSWER_TOKENS))


def _usual_size(num_tokens: int) -> int:
    """At most ``num_tokens``, of which it keeps the first four binary digits: so that steps whose size is free come in
    few sizes, each of which a backend may record."""
    return num_tokens & -(1 << max(0, num_tokens.bit_length() - 4))
