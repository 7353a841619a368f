"""A histogram for hot paths of one thread."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.metrics.table import PREFIX, MetricSpec, Role


class PlainHistogram(Collector):
    """One series, two plain additions an observation: prometheus_client's locks cost four times as much. Observed and
    scraped on the same thread."""

    def __init__(self, spec: MetricSpec, role: Role) -> None:
        assert not spec.labels, f"{spec.name}: one series only"
        self._spec = spec
        self._role = role
        self._bounds = (*spec.buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(PREFIX + self._spec.name, self._spec.help, labels=("role",))
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, map(float, itertools.accumulate(self._counts)), strict=True))
        family.add_metric((self._role.value,), buckets, self._sum)
        yield family
