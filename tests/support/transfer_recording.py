"""A backend that passes everything on and writes down what was asked of it, with a hook at the moment data has
arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from common.transfer.backend import TransferBackend
from common.transfer.reads import Handle, Read, ReadStatus
from common.transfer.regions import Peer, Region


class RecordingBackend(TransferBackend):
    """``events``: ("post" | "done", remote region names) in order. ``on_first_done`` runs once, on the polling thread,
    after the first read has reported done and before the caller hears of it.
    """

    def __init__(self, inner: TransferBackend) -> None:
        super().__init__(engine_id=inner.engine_id, epoch=inner.epoch, fingerprint=inner.fingerprint)
        self.kind = inner.kind
        self.events: list[tuple[str, tuple[str, ...]]] = []
        self.num_polls = 0
        self.on_first_done: Callable[[], None] | None = None
        self._inner = inner
        self._regions_of: dict[Handle, tuple[str, ...]] = {}

    @property
    def regions(self) -> Mapping[str, Region]:
        return self._inner.regions

    def register(self, regions: Sequence[Region]) -> None:
        self._inner.register(regions)

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def add_peer(self, metadata: bytes) -> Peer:
        return self._inner.add_peer(metadata)

    def remove_peer(self, peer: Peer) -> None:
        self._inner.remove_peer(peer)

    def post_read(self, peer: Peer, reads: Sequence[Read]) -> Handle:
        handle = self._inner.post_read(peer, reads)
        self._regions_of[handle] = tuple(read.remote_region for read in reads)
        self.events.append(("post", self._regions_of[handle]))
        return handle

    def poll(self, handle: Handle) -> ReadStatus:
        self.num_polls += 1
        status = self._inner.poll(handle)
        regions = self._regions_of.pop(handle, None) if status.is_terminal else None
        if regions is not None:
            self.events.append(("done", regions))
            hook, self.on_first_done = self.on_first_done, None
            if hook is not None:
                hook()
        return status

    def release(self, handle: Handle) -> None:
        self._inner.release(handle)

    def recreate(self) -> None:
        self._inner.recreate()
        self._regions_of.clear()

    def close(self) -> None:
        self._inner.close()
