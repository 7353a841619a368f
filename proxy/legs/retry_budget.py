"""How many legs may be sent again: a share of the requests of the last seconds, and a few.

When one node of ten breaks, its requests are tried elsewhere; when all break, trying everything twice would only double
the load on what is left. When the budget is spent, a request fails with what its first try failed with.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 10.0
"""Seconds over which requests and retries are counted."""
FLOOR = 10
"""Retries in a window that are allowed however few requests there were: a quiet service may retry too."""


class RetryBudget:
    """``share`` of the requests of the last ``WINDOW_S`` seconds, and ``FLOOR``. Called from the event loop only.

    Times are kept per tenth of a window, so that memory does not grow with the load.
    """

    def __init__(self, share: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._slices: deque[list[int]] = deque()  # [slice number, requests, retries]

    def add_request(self) -> None:
        self._current()[1] += 1

    def try_take(self) -> bool:
        """Whether one more leg may be sent again; counts it if so. ``share`` 0: never."""
        current = self._current()
        num_requests = sum(each[1] for each in self._slices)
        num_retries = sum(each[2] for each in self._slices)
        if self._share == 0 or num_retries + 1 > FLOOR + self._share * num_requests:
            return False
        current[2] += 1
        return True

    def _current(self) -> list[int]:
        number = int(self._clock() / WINDOW_S * 10)
        while self._slices and self._slices[0][0] <= number - 10:
            self._slices.popleft()
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0, 0])
        return self._slices[-1]
