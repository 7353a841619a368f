"""Which node generated a session's last turn: it is preferred a little for the next one, because it has the blocks."""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 10_000
"""Sessions that are remembered, so that memory is bounded; a forgotten one only loses its preference."""


class SessionNodes:
    """Session id -> URL of the decode node that generated its last turn, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._urls: OrderedDict[str, str] = OrderedDict()

    def get(self, session_id: str | None) -> str | None:
        return self._urls.get(session_id) if session_id is not None else None

    def put(self, session_id: str | None, url: str) -> None:
        if session_id is None:
            return
        self._urls[session_id] = url
        self._urls.move_to_end(session_id)
        if len(self._urls) > MAX_SESSIONS:
            self._urls.popitem(last=False)

    def __len__(self) -> int:
        return len(self._urls)
