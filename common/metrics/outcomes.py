"""How a request ended: one rule for the proxy and for the nodes, their metrics, traces and the status page.

An answer ends with its choices' finish reasons, everything else with an error of the tree of ``common.errors``. One
that came from another process, as a body or as an event, is read back first (``common.openai.errors.read_error``).
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable, Mapping

from common.errors import (
    ClientStalledError,
    DrainingError,
    HandedOverError,
    QueueFullError,
    RequestAbortedError,
    TandemError,
)


class Outcome(enum.StrEnum):
    """A value of the label ``outcome``. ``ERROR`` alone is the service's failure; alerts ask for it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    STALL = "stall"
    REJECTED = "rejected"
    DEADLINE = "deadline"
    CAPACITY = "capacity"
    ERROR = "error"


# Where an error's status does not say enough: by its code, and by why admission turned the request away.
_BY_CODE: Mapping[str, Outcome] = {
    RequestAbortedError.code: Outcome.ABORT,
    HandedOverError.code: Outcome.ABORT,
    ClientStalledError.code: Outcome.STALL,
    DrainingError.code: Outcome.CAPACITY,
}
_BY_DROPPED: Mapping[str | None, Outcome] = {
    "rejected-deadline": Outcome.DEADLINE,
    "evicted-deadline": Outcome.DEADLINE,
    "rejected-concurrency": Outcome.REJECTED,
    "rejected-rate-limit": Outcome.REJECTED,
}


def outcome_of(error: BaseException) -> Outcome:
    """Of a request that ended with ``error``. What is not ours is a failure."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return Outcome.ABORT
    if not isinstance(error, TandemError):
        return Outcome.ERROR
    known = _BY_CODE.get(error.code) or _BY_DROPPED.get(error.dropped)
    if known is not None:
        return known
    if error.status == QueueFullError.status:
        return Outcome.CAPACITY
    return Outcome.REJECTED if error.status < 500 else Outcome.ERROR


def outcome_of_answer(finish_reasons: Iterable[str | None]) -> Outcome:
    """Of a request that was answered to its end. ``finish_reasons``: of its choices, by OpenAI's names."""
    reasons = set(finish_reasons)
    if Outcome.ERROR.value in reasons:
        return Outcome.ERROR
    return Outcome.LENGTH if Outcome.LENGTH.value in reasons else Outcome.STOP
