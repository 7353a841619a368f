"""Who may begin now, who waits, who is turned away.

Life of a request here: 1 its API key's limits (``proxy.admission.key_limits``), within which its grammar is tried, 2 a
place of ``max_running`` for each
of its answers (all of them, for one that has more): it begins; else 3 it waits, the lower its ``priority`` the earlier,
in order of arrival within one, and all the earlier the longer it has waited (``aging_s`` of waiting count as one level;
nobody overtakes whoever is first and needs more places than are free), 4 it begins when its turn comes, or is dropped.
Leaves by: the end of its work, which gives its places to the next; the client's leaving, from wherever it is; or a
drop, whose reason says whether anything had been spent on it: ``rejected-...`` at arrival, ``evicted-...`` later.

Drops: the queue is full and nobody in it matters less (``rejected-queue-full``; else the one whose turn is last makes
room: ``evicted-priority``); its turn would come after its deadline (``rejected-deadline``, or ``evicted-deadline`` once
it waits); it waited for longer than anybody may (``evicted-timeout``); its key's limits.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from common.errors import RequestDroppedError, TandemError
from proxy.admission.key_limits import Charge, KeyLimits
from proxy.admission.request import AdmissionRequest

RECENT = 64
"""Finished requests whose mean time predicts how long others wait."""
MAX_RETRY_AFTER_S = 60
"""The most that ``Retry-After`` says: predictions reach no further."""
SWEEP_S = 0.25
"""Seconds between two checks for waiting requests that will miss their deadlines."""


@dataclass(slots=True, eq=False)
class _Waiter:
    request: AdmissionRequest
    order: tuple[float, int]
    turn: asyncio.Future[None] = field(repr=False)


class AdmissionQueue:
    """Event loop only. ``on_drop`` is told the reason of each drop.

    Args:
        max_running: answers that are worked on at once.
        max_waiting: requests that wait; 0: nobody does.
        max_wait_s: longest wait.
        aging_s: waiting for so long counts as one level of priority; 0: priorities are absolute.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_waiting: int,
        max_wait_s: float,
        aging_s: float,
        limits: KeyLimits | None = None,
        on_drop: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._aging_s = aging_s
        self._limits = limits or KeyLimits()
        self._on_drop = on_drop
        self._waiting: list[_Waiter] = []  # in the order of their turns
        self._num_arrived = 0
        self._service_s: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._sweeper: asyncio.TimerHandle | None = None
        self._num_taken = 0  # places
        self.num_running = 0  # requests

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def charged(self, request: AdmissionRequest) -> Charge:
        """As ``with``, round all that is done for the request: its key's limits hold. The block settles the charge.

        Raises:
            RequestDroppedError: it is turned away.
            InvalidRequestError: its key may never ask for so much.
        """
        return self._counted(lambda: self._limits.hold(request))

    def admitted(self, request: AdmissionRequest, charge: Charge) -> Admitted:
        """``async with``, within ``charge``: the block runs when the request's turn has come, and its end gives the
        place on.

        Raises:
            RequestDroppedError: it is turned away; nothing of the block has run, the charge is given back.
        """
        return Admitted(self, request, charge)

    def unanswered(self, key: str | None) -> Charge:
        """As ``with``, round a request of ``key`` that generates nothing: its limits hold, it needs no place.

        Raises:
            RequestDroppedError: it is turned away.
        """
        return self._counted(lambda: self._limits.hold_unanswered(key))

    def _counted(self, hold: Callable[[], Charge]) -> Charge:
        try:
            return hold()
        except RequestDroppedError as exc:
            self._on_drop(str(exc.dropped))
            raise

    async def enter(self, request: AdmissionRequest, charge: Charge) -> None:
        """As ``admitted``."""
        try:
            await self._take_place(request)
        except BaseException as exc:
            charge.give_back()
            if isinstance(exc, RequestDroppedError):
                self._on_drop(str(exc.dropped))
            raise

    def leave(self, request: AdmissionRequest, seconds: float, error: BaseException | None = None) -> None:
        """The end of what was let in, ``seconds`` later; ``error``: that it ended with, which may be a drop as well
        (its first token would be late)."""
        if isinstance(error, RequestDroppedError):
            self._on_drop(str(error.dropped))  # its seconds say nothing of how long others take
        else:
            self._service_s.append(seconds)
        self._leave(request)

    def evict_all(self, error: TandemError) -> None:
        """Nobody waits any more: whoever did gets ``error``."""
        waiting, self._waiting[:] = list(self._waiting), []
        for waiter in waiting:
            self._evict(waiter, error)

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()

    # --- a place

    async def _take_place(self, request: AdmissionRequest) -> None:
        if not self._waiting and self._try_enter(request):
            return
        waiter = self._enqueue(request)
        limit_s, is_deadline = self._max_wait_s, False
        if request.deadline_s is not None and request.deadline_s - time.monotonic() <= limit_s:
            limit_s, is_deadline = request.deadline_s - time.monotonic(), True
        try:
            async with asyncio.timeout(limit_s):
                await waiter.turn
        except BaseException as exc:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._pass_on()  # whoever is first now may need fewer places
            elif waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._leave(request)  # its turn came in the very moment in which it left
            if isinstance(exc, TimeoutError):
                raise self._too_late(request, is_deadline=is_deadline) from None
            raise

    def _enqueue(self, request: AdmissionRequest) -> _Waiter:
        """Raises RequestDroppedError when the queue has no room for it, or its turn would come too late."""
        self._num_arrived += 1
        aged = request.priority + (request.arrival_s / self._aging_s if self._aging_s else 0.0)
        waiter = _Waiter(request, (aged, self._num_arrived), asyncio.get_running_loop().create_future())
        position = bisect.bisect(self._waiting, waiter.order, key=lambda each: each.order)
        if self._misses_deadline(request, position):
            raise self._drop("rejected-deadline", self._deadline_text(request, position), code="deadline_unreachable")
        if len(self._waiting) >= self._max_waiting:
            self._make_room(request)
        self._waiting.insert(position, waiter)
        self._pass_on()  # it may need fewer places than whoever was first
        if request.deadline_s is not None and self._sweeper is None:
            self._sweep_later()
        return waiter

    def _make_room(self, request: AdmissionRequest) -> None:
        last = self._waiting[-1] if self._waiting else None
        if last is None or last.request.priority <= request.priority:
            text = f"{self._num_taken} answers in flight (--max-concurrency {self._max_running})"
            text += f" and {len(self._waiting)} waiting (--max-queue-size {self._max_waiting})"
            raise self._drop("rejected-queue-full", text)
        text = (
            f"a request of priority {request.priority} took the place of this one of priority {last.request.priority}"
        )
        self._evict(self._waiting.pop(), self._drop("evicted-priority", text))

    def _num_places(self, request: AdmissionRequest) -> int:
        return min(request.num_answers, self._max_running)

    def _try_enter(self, request: AdmissionRequest) -> bool:
        if self._num_taken + self._num_places(request) > self._max_running:
            return False
        self._num_taken += self._num_places(request)
        self.num_running += 1
        return True

    def _leave(self, request: AdmissionRequest) -> None:
        self._num_taken -= self._num_places(request)
        self.num_running -= 1
        self._pass_on()

    def _pass_on(self) -> None:
        """What places are free are those of whoever is next, as far as they go."""
        while self._waiting:
            waiter = self._waiting[0]
            if not waiter.turn.done():
                if self._misses_deadline(waiter.request, -1):
                    self._evict(waiter, self._too_late(waiter.request, is_deadline=True))
                elif self._try_enter(waiter.request):
                    waiter.turn.set_result(None)
                else:
                    return
            del self._waiting[0]

    @staticmethod
    def _evict(waiter: _Waiter, error: TandemError) -> None:
        if not waiter.turn.done():
            waiter.turn.set_exception(error)

    # --- predictions

    def predicted_wait_s(self, position: int) -> float:
        """How long whoever is at ``position`` of the queue (0: the next) will still wait; 0 while nothing is known."""
        if not self._service_s:
            return 0.0
        mean_s = sum(self._service_s) / len(self._service_s)
        return (position + 1) * mean_s / self._max_running

    def _misses_deadline(self, request: AdmissionRequest, position: int) -> bool:
        if request.deadline_s is None:
            return False
        return time.monotonic() + self.predicted_wait_s(position) >= request.deadline_s

    def _sweep_later(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Turn away, while they wait, those whose turn will come too late."""
        self._sweeper = None
        kept: list[_Waiter] = []
        for waiter in self._waiting:
            if self._misses_deadline(waiter.request, len(kept)):
                text = self._deadline_text(waiter.request, len(kept))
                self._evict(waiter, self._drop("evicted-deadline", text, code="deadline_unreachable"))
            else:
                kept.append(waiter)
        self._waiting[:] = kept
        self._pass_on()
        if any(waiter.request.deadline_s is not None for waiter in kept):
            self._sweep_later()

    # --- errors

    def _drop(self, reason: str, text: str, *, code: str | None = None) -> RequestDroppedError:
        wait_s = math.ceil(self.predicted_wait_s(len(self._waiting)))
        return RequestDroppedError(
            text, dropped=reason, code=code, retry_after_s=min(max(1, wait_s), MAX_RETRY_AFTER_S)
        )

    def _too_late(self, request: AdmissionRequest, *, is_deadline: bool) -> RequestDroppedError:
        """``is_deadline``: which of the two limits it was. The clock need not say: a timer may fire a moment early."""
        waited_s = time.monotonic() - request.arrival_s
        if is_deadline:
            text = f"the deadline passed while the request waited for {waited_s:.3f} s"
            return self._drop("evicted-deadline", text, code="deadline_unreachable")
        text = f"the request waited for {waited_s:.1f} s, --max-queue-seconds is {self._max_wait_s:g}"
        return self._drop("evicted-timeout", text)

    def _deadline_text(self, request: AdmissionRequest, position: int) -> str:
        assert request.deadline_s is not None
        now_s = time.monotonic()
        return (
            f"the request has waited for {now_s - request.arrival_s:.3f} s and its turn would come in about "
            f"{self.predicted_wait_s(position):.3f} s, its deadline is in {max(0.0, request.deadline_s - now_s):.3f} s"
        )


class Admitted:
    """One request's block (``AdmissionQueue.admitted``). A class: a generator costs several times as much."""

    def __init__(self, queue: AdmissionQueue, request: AdmissionRequest, charge: Charge) -> None:
        self._queue = queue
        self._request = request
        self._charge = charge

    async def __aenter__(self) -> None:
        await self._queue.enter(self._request, self._charge)
        self._started_s = time.monotonic()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._queue.leave(self._request, time.monotonic() - self._started_s, error)
