"""``X-Tandem-Placement``: who wants to say how a request is placed, for tests and operators. A hint: without a usable
prefill node every request is placed locally.
"""

from __future__ import annotations

import enum

from common.errors import InvalidRequestError

HINT_HEADER = "x-tandem-placement"
SESSION_HEADER = "x-session-id"
MAX_SESSION_ID_LENGTH = 256


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
                f"header X-Tandem-Placement {value[:40]!r} is not one of {allowed}", param="X-Tandem-Placement"
            ) from None


def session_from_header(value: str | None) -> str | None:
    """Raises InvalidRequestError naming the header when it is too long to be remembered."""
    if value is not None and len(value) > MAX_SESSION_ID_LENGTH:
        raise InvalidRequestError(
            f"header X-Session-Id has {len(value)} characters, at most {MAX_SESSION_ID_LENGTH} are allowed",
            param="X-Session-Id",
        )
    return value or None
