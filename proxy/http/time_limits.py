"""How long requests may take: each until its own deadline, and all of them until everything is cut off.

Classes, where ``contextlib`` would make do with a generator: that costs several times as much, for each request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from common.errors import RequestDeadlineError, TandemError
from common.wire.headers import DEADLINE_HEADER
from proxy.admission.request import AdmissionRequest


class TimeLimits:
    """Of all requests in work. Event loop only. ``on_deadline`` is told the reason of each drop."""

    def __init__(self, on_deadline: Callable[[str], None]) -> None:
        self._on_deadline = on_deadline
        self._limits: set[asyncio.Timeout] = set()
        self._cut_off_by: TandemError | None = None

    def bounded(self, request: AdmissionRequest) -> Bounded:
        """``async with``: the block ends by the client's deadline, or when everything is cut off, wherever it is then:
        what it holds is given up as on any other way out.

        Raises RequestDeadlineError, or what ``cut_off`` was given.
        """
        return Bounded(self, request)

    def cut_off(self, error: TandemError) -> None:
        """Every block ends now with ``error``, also those that begin later."""
        self._cut_off_by = error
        for limit in self._limits:
            if limit.expired():
                continue  # its own deadline has passed, it is on its way out
            limit.reschedule(asyncio.get_running_loop().time())

    def begin(self, limit: asyncio.Timeout) -> None:
        self._limits.add(limit)
        if self._cut_off_by is not None:
            limit.reschedule(asyncio.get_running_loop().time())

    def end(self, limit: asyncio.Timeout) -> None:
        self._limits.discard(limit)

    def passed(self, request: AdmissionRequest) -> TandemError:
        """Why the time of ``request`` is over."""
        if self._cut_off_by is not None:
            return self._cut_off_by
        total_ms = round(((request.deadline_s or 0.0) - request.arrival_s) * 1000)
        self._on_deadline(str(RequestDeadlineError.dropped))
        return RequestDeadlineError(
            f"the deadline of {total_ms} ms ({DEADLINE_HEADER}) passed while the request was worked on"
        )


class Bounded:
    """One request's block (``TimeLimits.bounded``)."""

    def __init__(self, limits: TimeLimits, request: AdmissionRequest) -> None:
        self._limits = limits
        self._request = request

    async def __aenter__(self) -> None:
        deadline_s = self._request.deadline_s
        self._limit = asyncio.timeout(None if deadline_s is None else deadline_s - time.monotonic())
        await self._limit.__aenter__()
        self._limits.begin(self._limit)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._limits.end(self._limit)
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError as exc:
            raise self._limits.passed(self._request) from exc
