"""What a node reports: the cache's plain numbers as metric samples, and one record per request for its times."""

from __future__ import annotations

import time
from collections.abc import Mapping

from common.engine.outputs import PhaseSeconds, RequestOutput
from common.errors import PrefillLegAbortedError, PrefillLegFailedError
from common.kv_cache.observe.stats import CacheStats
from common.metrics.metrics import Metrics, Samples
from common.node.pull.pull_task import FinishedPull
from common.request import FinishReason
from common.telemetry.tracing import NO_SPAN, RequestSpan
from common.transfer.codes import TransferCode
from common.transfer.jobs import PullReason


def cache_samples(stats: CacheStats, *, running: int, waiting: int, waiting_for_peer: int, preemptions: int) -> Samples:
    """Gauges and counters of interface.md that live in the cache manager and the scheduler."""
    checkpoints: dict[tuple[str, ...], float] = {}
    for event, counts in (
        ("saved", stats.checkpoints_saved),
        ("skipped", stats.checkpoints_skipped),
        ("evicted", stats.checkpoints_evicted),
    ):
        checkpoints.update({(event, reason): value for reason, value in counts.items()})
    return {
        "requests_running": {(): running},
        "requests_waiting": {(): waiting},
        "requests_waiting_for_peer": {(): waiting_for_peer},
        "prefix_cache_query_tokens_total": {(): stats.query_tokens},
        "prefix_cache_hit_tokens_total": _labelled(stats.hit_tokens),
        "prefix_cache_lost_tokens_total": _labelled(stats.lost_tokens),
        "kv_blocks": _pool_states(stats.blocks),
        "state_slots": _pool_states(stats.slots),
        "checkpoints_total": checkpoints,
        "evictions_total": _labelled(stats.evictions),
        "preemptions_total": {(): preemptions},
        "leases": {("active",): stats.leases_active},
        "leases_expired_total": {(): stats.leases_expired},
    }


def _labelled(counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(label,): value for label, value in counts.items()}


def _pool_states(states: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {("used" if state == "held" else state,): value for state, value in states.items()}


_FAILURES = {
    PullReason.STALE_GENERATION: "stale",
    PullReason.STALE_EPOCH: "stale",
    PullReason.WRONG_CONTENT: "wrong_content",
    PullReason.DEADLINE: "timed_out",
    PullReason.PEER_LOST: "peer_lost",
    PullReason.DIGEST_MISMATCH: "digest_mismatch",
    TransferCode.FINGERPRINT_MISMATCH: "mismatch",
    TransferCode.REGION_MISMATCH: "mismatch",
    PrefillLegFailedError.code: "leg_failed",
    PrefillLegAbortedError.code: "leg_failed",
    "unknown_pull": "unknown_pull",
}


def failure_label(reason: str) -> str:
    """The label of ``transfer_failures_total`` for a pull's reason; a small fixed set."""
    return _FAILURES.get(reason, "failed")


def record_pull(metrics: Metrics, result: FinishedPull, slot_bytes: int) -> None:
    """Counts one ended pull; a cancelled one was nobody's failure, an empty one moved nothing."""
    if not result.ok:
        if result.reason != PullReason.CANCELLED:
            metrics.transfer_failed(failure_label(result.reason))
        return
    if not result.num_descriptors:
        return
    state_bytes = result.num_states * slot_bytes
    metrics.transfer_finished(
        seconds=result.seconds,
        num_descriptors=result.num_descriptors,
        kv_bytes=result.num_bytes - state_bytes,
        state_bytes=state_bytes,
    )
    metrics.inc("transfer_early_parts_total", result.num_early_parts)


class RequestRecord:
    """Times and the outcome of one HTTP request, for metrics and its trace. ``close`` counts it once, whatever is said
    later."""

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
        """A prompt's first output is here. ``ready_s``: until then another node computed it; None: nobody did."""
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

    def close(self, outcome: str) -> None:
        """``outcome``: stop, length, abort, error, rejected."""
        if self._is_open:
            self._is_open = False
            now = time.monotonic()
            self._metrics.request_finished(self._route, outcome, now - self._start_s)
            if self._first_token_s is not None:
                self._span.phase("decode", self._first_token_s, now, output_tokens=self._counts["output_tokens"])
            self._span.end(outcome, **self._counts)

    def close_finished(self, reason: FinishReason | None) -> None:
        self.close(reason.value if reason is not None else "error")


def trace_phases(span: RequestSpan, seconds: PhaseSeconds, *, start_s: float) -> None:
    """Name the phases of a prompt whose first output came just now, back to back.

    It was ready for this node at ``start_s``; ``queue`` is from then until its first work here. Of a prompt that was
    pulled while a peer computed it there is none, unless this node was late.
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
