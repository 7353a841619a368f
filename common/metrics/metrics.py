"""Prometheus metrics of one process.

Each app makes one ``Metrics`` with a registry of its own, so two apps can live in one process. What happens is
counted with ``inc`` and ``observe`` (thread-safe); what *is* (pools, queues, leases, the cache's own counters) stays
with its owner as plain integers and is read through ``set_source`` when somebody scrapes, so that the hot path pays
nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.metrics.outcomes import Outcome
from common.metrics.plain_histogram import PlainHistogram, PlainSeries
from common.metrics.table import METRICS, METRICS_BY_NAME, PREFIX, Kind, MetricSpec, Role

# Metric name -> label values in the table's order (() for none) -> value.
Samples = Mapping[str, Mapping[tuple[str, ...], float]]


class Metrics:
    """The metrics of ``METRICS`` that ``role`` has; each carries the label ``role``.

    Args:
        role: which process this is.
        versions: label values of ``build_info``: ``version``, ``torch``, ``transformers``, ``nixl``; absent ones are
        empty.
        one_thread: histograms that are observed and scraped on one thread only, and often.
    """

    def __init__(
        self, role: Role, *, versions: Mapping[str, str] | None = None, one_thread: Collection[str] = ()
    ) -> None:
        self.role = role
        self._one_thread = frozenset(one_thread)
        self._registry = CollectorRegistry(auto_describe=False)
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._plain: dict[str, PlainHistogram] = {}
        # Every series that has been used, by name and labels: the library's own search costs more than counting.
        self._counting: dict[tuple[object, ...], Counter] = {}
        self._observing: dict[tuple[object, ...], Histogram | PlainSeries] = {}
        self._sourced = _SourcedCollector(role)
        for spec in METRICS:
            if role in spec.roles and not spec.sourced:
                self._build(spec, versions or {})
        self._registry.register(self._sourced)

    def _build(self, spec: MetricSpec, versions: Mapping[str, str]) -> None:
        name, labels = PREFIX + spec.name, ("role", *spec.labels)
        if spec.kind is Kind.COUNTER:
            counter = Counter(name, spec.help, labels, registry=self._registry)
            self._counters[spec.name] = counter
            if not spec.labels:
                # A series without further labels exists from the start, at 0.
                counter.labels(self.role.value)
        elif spec.name in self._one_thread:
            plain = self._plain[spec.name] = PlainHistogram(spec, self.role)
            self._registry.register(plain)
        elif spec.kind is Kind.HISTOGRAM:
            histogram = Histogram(name, spec.help, labels, buckets=spec.buckets, registry=self._registry)
            self._histograms[spec.name] = histogram
            if not spec.labels:
                histogram.labels(self.role.value)
        else:
            assert spec.name == "build_info", f"{spec.name}: a gauge is read through a source"
            gauge = Gauge(name, spec.help, labels, registry=self._registry)
            gauge.labels(self.role.value, *(versions.get(label, "") for label in spec.labels)).set(1)

    # --- generic ------------------------------------------------------------------------------------------------------

    def inc(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count. ``name`` is a counter of the table that this role has and that is not sourced; labels are all
        required."""
        key = (name, *labels.items())
        series = self._counting.get(key)
        if series is None:
            series = self._counting[key] = self._counters[name].labels(role=self.role.value, **labels)
        series.inc(amount)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram of the table."""
        key = (name, *labels.items())
        series = self._observing.get(key)
        if series is None:
            if name in self._plain:
                series = self._plain[name].labels(**labels)
            else:
                series = self._histograms[name].labels(role=self.role.value, **labels)
            self._observing[key] = series
        series.observe(value)

    def observer(self, name: str) -> Callable[[float], None]:
        """``observe`` of one of the ``one_thread`` histograms, without the search for its series."""
        return self._plain[name].labels().observe

    def set_source(self, source: Callable[[], Samples]) -> None:
        """Read the sourced metrics from ``source`` at each scrape; it is called on the scraping thread and must not
        block.

        A process has one source; a second call replaces it. Names it leaves out are shown without samples.
        """
        self._sourced.source = source

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type."""
        return generate_latest(_WithoutCreated(self._registry)), CONTENT_TYPE_LATEST

    # --- events -------------------------------------------------------------------------------------------------------

    def request_finished(self, route: str, outcome: Outcome, e2e_s: float) -> None:
        """One request ended."""
        self.inc("requests_total", route=route, outcome=outcome)
        self.observe("request_e2e_seconds", e2e_s)

    def grammar_checked(self, seconds: float, is_good: bool) -> None:
        """A grammar was tried for the first time."""
        self.inc("grammar_checks_total", result="good" if is_good else "refused")
        self.observe("grammar_check_seconds", seconds)

    def observe_ttft(self, seconds: float) -> None:
        self.observe("request_ttft_seconds", seconds)

    def observe_itl(self, seconds: float) -> None:
        self.observe("request_itl_seconds", seconds)

    def observe_lag(self, seconds: float, own_s: float) -> None:
        """The event loop was late by ``seconds``, of which ``own_s`` at most are this process's own work."""
        self.observe("event_loop_lag_seconds", seconds, cause="any")
        self.observe("event_loop_lag_seconds", own_s, cause="own")

    def observe_phase(self, phase: str, seconds: float | None) -> None:
        """``phase``: queue, prefill, transfer, first_token, decode. ``None``: it did not happen."""
        if seconds is not None:
            self.observe("request_phase_seconds", seconds, phase=phase)

    def count_prompt_tokens(self, *, computed: int = 0, cached: int = 0, transferred: int = 0) -> None:
        for source, amount in (("computed", computed), ("cached", cached), ("transferred", transferred)):
            self.inc("prompt_tokens_total", amount, source=source)

    def transfer_finished(self, *, seconds: float, num_descriptors: int, kv_bytes: int, state_bytes: int) -> None:
        """One pull of this node was validated and committed."""
        self.observe("transfer_seconds", seconds)
        self.observe("transfer_descriptors", num_descriptors)
        self.inc("transfer_bytes_total", kv_bytes, direction="in", kind="kv")
        self.inc("transfer_bytes_total", state_bytes, direction="in", kind="state")

    def transfer_failed(self, reason: str) -> None:
        """A pull gave nothing. ``reason``: stale, wrong_content, failed, timed_out, peer_lost, mismatch,
        layout_mismatch, digest_mismatch, leg_failed, unknown_pull. A stale one is a late read rejected."""
        self.inc("transfer_failures_total", reason=reason)
        if reason == "stale":
            self.inc("late_reads_rejected_total")


class _SourcedCollector(Collector):
    """Turns the owner's plain numbers into metric families at scrape time."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self.source: Callable[[], Samples] | None = None

    def collect(self) -> Iterable[Metric]:
        samples = {} if self.source is None else self.source()
        for name in samples:
            spec = METRICS_BY_NAME.get(name)
            assert spec is not None, f"{name} is not in the table"
            assert spec.sourced, f"{name} is counted, not sourced"
            assert self._role in spec.roles, f"{name} is not a metric of role {self._role.value}"
        for spec in METRICS:
            if not spec.sourced or self._role not in spec.roles:
                continue
            family_type = CounterMetricFamily if spec.kind is Kind.COUNTER else GaugeMetricFamily
            family = family_type(PREFIX + spec.name, spec.help, labels=("role", *spec.labels))
            for values, value in sorted(samples.get(spec.name, {}).items()):
                assert len(values) == len(spec.labels), f"{spec.name} has labels {spec.labels}, got {values}"
                family.add_metric((self._role.value, *values), value)
            yield family


class _WithoutCreated(Collector):
    """Leaves out the ``_created`` series, which double the names and which nobody reads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
