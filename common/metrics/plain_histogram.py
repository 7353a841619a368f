"""A histogram for hot paths of one thread."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.metrics.table import PREFIX, MetricSpec, Role


class PlainHistogram(Collector):
    """Two plain additions an observation: prometheus_client's locks cost four times as much. Observed and scraped on
    the same thread."""

    def __init__(self, spec: MetricSpec, role: Role) -> None:
        self._spec = spec
        self._role = role
        self._bounds = (*spec.buckets, math.inf)
        self._series: dict[tuple[str, ...], PlainSeries] = {}
        if not spec.labels:
            self.labels()  # exists from the start, at 0

    def labels(self, **values: str) -> PlainSeries:
        """The series with these labels, which are all required besides ``role``."""
        key = tuple(values[label] for label in self._spec.labels)
        assert len(values) == len(key), f"{self._spec.name} has labels {self._spec.labels}, got {tuple(values)}"
        return self._series.setdefault(key, PlainSeries(self._bounds))

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(PREFIX + self._spec.name, self._spec.help, labels=("role", *self._spec.labels))
        bounds = list(map(floatToGoString, self._bounds))
        for values, series in self._series.items():
            buckets = list(zip(bounds, map(float, itertools.accumulate(series.counts)), strict=True))
            family.add_metric((self._role.value, *values), buckets, series.sum)
        yield family


class PlainSeries:
    """``counts``: observations by bucket, not yet accumulated."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * len(bounds)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value
