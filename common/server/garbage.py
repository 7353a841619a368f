"""Python's collector of reference cycles in a process that serves.

A collection holds up every stream, and a full one looks at everything that lives: 100 ms and more with 2,048 sequences.
Requests leave little behind that reference counts do not free. So full ones are seldom, in a node made while nobody
waits for an answer, and never look at what lives as long as the process.
"""

from __future__ import annotations

import gc

_THRESHOLDS = (7_000, 10, 30)
"""For ``gc.set_threshold``, Python's own being (700, 10, 10): 7,000 objects more than there were, 70,000 (15 ms), and 2
million before all of them are looked at."""
_IDLE_AFTER = 2
"""Collections of younger objects since the last full one, after which a full one is worth the time."""


def keep_collections_short() -> None:
    """Called once, when all is loaded. What is garbage then stays: to look for it would make starting 0.3 s longer."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def collect_when_idle() -> None:
    """Called while no request is under way, as often as one likes."""
    if gc.get_count()[2] >= _IDLE_AFTER:
        gc.collect()
