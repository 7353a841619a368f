"""The thread that writes one tier's objects, and deletes them: in the order in which they were decided.

What is deleted for a prefix is deleted before that is written, so the folder stays within its size. Of a prefix only
what the folder lacks is written, its state last. A disk that hangs holds this thread and nobody else: memory that it
was to write is leased with a deadline, and what changed after that is found by its generation, before anything is
believed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.node.tiers.prefix_objects import WritableObject
from common.tiers.object_header import ObjectHeader
from common.tiers.store import ObjectStore, ObjectWriteError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteJob:
    """``on_done``: called on the writer's thread, once: with the bytes that were written, and empty or why not all."""

    deletes: Sequence[ObjectHeader]
    objects: Sequence[WritableObject]
    on_done: Callable[[int, str], None]


class TierWriter:
    """``moved_s``: of ``time.monotonic``, when an object was last written or deleted; its user sets it when a write
    begins with none before it."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self.moved_s = 0.0
        self._jobs: queue.SimpleQueue[WriteJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"tier-write-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: WriteJob) -> None:
        self._jobs.put(job)

    def delete(self, headers: Sequence[ObjectHeader]) -> None:
        if headers:
            self._jobs.put(WriteJob(headers, (), lambda num_bytes, reason: None))

    def close(self, timeout_s: float) -> None:
        """Ends when what was submitted is done, or the time is over."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            num_bytes, reason = 0, ""
            for header in job.deletes:
                with contextlib.suppress(OSError):  # the next start finds it
                    self._store.delete(header)
                self.moved_s = time.monotonic()
            try:
                for each in job.objects:
                    num_bytes += self._write(each)
                    self.moved_s = time.monotonic()
            except ObjectWriteError as exc:
                reason = exc.reason
            except Exception:
                logger.exception("writing to %s raised", self._store.place)
                reason = "io"
            self.moved_s = time.monotonic()
            job.on_done(num_bytes, reason)

    def _write(self, each: WritableObject) -> int:
        """Bytes written. Raises ObjectWriteError."""
        with contextlib.suppress(OSError):
            if self._store.has(each.header):
                self._store.touch(each.header)
                return 0
        return self._store.put(each.header, each.buffers(), each.is_unchanged)
