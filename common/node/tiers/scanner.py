"""Finds what a tier's store holds: at the start, while the node serves already; later what others write or delete.

One thread for each store: 1 it looks, 2 what has become whole, and what is whole no longer, is told, 3 at first and
now and then what nothing needs is swept away, 4 it waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from common.kv_cache.tiers.stored_prefix import StoredPrefix
from common.node.tiers.prefix_objects import PrefixObjects
from common.tiers.catalogue import Catalogue
from common.tiers.store import ObjectStore, Watch

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two looks at least; a look may take a twentieth of the time."""
SWEEP_S = 600.0
EXPECTED = ("temporary", "missing")
"""What is found in a sound folder too; missing: gone, or written anew, since it was listed."""
UNKNOWN = ("io", "failing", "missing")
"""What could not be looked into may be what others need. The next look tries again; what fails twice is not told."""


class TierScanner:
    """``on_change``: told, on its thread, which prefixes are new, the latest used first, and which keys are gone.
    ``on_useless``: how many files of a look were of no use, by reason."""

    def __init__(
        self,
        store: ObjectStore,
        watch: Watch,
        objects: PrefixObjects,
        catalogue: Catalogue,
        on_change: Callable[[Sequence[StoredPrefix], Sequence[bytes]], None],
        on_useless: Callable[[Counter[str]], None],
    ) -> None:
        self._store = store
        self._objects = objects
        self._watch = watch
        self._catalogue = catalogue
        self._on_change = on_change
        self._on_useless = on_useless
        self._closing = threading.Event()
        self.has_looked = False
        self._next_sweep_s = 0.0
        self._thread = threading.Thread(target=self._work, name="tier-scan", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Does not wait: the folder's disk may hang."""
        self._closing.set()

    def _work(self) -> None:
        while not self._closing.is_set():
            started_s = time.monotonic()
            try:
                self._look()
            except OSError as exc:
                logger.warning("the tier in %s cannot be looked at: %s", self._store.place, exc)
            self._closing.wait(max(POLL_S, 20 * (time.monotonic() - started_s)))

    def _look(self) -> None:
        changes = self._watch.look()
        gone = self._catalogue.remove(changes.removed)
        whole = self._catalogue.add(changes.added)
        if len(whole) > 1:
            ages = {prefix.key: self._age_s(prefix) for prefix in whole}
            whole.sort(key=lambda prefix: ages[prefix.key])
        if whole or gone:
            self._on_change(whole, gone)
        found = Counter({reason: count for reason, count in changes.useless.items() if reason not in EXPECTED})
        is_known = not any(changes.useless[reason] for reason in UNKNOWN)
        if time.monotonic() >= self._next_sweep_s and is_known:
            num_swept = sum(map(self._store.sweep, self._catalogue.useless()))
            self._next_sweep_s = time.monotonic() + SWEEP_S
            logger.info(
                "tier %s: %d prefixes found, %d objects that none needs deleted",
                self._store.place, len(whole), num_swept,
            )  # fmt: skip
        if found:
            self._on_useless(found)
        self.has_looked = True

    def _age_s(self, prefix: StoredPrefix) -> float:
        return self._store.age_s(self._objects.state(prefix.checkpoint, has_row=prefix.has_row))
