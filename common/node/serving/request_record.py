"""The times and the outcome of one HTTP request, for metrics and its trace."""

from __future__ import annotations

import time
from collections.abc import Iterable

from common.engine.outputs import PhaseSeconds, RequestOutput
from common.metrics.metrics import Metrics
from common.metrics.outcomes import Outcome, outcome_of_answer
from common.request import FinishReason
from common.telemetry.tracing import NO_SPAN, RequestSpan


class RequestRecord:
    """One HTTP request. The first ``close`` counts it, later ones do nothing."""

    def __init__(self, metrics: Metrics, route: str, span: RequestSpan = NO_SPAN) -> None:
        self._metrics = metrics
        self._route = route
        self._span = span
        self._start_s = time.monotonic()
        self._last_token_s: dict[int, float] = {}
        self._first_token_s: float | None = None
        self._counts = dict.fromkeys(("prompt_tokens", "cached_tokens", "transferred_bytes", "output_tokens"), 0)
        self._is_open = True

    def prompt_done(self, num_prompt_tokens: int, output: RequestOutput, *, ready_s: float | None = None) -> None:
        """A prompt's first output is here. ``ready_s``: when another node had finished computing it, on
        ``time.monotonic``; None: no other node did."""
        computed, cached = output.num_local_computed_tokens, output.num_cached_tokens
        transferred = max(0, num_prompt_tokens - computed - cached)
        self._metrics.count_prompt_tokens(computed=computed, cached=cached, transferred=transferred)
        seconds = output.seconds
        if seconds is not None:
            self._metrics.observe_phase("queue", seconds.queue)
            self._metrics.observe_phase("prefill", seconds.prefill)
            self._metrics.observe_phase("transfer", seconds.transfer)
            self._metrics.observe_phase("first_token", seconds.first_token)
            start_s = self._span.request_start_s(self._start_s) if ready_s is None else ready_s
            trace_phases(self._span, seconds, start_s=start_s)
        self._counts["prompt_tokens"] += num_prompt_tokens
        self._counts["cached_tokens"] += cached
        self._counts["transferred_bytes"] += output.transferred_bytes

    def tokens(self, choice: int, num_tokens: int) -> None:
        """``num_tokens`` new tokens of a choice are here."""
        if not num_tokens:
            return
        now = time.monotonic()
        self._metrics.inc("generation_tokens_total", num_tokens)
        last = self._last_token_s.get(choice)
        if last is not None:
            self._metrics.observe_itl((now - last) / num_tokens)
        elif not self._last_token_s:
            self._metrics.observe_ttft(now - self._start_s)
            self._first_token_s = now
        self._last_token_s[choice] = now
        self._counts["output_tokens"] += num_tokens

    def close(self, outcome: Outcome) -> None:
        if self._is_open:
            self._is_open = False
            now = time.monotonic()
            self._metrics.request_finished(self._route, outcome, now - self._start_s)
            if self._first_token_s is not None:
                self._span.phase("decode", self._first_token_s, now, output_tokens=self._counts["output_tokens"])
            self._span.end(outcome, **self._counts)

    def close_finished(self, reasons: Iterable[FinishReason | None]) -> None:
        """``reasons``: of all its choices."""
        self.close(outcome_of_answer(Outcome.ERROR if reason is None else reason.value for reason in reasons))


def trace_phases(span: RequestSpan, seconds: PhaseSeconds, *, start_s: float) -> None:
    """Adds the phases of a prompt whose first output came just now to its span, back to back.

    This node could begin at ``start_s``; ``queue`` is from then until its first work here. A prompt that was pulled
    while a peer computed it has no such phase, unless this node was late.
    """
    if seconds.scheduled_s is None:
        return
    now_s = time.monotonic()
    at_s = max(start_s, seconds.scheduled_s)
    if at_s > start_s:
        span.phase("queue", start_s, at_s)
    for name, length_s in (("pull", seconds.transfer), ("prefill", seconds.prefill)):
        if length_s is not None:
            span.phase(name, at_s, min(now_s, at_s + length_s))
            at_s = min(now_s, at_s + length_s)
    if seconds.first_token is not None:
        span.phase("first_token", at_s, now_s)
