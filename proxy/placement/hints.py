"""``X-Tandem-Placement``: who wants to say how a request is placed, for tests and operators. A hint: without a usable
prefill node every request is placed locally. ``X-Session-Id``: which session a request is of; the node that generated
its last turn is preferred a little.
"""

from __future__ import annotations

import enum
from collections import OrderedDict

from common.errors import InvalidRequestError
from common.wire.headers import PLACEMENT_HEADER, SESSION_HEADER

MAX_SESSION_ID_LENGTH = 256
MAX_SESSIONS = 10_000


class PlacementHint(enum.Enum):
    AUTO = "auto"
    LOCAL = "local"
    REMOTE = "remote"

    @classmethod
    def from_header(cls, value: str | None) -> PlacementHint:
        """Raises InvalidRequestError naming the header."""
        if value is None:
            return cls.AUTO
        try:
            return cls(value.strip().lower())
        except ValueError:
            allowed = ", ".join(each.value for each in cls)
            raise InvalidRequestError(
                f"header {PLACEMENT_HEADER} {value[:40]!r} is not one of {allowed}", param=PLACEMENT_HEADER
            ) from None


def session_from_header(value: str | None) -> str | None:
    """Raises InvalidRequestError naming the header when it is too long to be remembered."""
    if value is not None and len(value) > MAX_SESSION_ID_LENGTH:
        raise InvalidRequestError(
            f"header {SESSION_HEADER} has {len(value)} characters, at most {MAX_SESSION_ID_LENGTH} are allowed",
            param=SESSION_HEADER,
        )
    return value or None


class SessionNodes:
    """Session id -> URL of the decode node that generated its last turn, the least recently used forgotten first."""

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
