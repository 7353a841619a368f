"""How fast a node is and what it has to do: its own report, polled, and what this proxy placed on it since.

A report is up to a poll's interval old; what was placed is known at once, so a burst does not all go to the node that
looked idle. Of the work that a report names, only what this proxy has not placed is added: that of other proxies, which
is taken to shrink at the node's speed until the next report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.nodes.contention import DecodeTotals

# What a node of a small model would report, for nodes that report nothing: seconds of a prompt token, bytes of KV per
# token, prompt tokens of a step, sequences at once.
DEFAULT_TOKEN_S = 0.0002
DEFAULT_KV_BYTES = 32 * 1024
DEFAULT_CHUNK = 2048
DEFAULT_MAX_SEQS = 64
TRUSTED_OBSERVATIONS = 10.0
"""Observations with which a node's own measurement counts as much as that of other nodes."""
TRUST_HALF_LIFE_S = 30.0
"""Seconds after which a measurement counts half as much."""
BUSY_S = 5.0
"""Seconds over which the share of a node's time that prompts take is averaged."""
STREAM_S = 2.0
"""Seconds that a stream is taken to last, until one has ended."""
MIN_SHARE_LEFT = 0.25
"""Share of the placed, unanswered work that still counts when it should have ended by the estimate."""


@dataclass(frozen=True, slots=True)
class Measured:
    """seconds = ``fixed_s`` + ``unit_s`` * units, as a node found. ``trust``, 0 to 1: few observations, or old ones,
    are mixed with what other nodes found, so that a node that was slow once is tried again."""

    fixed_s: float
    unit_s: float
    trust: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """``load`` of ``/internal/v1/info``. None: nothing was measured yet. ``decode``: of steps that only generate, by
    their rows, and ``decode_totals`` of all of them since the node's start; ``row_s``: what a row adds to a step with
    prompts."""

    num_running: int = 0
    num_waiting: int = 0
    num_uncomputed_tokens: int = 0
    max_num_seqs: int = DEFAULT_MAX_SEQS
    chunk: int = DEFAULT_CHUNK
    prefill: Measured | None = None
    decode: Measured | None = None
    decode_totals: DecodeTotals | None = None
    row_s: float = 0.0
    pull: Measured | None = None
    kv_bytes_per_token: float = DEFAULT_KV_BYTES
    state_bytes: float = 0.0
    tiers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By kind, of the tiers that are read now: seconds of a read, and of each byte."""

    @classmethod
    def from_json(cls, body: object) -> LoadReport | None:
        """None when the node does not say. Numbers that make no sense count as not said."""
        if not isinstance(body, Mapping):
            return None

        def number(value: object, default: float, minimum: float = 0.0) -> float:
            if not isinstance(value, int | float) or isinstance(value, bool):
                return default
            return float(value) if math.isfinite(value) and value >= minimum else default

        def line(value: Any, fixed: str, unit: str) -> Measured | None:
            if not isinstance(value, Mapping):
                return None
            fixed_s, unit_s = number(value.get(fixed), -1.0), number(value.get(unit), -1.0)
            if fixed_s + unit_s <= 0:
                return None
            weight = number(value.get("observations"), TRUSTED_OBSERVATIONS)
            age_s = number(value.get("age_seconds"), 0.0)
            trust = weight / (weight + TRUSTED_OBSERVATIONS) * 0.5 ** (age_s / TRUST_HALF_LIFE_S)
            return Measured(fixed_s, unit_s, trust) if fixed_s >= 0 and unit_s >= 0 else None

        def totals(value: Any) -> DecodeTotals | None:
            if not isinstance(value, Mapping):
                return None
            found = DecodeTotals(*(number(value.get(name), -1.0) for name in ("steps", "rows", "seconds")))
            return found if min(found) >= 0 else None

        def tiers(value: Any) -> dict[str, tuple[float, float]]:
            rows = value.items() if isinstance(value, Mapping) else ()
            pairs = {str(kind): row for kind, row in rows if isinstance(row, list | tuple) and len(row) == 2}
            read = {kind: (number(row[0], -1.0), number(row[1], -1.0)) for kind, row in pairs.items()}
            return {kind: row for kind, row in read.items() if min(row) >= 0}

        return cls(
            num_running=int(number(body.get("running"), 0)),
            num_waiting=int(number(body.get("waiting"), 0)),
            num_uncomputed_tokens=int(number(body.get("uncomputed_prompt_tokens"), 0)),
            max_num_seqs=int(number(body.get("max_num_seqs"), DEFAULT_MAX_SEQS, 1)),
            chunk=int(number(body.get("max_num_batched_tokens"), DEFAULT_CHUNK, 1)),
            prefill=line(body.get("prefill"), "seconds_per_step", "seconds_per_token"),
            decode=line(body.get("decode"), "seconds_per_step", "seconds_per_row"),
            decode_totals=totals(body.get("decode_totals")),
            row_s=number(body.get("seconds_per_row_beside_prompts"), 0.0),
            pull=line(body.get("pull"), "seconds_per_pull", "seconds_per_byte"),
            kv_bytes_per_token=number(body.get("kv_bytes_per_token"), DEFAULT_KV_BYTES),
            state_bytes=number(body.get("state_bytes"), 0.0),
            tiers=tiers(body.get("tiers")),
        )


@dataclass(slots=True)
class Charge:
    """Work that was placed on a node: ``compute_s`` of prompt tokens, and whether a stream stays there after them."""

    num_tokens: int
    compute_s: float
    is_stream: bool = False


@dataclass(slots=True)
class NodeLoad:
    """One node's speed and work. Times are of ``time.monotonic``; event loop only.

    Attributes:
        placed_tokens, placed_s: of prompts that this proxy placed here to be computed and that are not answered.
        num_streams: requests that this proxy placed here to generate and that have not ended.
        num_generating: of those, the ones whose first token has come.
        stream_s: how long such a stream stays, fading mean.
    """

    report: LoadReport = field(default_factory=LoadReport)
    placed_tokens: int = 0
    placed_s: float = 0.0
    num_placed: int = 0
    num_streams: int = 0
    num_generating: int = 0
    stream_s: float = STREAM_S
    # What is left of ``placed_s`` if the node works as fast as was estimated, and when that was so.
    _backlog_s: float = 0.0
    _backlog_at_s: float = 0.0
    _num_prefills: int = 0
    _reported_at_s: float = 0.0
    _other_s: float = 0.0
    _busy_s: float = 0.0
    _busy_at_s: float = 0.0
    _num_other_streams: int = 0

    def update(self, report: LoadReport | None, now: float) -> None:
        """A report came, or the node gives none (None)."""
        self.report = report = report or LoadReport()
        token_s = report.prefill.unit_s if report.prefill is not None else DEFAULT_TOKEN_S
        self._fade_busy(now)
        self._other_s = max(0, report.num_uncomputed_tokens - self.placed_tokens) * token_s
        self._num_other_streams = max(0, report.num_running + report.num_waiting - self.num_charges)
        self._reported_at_s = now

    def charge(self, charge: Charge, now: float) -> None:
        """The work is the node's from now on."""
        if charge.is_stream:
            self.num_streams += 1
        else:
            self._num_prefills += 1
        if charge.compute_s > 0:
            self._fade_busy(now)
            self._busy_s += charge.compute_s
            self._backlog_s = self._drained_s(now) + charge.compute_s
            self._backlog_at_s = now
            self.num_placed += 1
            self.placed_tokens += charge.num_tokens
            self.placed_s += charge.compute_s

    def settle(self, charge: Charge, now: float) -> None:
        """The charge's prompt is computed, or nobody wants it any more. Once for each charge."""
        if charge.is_stream:
            self.num_generating += 1
        else:
            self._num_prefills -= 1
        if charge.compute_s > 0:
            self.num_placed -= 1
            self.placed_tokens -= charge.num_tokens
            self.placed_s = self.placed_s - charge.compute_s if self.num_placed else 0.0
            self._backlog_s, self._backlog_at_s = min(self._drained_s(now), self.placed_s), now

    def withdraw(self, charge: Charge, came_s: float, now: float) -> None:
        """Nobody wants the charge, of ``came_s``, any more: what must be left of it is not waited for. Before it is
        settled."""
        left_s = max(0.0, charge.compute_s - (now - came_s))
        self._backlog_s, self._backlog_at_s = max(0.0, self._drained_s(now) - left_s), now

    def end_stream(self, charge: Charge, lasted_s: float | None) -> None:
        """The charge's stream has ended, after it was settled, ``lasted_s`` after its prompt was computed; None: it
        never began. Once for each charge."""
        if charge.is_stream:
            self.num_streams -= 1
            self.num_generating -= 1
            if lasted_s is not None:
                self.stream_s += 0.1 * (lasted_s - self.stream_s)

    def queue_s(self, now: float) -> float:
        """Until the node would begin with one more prompt."""
        if not self.num_placed and not self._other_s:
            return self._drained_s(now) if self._backlog_s else 0.0
        own_s = max(self._drained_s(now), MIN_SHARE_LEFT * self.placed_s)
        return own_s + max(0.0, self._other_s - max(0.0, now - self._reported_at_s))

    def busy_s(self, now: float) -> float:
        """Seconds of computing prompts that were placed here lately, faded over ``BUSY_S``."""
        self._fade_busy(now)
        return self._busy_s

    def prompt_share(self, now: float, during_s: float, without: tuple[Charge, float] | None = None) -> float:
        """Of the next ``during_s`` seconds, what share prompts will take: those that wait, or as many as have come
        lately. ``without``: a charge that does not count, and when it came."""
        busy_s = self.busy_s(now)
        if without is not None:
            charge, came_s = without
            busy_s = max(0.0, busy_s - charge.compute_s * math.exp(-max(0.0, now - came_s) / BUSY_S))
        coming = busy_s / BUSY_S
        waiting = self.queue_s(now) / during_s if during_s > 0 else 0.0
        return min(1.0, max(coming, waiting))

    def _fade_busy(self, now: float) -> None:
        self._busy_s *= math.exp(-max(0.0, now - self._busy_at_s) / BUSY_S)
        self._busy_at_s = now

    def _drained_s(self, now: float) -> float:
        return max(0.0, self._backlog_s - (now - self._backlog_at_s))

    @property
    def num_running(self) -> int:
        """Streams on the node: this proxy's own as of now, others' as of the last report."""
        return self.num_streams + self._num_other_streams

    @property
    def num_rows(self) -> int:
        """Streams on the node that have their first token: rows of each of its steps."""
        return self.num_generating + self._num_other_streams

    @property
    def num_charges(self) -> int:
        """Requests of this proxy that the node works on or will."""
        return self.num_streams + self._num_prefills

    def room_s(self) -> float:
        """Until one more stream would find room among ``max_num_seqs``."""
        excess = self.num_running + 1 - self.report.max_num_seqs
        return excess / self.report.max_num_seqs * self.stream_s if excess > 0 else 0.0
