"""What the proxy counts: requests by route and outcome, first tokens, placements.

One ``ProxyMetrics`` per app; ``track`` goes round each request, so that every way out is counted exactly once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.metrics.metrics import Metrics
from common.metrics.outcomes import Outcome, outcome_of
from common.metrics.table import Role
from common.server.versions import build_labels
from common.telemetry.tracing import NO_SPAN, RequestSpan

_ON_THE_LOOP = (
    "event_loop_lag_seconds",
    "proxy_predicted_ttft_seconds",
    "proxy_ttft_ratio",
    "request_e2e_seconds",
    "request_itl_seconds",
    "request_phase_seconds",
    "request_ttft_seconds",
)
"""Histograms that every request is counted in; the loop's thread also answers who scrapes them."""


@dataclass(slots=True)
class RequestRecord:
    """What became of one request.

    Attributes:
        outcome: ``ABORT`` until another one is known: a request whose client leaves is cancelled wherever it is.
        num_prompt_tokens: None: no node has heard of it.
        num_output_tokens: of what the client got, shown there or not; None: not known.
    """

    outcome: Outcome = Outcome.ABORT
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None


@dataclass(slots=True)
class TargetCounts:
    """Streams that had a target, and those of them that kept it: of the first token (``ttft``), and of the mean time
    between two tokens (``itl``)."""

    asked: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)

    def share(self, target: str) -> float | None:
        """None: nobody has asked."""
        asked = self.asked.get(target, 0)
        return self.kept.get(target, 0) / asked if asked else None


class ProxyMetrics(Metrics):
    """``observe_token_gap``: seconds between two tokens of a stream; on the event loop only."""

    def __init__(self) -> None:
        super().__init__(Role.PROXY, versions=build_labels(), one_thread=_ON_THE_LOOP)
        self.observe_token_gap = self.observer("request_itl_seconds")
        self.targets = TargetCounts()

    @contextlib.contextmanager
    def track(self, route: str, arrival_s: float, record: RequestRecord, span: RequestSpan = NO_SPAN) -> Iterator[None]:
        """Count one request, from where its body was found good to its end, and end its ``span``."""
        try:
            yield
        finally:
            self.request_finished(route, record.outcome, time.monotonic() - arrival_s)
            span.end(record.outcome)

    @contextlib.contextmanager
    def track_parsing(self, route: str, arrival_s: float) -> Iterator[None]:
        """Count a request that is refused before it was admitted."""
        try:
            yield
        except Exception as exc:
            self.request_finished(route, outcome_of(exc), time.monotonic() - arrival_s)
            raise

    def count_drop(self, reason: str) -> None:
        """Admission turned a request away, or its deadline passed."""
        self.inc("requests_dropped_total", reason=reason)

    def count_target(self, target: str, seconds: float | None, target_s: float | None) -> None:
        """A stream with a ``target`` (None: it has none) took so long; None: it was turned away for it."""
        if target_s is None:
            return
        is_kept = seconds is not None and seconds <= target_s
        self.inc("proxy_targets_total", target=target, kept="yes" if is_kept else "no")
        counts = self.targets
        counts.asked[target] = counts.asked.get(target, 0) + 1
        counts.kept[target] = counts.kept.get(target, 0) + is_kept

    def observe_start(self, placement: str, predicted_s: float, actual_s: float) -> None:
        """A stream's first byte, against what its placement was estimated to take. ``placement``: local or remote."""
        self.observe("proxy_predicted_ttft_seconds", predicted_s, placement=placement)
        self.observe("proxy_ttft_ratio", actual_s / max(predicted_s, 1e-6), placement=placement)
