"""Objects in this process's own memory: the store of the tier between pools on a device and a disk.

It ends with the process. There is no digest, because nobody else writes there: what is stored is compared with what was
asked for by every field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from common.tiers.object_header import HEADER_BYTES, ObjectHeader
from common.tiers.store import ObjectReadError, ObjectWriteError

_Name = tuple[int, int, int, int, bytes]


class HostMemory:
    """``common.tiers.store.ObjectStore``, of one model."""

    place = "host memory"

    def __init__(self) -> None:
        self._objects: dict[_Name, tuple[ObjectHeader, bytes]] = {}

    def put(
        self, header: ObjectHeader, buffers: Sequence[memoryview], is_unchanged: Callable[[], bool] = lambda: True
    ) -> int:
        try:
            payload = b"".join(buffers)
        except MemoryError as exc:
            raise ObjectWriteError("full") from exc
        if not is_unchanged():
            raise ObjectWriteError("stale")
        self._objects[_name(header)] = (header, payload)
        return HEADER_BYTES + len(payload)

    def get(self, wanted: ObjectHeader, buffers: Sequence[memoryview]) -> ObjectHeader:
        header, payload = self.stored(wanted)
        if replace(header, history=wanted.history, origin=wanted.origin) != wanted:
            raise ObjectReadError("other")
        start = 0
        for buffer in buffers:
            buffer[:] = payload[start : start + buffer.nbytes]
            start += buffer.nbytes
        return header

    def stored(self, header: ObjectHeader) -> tuple[ObjectHeader, memoryview]:
        """What is there under that name, for as long as it is looked at, deleted or not. Raises ObjectReadError."""
        found = self._objects.get(_name(header))
        if found is None:
            raise ObjectReadError("missing")
        return found[0], memoryview(found[1])

    def has(self, header: ObjectHeader) -> bool:
        return _name(header) in self._objects

    def touch(self, header: ObjectHeader) -> None:
        """Its order of use is the index's: nothing looks for it after a restart."""

    def age_s(self, header: ObjectHeader) -> float:
        return 0.0

    def delete(self, header: ObjectHeader) -> None:
        self._objects.pop(_name(header), None)

    def sweep(self, header: ObjectHeader) -> bool:
        return self._objects.pop(_name(header), None) is not None


def _name(header: ObjectHeader) -> _Name:
    return header.kind, header.group_id, header.start, header.num_blocks, header.key
