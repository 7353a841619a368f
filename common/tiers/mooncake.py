"""Objects in a Mooncake Store: memory of many machines behind one master. https://github.com/kvcache-ai/Mooncake

An object is two values: NAME is its payload, NAME.h its header, which is put last and says that it is whole. The store
keeps no promise that we rely on: a value that is gone, empty, short, or not what was put is found by length and digest,
as on a disk. The master evicts by itself, so what is looked up may be missing, and what a start finds is what is left.

Every method blocks, for as long as the store lets a call wait: on threads that have their own deadlines.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from common.errors import ConfigError, how_to_install
from common.tiers.object_header import HEADER_BYTES, BadHeaderError, ObjectHeader, decode_header, object_name
from common.tiers.store import Changes, ObjectReadError, ObjectWriteError

OPTION = "--kv-tier"
HEADER = ".h"
END = memoryview(b".")
"""Behind each payload: the store takes no empty value."""
NO_SPACE = -200
"""What the store answers when no segment has room, or all that is there is leased."""
CONNECT_S = 2.0
CLOSE_S = 2.0
LOOK_TIMEOUT_S = 5.0
MAX_LISTING_BYTES = 64 << 20
BUFFERED_OBJECTS = 6
"""Objects that are under way at a time: one is written, four are read, and one more."""


def connect(master: str, admin_port: int, lent_bytes: int, largest_object_bytes: int) -> Any:
    """A client of the store at ``master`` (HOST:PORT), to which this process lends ``lent_bytes``. Raises ConfigError:
    the package is not installed, or there is no master."""
    os.environ.setdefault("GLOG_minloglevel", "2")  # before the import: its log is no log of ours
    try:
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found,unused-ignore]
    except ImportError as exc:
        hint = f"{how_to_install('mooncake')}; and the system's libibverbs1"
        raise ConfigError(f"{OPTION} mooncake:{master}: {exc} ({hint})", param=OPTION) from exc
    host, _, port = master.rpartition(":")
    try:
        # The client itself would try for a minute and a half.
        for number in (int(port), admin_port):
            with socket.create_connection((host, number), CONNECT_S) as probe:
                own_host = probe.getsockname()[0]
    except OSError as exc:
        raise ConfigError(f"{OPTION} mooncake:{master}: no master at port {number}: {exc}", param=OPTION) from exc
    client = MooncakeDistributedStore()
    buffer_bytes = BUFFERED_OBJECTS * (largest_object_bytes + HEADER_BYTES) + (16 << 20)
    status = client.setup(own_host, "P2PHANDSHAKE", lent_bytes, buffer_bytes, "tcp", "", master)
    if status != 0:
        raise ConfigError(f"{OPTION} mooncake:{master}: its client answers {status}", param=OPTION)
    return client


class MooncakeStore:
    """``common.tiers.store.ObjectStore``. ``client``: a ``mooncake.store.MooncakeDistributedStore`` that is set up."""

    def __init__(self, client: Any, place: str, secret: bytes) -> None:
        self.place = place
        self._client = client
        self._secret = secret
        self._num_calls = 0
        self._changed = threading.Condition()
        self._is_closed = False

    def put(
        self, header: ObjectHeader, buffers: Sequence[memoryview], is_unchanged: Callable[[], bool] = lambda: True
    ) -> int:
        digest = hmac.new(self._secret, digestmod=sha256)
        for buffer in buffers:
            digest.update(buffer)
        name = object_name(self._secret, header)
        if not is_unchanged():
            raise ObjectWriteError("stale")
        head = memoryview(header.encode(self._secret, digest.digest()))
        # A value of that name may be there, and damaged: it is replaced.
        for key, parts in ((name, [*buffers, END]), (name + HEADER, [head])):
            try:
                with self._use() as client:
                    status = client.upsert_parts(key, *(part.cast("B") for part in parts if part.nbytes))
                    if status != 0:
                        _remove(client, name)
            except OSError as exc:
                raise ObjectWriteError("io") from exc
            if status != 0:
                raise ObjectWriteError("full" if status == NO_SPACE else "io")
        return HEADER_BYTES + header.payload_bytes

    def get(self, wanted: ObjectHeader, buffers: Sequence[memoryview]) -> ObjectHeader:
        name = object_name(self._secret, wanted)
        header, payload_digest = self.header(name)
        if replace(header, history=wanted.history, origin=wanted.origin) != wanted:
            raise ObjectReadError("other")
        value = memoryview(self._value(name))
        if len(value) != wanted.payload_bytes + len(END):
            raise ObjectReadError("short" if value else "missing")
        payload = value[: wanted.payload_bytes]
        if not hmac.compare_digest(hmac.digest(self._secret, payload, "sha256"), payload_digest):
            raise ObjectReadError("digest")
        start = 0
        for buffer in buffers:
            buffer[:] = payload[start : start + buffer.nbytes]
            start += buffer.nbytes
        return header

    def header(self, name: str) -> tuple[ObjectHeader, bytes]:
        """And the payload's digest. Raises ObjectReadError."""
        raw = self._value(name + HEADER)
        if not raw:
            raise ObjectReadError("missing")
        try:
            header, digest = decode_header(raw, self._secret)
        except BadHeaderError as exc:
            raise ObjectReadError("short" if exc.reason == "short" else "header") from exc
        if object_name(self._secret, header) != name:
            raise ObjectReadError("other")
        return header, digest

    def has(self, header: ObjectHeader) -> bool:
        with self._use() as client:
            return bool(client.is_exist(object_name(self._secret, header) + HEADER) == 1)

    def touch(self, header: ObjectHeader) -> None:
        """Reading it told the master."""

    def age_s(self, header: ObjectHeader) -> float:
        return 0.0

    def delete(self, header: ObjectHeader) -> None:
        with self._use() as client:
            _remove(client, object_name(self._secret, header))

    def sweep(self, header: ObjectHeader) -> bool:
        """Never: whose it is cannot be seen, and the master lets go what nobody reads."""
        return False

    def close(self) -> None:
        """What this process lent is gone with it. Without a master calls wait for one for minutes: then the end of the
        process ends them, because a client that is closed beneath a call crashes."""
        with self._changed:
            self._is_closed = True
            is_idle = self._changed.wait_for(lambda: not self._num_calls, CLOSE_S)
        if is_idle:
            thread = threading.Thread(target=self._client.close, name="mooncake-close", daemon=True)
            thread.start()
            thread.join(CLOSE_S)

    def _value(self, key: str) -> bytes:
        """Empty when there is none. Raises ObjectReadError."""
        try:
            with self._use() as client:
                return bytes(client.get(key))
        except OSError as exc:
            raise ObjectReadError("io") from exc

    @contextlib.contextmanager
    def _use(self) -> Iterator[Any]:
        """Raises OSError: it is closed."""
        with self._changed:
            if self._is_closed:
                raise OSError("the store is closed")
            self._num_calls += 1
        try:
            yield self._client
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()


def _remove(client: Any, name: str) -> None:
    for key in (name + HEADER, name):
        client.remove(key, True)  # also while somebody reads it: what is read is checked


class MooncakeWatch:
    """``common.tiers.store.Watch``: by the master's list of names. ``fingerprint``: of the model whose objects are
    told."""

    def __init__(self, store: MooncakeStore, host: str, admin_port: int, fingerprint: bytes) -> None:
        self._store = store
        self._host = host
        self._admin_port = admin_port
        self._fingerprint = fingerprint
        self._known: dict[str, ObjectHeader | None] = {}  # by name; None: no object of ours

    def look(self) -> Changes:
        names = self._names()
        changes = Changes()
        for name in self._known.keys() - names:
            header = self._known.pop(name)
            if header is not None:
                changes.removed.append(header)
        for name in names - self._known.keys():
            try:
                header = self._store.header(name)[0]
            except ObjectReadError as exc:
                if exc.reason != "missing":  # gone meanwhile
                    self._known[name] = None
                    changes.useless[exc.reason] += 1
                continue
            self._known[name] = header if header.fingerprint == self._fingerprint else None
            if header.fingerprint == self._fingerprint:
                changes.added.append(header)
        return changes

    def _names(self) -> set[str]:
        """Of objects that are whole, as far as the master knows. Raises OSError."""
        connection = http.client.HTTPConnection(self._host, self._admin_port, timeout=LOOK_TIMEOUT_S)
        try:
            connection.request("GET", "/get_all_keys")
            keys = set(connection.getresponse().read(MAX_LISTING_BYTES).decode("ascii", "replace").split())
        except http.client.HTTPException as exc:
            raise OSError(f"the master's list of names: {exc!r}") from exc
        finally:
            connection.close()
        return {key.removesuffix(HEADER) for key in keys if key.endswith(HEADER) and key.removesuffix(HEADER) in keys}
