"""What a dashboard is made of: rows of panels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """``queries``: legend and PromQL. ``failure``: stays empty while all is well."""

    title: str
    explanation: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False
    failure: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def quantiles(metric: str, selector: str) -> tuple[tuple[str, str], ...]:
    """50th, 90th and 99th percentile of a histogram."""
    return tuple(
        (f"p{percent}", f"histogram_quantile(0.{percent}, sum by (le) (rate({metric}_bucket{{{selector}}}[5m])))")
        for percent in (50, 90, 99)
    )
