"""How long the client waits between two tokens of a stream, as the proxy passes them on."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenGaps:
    """Of one client's stream, over all nodes that it comes from. Of several choices nothing is measured: their tokens
    take turns, which says nothing of either."""

    def __init__(self, observe: Callable[[float], None], *, num_choices: int) -> None:
        self._observe = observe
        self.num_choices = num_choices
        self._last_s: float | None = None

    def passed(self, num_tokens: int) -> None:
        """A piece of the stream went out that has ``num_tokens``, of all choices. They share the gap before it, which
        counts once."""
        if not num_tokens or self.num_choices != 1:
            return
        now_s = time.monotonic()
        if self._last_s is not None:
            self._observe((now_s - self._last_s) / num_tokens)
        self._last_s = now_s
