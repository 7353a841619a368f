"""What the status page shows of a node's inside, read from its ``/metrics`` while somebody looks at the page.

``refresh`` is called by the page's route and reads each node at most once a second; nothing is read while nobody looks.
``/health`` (answered by the event loop alone, so silence means trouble) and ``/metrics`` (which may wait for a step of
the engine) are read at the same time; neither holds the page up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.wire.routes import HEALTH_ROUTE, METRICS_ROUTE

logger = logging.getLogger(__name__)

REFRESH_S = 0.9
"""Seconds before a node is read again: a little less than the page's second."""
HEALTH_TIMEOUT_S = 1.0
FIGURES_TIMEOUT_S = 4.0
SHORT_WAIT_S = 0.2
"""Seconds that the page waits for answers on their way; later ones are in its next refresh."""
HIT_WINDOW_S = 60.0
"""Seconds over which the recent hit rates are taken."""
RATE_WINDOW_S = 10.0
"""Seconds over which bytes and tokens per second are taken."""

# Metric without prefix -> the label whose values tell its series apart (None: one series).
_WANTED: Mapping[str, str | None] = {
    "requests_running": None,
    "requests_waiting": None,
    "kv_blocks": "state",
    "state_slots": "state",
    "prefix_cache_query_tokens_total": None,
    "prefix_cache_hit_tokens_total": "group",
    "prompt_tokens_total": "source",
    "generation_tokens_total": None,
    "step_seconds_total": "kind",
    "transfer_bytes_total": "kind",
    "transfer_seconds_sum": None,
    "transfer_seconds_count": None,
    "transfer_failures_total": "reason",
    "preemptions_total": None,
    "spec_decode_num_draft_tokens_total": None,
    "spec_decode_num_accepted_tokens_total": None,
    "leases": "state",
    "tier_used_bytes": "tier",
    "tier_hit_tokens_total": "tier",
    "tier_read_errors_total": "reason",
    "tier_write_errors_total": "reason",
}
_LINE = re.compile(r"^tandem_(\w+)(?:\{([^}]*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Fetch = Callable[[str, float], Awaitable[bytes]]
"""The body of a node's 200 at a path within a number of seconds; raises on anything else."""

Figures = dict[str, Any]


def read_exposition(text: str) -> Figures:
    """The wanted metrics of a Prometheus exposition: numbers, or numbers by label value; absent ones are left out, and
    those that JSON cannot say.

    ``prometheus_client.parser`` reads the same in 90 times the time (7 ms a node), which the event loop cannot spare.
    """
    figures: Figures = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or match[1] not in _WANTED:
            continue
        name, label = match[1], _WANTED[match[1]]
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        if label is None:
            figures[name] = figures.get(name, 0) + value
        else:
            series = figures.setdefault(name, {})
            key = dict(_LABEL.findall(match[2] or "")).get(label, "")
            series[key] = series.get(key, 0) + value
    return figures


@dataclass(slots=True)
class _Watched:
    """One node while somebody looks at the page."""

    read_s: float = 0.0
    is_silent: bool = False
    samples: deque[tuple[float, Figures]] = field(default_factory=deque)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class NodeFigures:
    """The figures of one proxy's nodes, by URL. ``close`` ends what is in progress."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    async def refresh(self, nodes: Mapping[str, Fetch]) -> None:
        """Read again what was read long enough ago, and wait a moment for the answers."""
        now = time.monotonic()
        for url in self._watched.keys() - nodes.keys():
            for task in self._watched.pop(url).tasks:
                task.cancel()
        for url, fetch in nodes.items():
            watched = self._watched.setdefault(url, _Watched())
            if now - watched.read_s >= REFRESH_S:
                watched.read_s = now
                self._start(watched, "health", self._read_health(watched, fetch))
                self._start(watched, "figures", self._read_figures(watched, fetch))
        tasks = [task for watched in self._watched.values() for task in watched.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=SHORT_WAIT_S)

    def of(self, url: str) -> dict[str, Any]:
        """``answers``, the last figures, how old they are, and rates over the last samples."""
        watched = self._watched.get(url)
        if watched is None or not watched.samples:
            return {"answers": watched is None or not watched.is_silent, "figures": None, "age_seconds": None}
        at_s, figures = watched.samples[-1]
        return {
            "answers": not watched.is_silent,
            "age_seconds": round(time.monotonic() - at_s, 2),
            "figures": figures,
            "hit_rates": _hit_rates(figures, {}),
            "recent_hit_rates": _hit_rates(figures, _before(watched.samples, at_s - HIT_WINDOW_S)),
            "rates": _rates(watched.samples),
        }

    async def close(self) -> None:
        tasks = [task for watched in self._watched.values() for task in watched.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _start(watched: _Watched, name: str, work: Any) -> None:
        if any(task.get_name() == name for task in watched.tasks):
            work.close()  # the one before still waits
            return
        task = asyncio.create_task(work, name=name)
        watched.tasks.add(task)
        task.add_done_callback(watched.tasks.discard)

    @staticmethod
    async def _read_health(watched: _Watched, fetch: Fetch) -> None:
        try:
            await fetch(HEALTH_ROUTE, HEALTH_TIMEOUT_S)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the node does not answer
            if not watched.is_silent:
                logger.info("a node on the status page does not answer: %s", exc)
            watched.is_silent = True
        else:
            watched.is_silent = False

    @staticmethod
    async def _read_figures(watched: _Watched, fetch: Fetch) -> None:
        try:
            text = (await fetch(METRICS_ROUTE, FIGURES_TIMEOUT_S)).decode(errors="replace")
        except Exception as exc:  # noqa: BLE001 - the page then shows how old its figures are
            logger.debug("no figures of a node: %s", exc)
            return
        figures, now = read_exposition(text), time.monotonic()
        samples = watched.samples
        if samples and _count(figures, "prefix_cache_query_tokens_total") < _count(
            samples[-1][1], "prefix_cache_query_tokens_total"
        ):
            samples.clear()  # another process: its counters began again
        samples.append((now, figures))
        while len(samples) > 2 and samples[1][0] < now - HIT_WINDOW_S:
            samples.popleft()


def _before(samples: Iterable[tuple[float, Figures]], since_s: float) -> Figures | None:
    """The oldest sample that is not older than ``since_s``; None when that is the last one."""
    kept = [figures for at_s, figures in samples if at_s >= since_s]
    return kept[0] if len(kept) > 1 else None


def _hit_rates(figures: Figures, before: Figures | None) -> dict[str, float]:
    """Share of looked-up prompt tokens that each cache group had; empty when nothing was looked up."""
    if before is None:
        return {}
    name = "prefix_cache_query_tokens_total"
    queried = _count(figures, name) - _count(before, name)
    if queried <= 0:
        return {}
    old = before.get("prefix_cache_hit_tokens_total", {})
    new = figures.get("prefix_cache_hit_tokens_total", {})
    return {group: round((value - old.get(group, 0)) / queried, 4) for group, value in new.items()}


def _rates(samples: deque[tuple[float, Figures]]) -> dict[str, float]:
    """Per second over the last samples: bytes pulled by kind, tokens generated, prompt tokens computed, seconds of
    steps with prompt tokens and of those that only generated."""
    at_s, figures = samples[-1]
    kept = [sample for sample in samples if sample[0] >= at_s - RATE_WINDOW_S]
    seconds = at_s - kept[0][0]
    if seconds <= 0:
        return {}
    before = kept[0][1]

    def rate(name: str, label: str | None = None) -> float:
        return round((_count(figures, name, label) - _count(before, name, label)) / seconds, 2)

    return {
        "kv_bytes": rate("transfer_bytes_total", "kv"),
        "state_bytes": rate("transfer_bytes_total", "state"),
        "generated_tokens": rate("generation_tokens_total"),
        "computed_tokens": rate("prompt_tokens_total", "computed"),
        "prompt_share": rate("step_seconds_total", "prompt"),
        "decode_share": rate("step_seconds_total", "decode"),
    }


def _count(figures: Figures, name: str, label: str | None = None) -> float:
    value = figures.get(name, 0.0) if label is None else figures.get(name, {}).get(label, 0.0)
    return float(value)
