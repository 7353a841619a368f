"""Where each session's last turn was generated: a weak preference for clients that say which session they are of."""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 10_000


class SessionNodes:
    """Session id -> decode node's URL, the least recently used forgotten first."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._urls: OrderedDict[str, str] = OrderedDict()

    def get(self, session_id: str | None) -> str | None:
        return self._urls.get(session_id) if session_id is not None else None

    def put(self, session_id: str | None, url: str) -> None:
        if session_id is None:
            return
        self._urls[session_id] = url
        self._urls.move_to_end(session_id)
        if len(self._urls) > self._max_sessions:
            self._urls.popitem(last=False)

    def __len__(self) -> int:
        return len(self._urls)
