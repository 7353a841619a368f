"""What became of the last requests, for the status page: where each ran, what was cached and moved, where time went.

A bounded ring in memory, no prompts and no answers. Life of an entry: 1 made with its request's client stream,
2 ``follow`` takes it in when the body was accepted, *running*, 3 the decode leg is sent (``leg_sent``): the nodes are
known, 4 the answer begins (``answered``): the decode node's report of everything before its first token comes as a
header, because bytes after it pass through unread, 5 ``follow`` ends it with its outcome, whatever the way out. The
newest ``KEPT`` that ended are kept, and all that run.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.wire.headers import REPORT_HEADER
from proxy.metrics.proxy_metrics import RequestRecord

KEPT = 50
"""Ended requests that are remembered."""
RUNNING_SHOWN = 50
"""Running requests that the page lists, the newest first: nobody reads a list of a thousand streams."""
MAX_REPORT_CHARS = 4096
"""A node's report has a few hundred characters; a longer one is ignored."""
PHASES = ("proxy_queue", "tokenize", "prefill_queue", "prefill", "transfer", "decode_queue", "first_token")
_COUNTS = (
    "prompt_tokens",
    "prefill_cached_tokens",
    "decode_cached_tokens",
    "transferred_bytes",
    "transferred_blocks",
    "transferred_states",
)


@dataclass(frozen=True, slots=True)
class RequestAbout:
    """What a request is, known before anything was done for it. ``arrival_s``: ``time.monotonic()``."""

    request_id: str
    route: str
    num_prompts: int
    is_stream: bool
    arrival_s: float


@dataclass(eq=False, slots=True)
class RecentRequest:
    """What was done for one request. Times are ``time.monotonic()``; None: not yet, or never."""

    arrived: float = 0.0
    decode_node: str | None = None
    prefill_node: str | None = None
    answer_s: float | None = None
    end_s: float | None = None
    status: int | None = None
    _report: str | None = field(default=None, repr=False)

    def leg_sent(self, decode_node: str, prefill_node: str | None) -> None:
        """The decode leg goes to ``decode_node`` (once more, after a failed try)."""
        self.decode_node, self.prefill_node = decode_node, prefill_node

    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        """The client's answer begins. ``headers`` are the node's, in lower case, or our own of an error."""
        self.status = status
        if self.answer_s is None and self.end_s is None:
            self.answer_s = time.monotonic()
        report = headers.get(REPORT_HEADER.lower())
        if report is not None and len(report) <= MAX_REPORT_CHARS:
            self._report = report

    def to_json(self, about: RequestAbout, record: RequestRecord) -> dict[str, Any]:
        """What the page shows of it; ``seconds`` holds the phases that are known, in their order."""
        report = parse_report(self._report)
        given = report.get("seconds")
        given = given if isinstance(given, dict) else {}
        now = time.monotonic()
        first_s = None if self.answer_s is None or not about.is_stream else self.answer_s - about.arrival_s
        return {
            "request_id": about.request_id,
            "route": about.route,
            "prompts": about.num_prompts,
            "stream": about.is_stream,
            "arrived": round(self.arrived, 3),
            "running": self.end_s is None,
            "outcome": None if self.end_s is None else record.outcome,
            "status": self.status,
            "placement": _text(report.get("placement")),
            "prefill_node": _text(report.get("prefill_node")) or self.prefill_node,
            "decode_node": self.decode_node,
            "ttft_seconds": _rounded(first_s),
            "total_seconds": _rounded((self.end_s or now) - about.arrival_s),
            "seconds": {name: round(float(given[name]), 6) for name in PHASES if _is_count(given.get(name))},
            **{name: report[name] for name in _COUNTS if _is_count(report.get(name))},
        }


class RecentRequests:
    """The ring of one proxy. Called from the event loop only."""

    def __init__(self, kept: int = KEPT) -> None:
        self._running: dict[RecentRequest, _Followed] = {}
        self._ended: deque[_Followed] = deque(maxlen=kept)

    @contextlib.contextmanager
    def follow(self, entry: RecentRequest, about: RequestAbout, record: RequestRecord) -> Iterator[None]:
        """Keep one request from here on; it ends with the block, its outcome is that of ``record`` then."""
        entry.arrived = time.time() - (time.monotonic() - about.arrival_s)
        followed = self._running[entry] = _Followed(entry, about, record)
        try:
            yield
        finally:
            del self._running[entry]
            entry.end_s = time.monotonic()
            self._ended.append(followed)

    def to_json(self) -> list[dict[str, Any]]:
        """Those that run, then those that ended, each newest first."""
        running = sorted(self._running.values(), key=lambda each: each.about.arrival_s, reverse=True)[:RUNNING_SHOWN]
        return [each.entry.to_json(each.about, each.record) for each in (*running, *reversed(self._ended))]


@dataclass(frozen=True, slots=True)
class _Followed:
    entry: RecentRequest
    about: RequestAbout
    record: RequestRecord


def parse_report(report: str | None) -> dict[str, Any]:
    """A node's report; empty when there is none or it cannot be read, which costs the page some figures only."""
    if report is None or len(report) > MAX_REPORT_CHARS:
        return {}
    try:
        parsed = json.loads(report)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def _text(value: object) -> str | None:
    return value[:200] if isinstance(value, str) else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
