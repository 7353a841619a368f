"""What the proxy counts: requests by route and outcome, first tokens, placements, nodes up.

One ``ProxyMetrics`` per app; ``track`` goes round each request, so that every way out is counted exactly once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import TandemError
from common.metrics.metrics import Metrics, Samples
from common.metrics.table import Role
from common.server.versions import build_labels
from common.telemetry.tracing import NO_SPAN, RequestSpan
from proxy.admission.queue import Admission
from proxy.nodes.pool import NodePool
from proxy.prefix_index.index import PrefixIndex


@dataclass(slots=True)
class RequestRecord:
    """One request's outcome: ``stop`` (the node answered), ``rejected`` (4xx, 429), ``error`` or ``abort``."""

    outcome: str = "error"


class ProxyMetrics:
    def __init__(self, pool: NodePool, index: PrefixIndex) -> None:
        self._metrics = Metrics(Role.PROXY, versions=build_labels(), one_thread=("request_itl_seconds",))
        self._metrics.set_source(self._samples)
        self.observe_itl = self._metrics.observer("request_itl_seconds")
        self._pool = pool
        self._index = index
        self._admission: Admission | None = None

    def watch(self, admission: Admission) -> None:
        """Shows how many requests it runs and how many wait."""
        self._admission = admission

    @contextlib.contextmanager
    def track(self, route: str, arrival_s: float, span: RequestSpan = NO_SPAN) -> Iterator[RequestRecord]:
        """Count one request, from where its body was found good to its end, and end its ``span``."""
        record = RequestRecord()
        try:
            yield record
        finally:
            self._metrics.request_finished(route, record.outcome, time.monotonic() - arrival_s)
            span.end(record.outcome)

    @contextlib.contextmanager
    def track_parsing(self, route: str, arrival_s: float) -> Iterator[None]:
        """Count a request that is refused before it was admitted."""
        try:
            yield
        except TandemError:
            self._metrics.request_finished(route, "rejected", time.monotonic() - arrival_s)
            raise

    def count_drop(self, reason: str) -> None:
        self._metrics.inc("requests_dropped_total", reason=reason)

    def count_decision(self, policy: str, placement: str) -> None:
        self._metrics.inc("proxy_decisions_total", policy=policy, placement=placement)

    def observe_start(self, placement: str, predicted_s: float, actual_s: float) -> None:
        """A stream's first byte, against what its placement was estimated to take."""
        self._metrics.observe("proxy_predicted_ttft_seconds", predicted_s, placement=placement)
        self._metrics.observe("proxy_ttft_ratio", actual_s / max(predicted_s, 1e-6), placement=placement)

    def observe_ttft(self, seconds: float) -> None:
        self._metrics.observe_ttft(seconds)

    def count_snapshot(self) -> None:
        self._metrics.inc("prefix_index_snapshots_total")

    def count_tokenised(self, num_prompts: int) -> None:
        self._metrics.inc("prompts_tokenised_total", num_prompts)

    def observe_phase(self, phase: str, seconds: float) -> None:
        self._metrics.observe_phase(phase, seconds)

    def count_retry(self, reason: str) -> None:
        """A leg is sent again. ``reason``: that of the ``LegFailedError``."""
        self._metrics.inc("proxy_retries_total", reason=reason)

    def count_refused_retry(self) -> None:
        self._metrics.inc("proxy_retries_refused_total")

    def count_migration(self, outcome: str) -> None:
        """``outcome``: resumed (the stream goes on elsewhere), or gave_up."""
        self._metrics.inc("proxy_migrations_total", outcome=outcome)

    def render(self) -> tuple[bytes, str]:
        return self._metrics.render()

    def _samples(self) -> Samples:
        admission = self._admission
        return {
            "requests_running": {(): 0 if admission is None else admission.num_running},
            "requests_waiting": {(): 0 if admission is None else admission.num_waiting},
            "node_up": {(node.url,): float(node.is_up) for node in self._pool.nodes},
            "breaker_state": {(node.url,): float(node.breaker.state.value) for node in self._pool.nodes},
            "breaker_opened_total": {(node.url,): float(node.breaker.num_opened) for node in self._pool.nodes},
            "prefix_index_entries": {(node.url,): self._index.num_entries(node.url) for node in self._pool.nodes},
        }
