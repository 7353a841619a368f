"""Fields of bodies that nobody here knows: counted by route, and each name said once in the log.

Names are the clients' words, so they are no label: a counter must not have as many series as there are words.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from common.metrics.metrics import Metrics

logger = logging.getLogger(__name__)

MAX_NAMES = 100
"""Names that are remembered, and so said: later ones are counted only."""
MAX_CHARS = 80
"""Of a name, in the log."""


class UnknownFields:
    """Of one process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._said: set[str] = set()

    def note(self, route: str, names: Sequence[str]) -> None:
        if not names:
            return
        self._metrics.inc("unknown_fields_total", len(names), route=route)
        for name in names[: MAX_NAMES - len(self._said)]:
            name = name[:MAX_CHARS]
            if name not in self._said:
                self._said.add(name)
                logger.info("a field that is not known here was ignored route=%s field=%r", route, name)
