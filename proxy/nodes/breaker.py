"""A circuit breaker per node: who fails again and again gets no more legs for a while.

Life: *closed*, every leg goes through; after ``failures`` failed legs in a row *open*, no leg goes through; after
``open_s`` *half-open*, one leg goes through as a probe: success closes, failure opens again. A leg that ends without a
verdict (the client left; the node said that it is full or drains; an answer that is no stream took too long) changes
nothing. What a node answers at ``/ready`` does not matter here: a node that answers polls and breaks every leg is what
this is for. No waiting, no I/O; called from the event loop only.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PROBE_S = 600.0
"""Seconds for which a probe without a verdict keeps others away: an answer that is no stream may take hours."""


class BreakerState(enum.Enum):
    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """One node's. ``failures``: failed legs in a row that open it; ``open_s``: how long it stays open."""

    def __init__(
        self, node: str = "", *, failures: int = 5, open_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._node = node
        self._threshold = failures
        self._open_s = open_s
        self._clock = clock
        self._num_failures = 0
        self._open_until_s: float | None = None
        self._probe: Leg | None = None
        self._probe_since_s = 0.0
        self._reason = ""
        self.num_opened = 0

    @property
    def state(self) -> BreakerState:
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._open_until_s else BreakerState.HALF_OPEN

    @property
    def is_admitting(self) -> bool:
        """Whether a leg may go to the node now."""
        if self._open_until_s is None:
            return True
        now_s = self._clock()
        return now_s >= self._open_until_s and (self._probe is None or now_s >= self._probe_since_s + PROBE_S)

    @property
    def reason(self) -> str:
        """Why no leg may go; empty while one may."""
        if self.is_admitting or self._open_until_s is None:
            return ""
        failed = f"{self._num_failures} legs failed in a row, last: {self._reason}"
        left_s = self._open_until_s - self._clock()
        return f"circuit breaker open for {left_s:.0f} s, {failed}" if left_s > 0 else f"being probed after {failed}"

    def leg(self) -> Leg:
        """Goes round one leg (``with``), which says through it how it went."""
        return Leg(self)

    def began(self, leg: Leg) -> None:
        if self.state is BreakerState.HALF_OPEN and self.is_admitting:
            self._probe, self._probe_since_s = leg, self._clock()

    def ended(self, leg: Leg) -> None:
        if self._probe is leg:
            self._probe = None

    def reset(self) -> None:
        """The node is another process now: nothing held against the old one counts."""
        self._close()

    def succeeded(self) -> None:
        self._close()

    def failed(self, reason: str) -> None:
        self._num_failures += 1
        self._reason = reason
        state = self.state
        if state is BreakerState.OPEN or (state is BreakerState.CLOSED and self._num_failures < self._threshold):
            return
        self._open_until_s = self._clock() + self._open_s
        self._probe = None
        self.num_opened += 1
        logger.warning(
            "breaker opened node=%s failures=%d seconds=%g reason=%s",
            self._node,
            self._num_failures,
            self._open_s,
            reason,
        )

    def began_answering(self) -> None:
        """A probe need not end before others may follow: an answer may take minutes. One more failure opens again."""
        if self.state is BreakerState.HALF_OPEN:
            self._close()
            self._num_failures = self._threshold - 1

    def _close(self) -> None:
        if self._open_until_s is not None:
            logger.info("breaker closed node=%s", self._node)
        self._num_failures, self._open_until_s, self._probe, self._reason = 0, None, None, ""


class Leg:
    """The verdict on one leg; the first one counts."""

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker
        self._is_judged = False

    def __enter__(self) -> Leg:
        self._breaker.began(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._breaker.ended(self)

    def succeed(self) -> None:
        if not self._is_judged:
            self._is_judged = True
            self._breaker.succeeded()

    def fail(self, reason: str) -> None:
        if not self._is_judged:
            self._is_judged = True
            self._breaker.failed(reason)

    def begin_answer(self) -> None:
        if not self._is_judged:
            self._breaker.began_answering()
