"""How far ``tandem bench`` is, on stderr: one line that is written over on a terminal, else a line now and then."""

from __future__ import annotations

import time
from typing import TextIO

TERMINAL_INTERVAL_S = 0.1
"""Seconds between two updates of the line on a terminal."""
LINE_INTERVAL_S = 10.0
"""Seconds between two lines elsewhere."""
BAR_CHARS = 24


class Progress:
    """Call ``update`` after each change; it writes once per interval. ``close`` ends the line."""

    def __init__(self, stream: TextIO, num_requests: int, *, is_shown: bool = True) -> None:
        self._stream = stream
        self._num_requests = num_requests
        self._is_shown = is_shown
        self._is_terminal = stream.isatty()
        self._interval_s = TERMINAL_INTERVAL_S if self._is_terminal else LINE_INTERVAL_S
        self._start_s = self._last_s = time.monotonic()
        self._width = 0

    def update(self, *, num_done: int, num_failed: int, num_in_flight: int) -> None:
        now_s = time.monotonic()
        is_end = num_done == self._num_requests
        if not self._is_shown or (now_s - self._last_s < self._interval_s and not is_end):
            return
        self._last_s = now_s
        elapsed_s = now_s - self._start_s
        text = f"{num_done}/{self._num_requests} requests, {num_in_flight} in flight, {num_failed} failed"
        text += f", {elapsed_s:.0f} s"
        if 0 < num_done < self._num_requests:
            text += f", about {elapsed_s / num_done * (self._num_requests - num_done):.0f} s left"
        if self._is_terminal:
            filled = BAR_CHARS * num_done // self._num_requests
            text = f"[{'#' * filled}{'.' * (BAR_CHARS - filled)}] {text}"
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(f"tandem bench: {text}\n")
        self._stream.flush()

    def close(self) -> None:
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0
