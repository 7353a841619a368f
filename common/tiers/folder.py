"""Objects as files of one folder, written whole or not at all, and believed only after their digest was compared.

A write: 1 a temporary name, 2 payload, then header, 3 fdatasync, 4 rename, 5 fsync of the folder. So a file under its
name was whole once; whether it still is, each read says. A crash leaves temporary names, which ``scan`` deletes; a disk
that lies about fdatasync leaves zeros, which the digest finds. Every method blocks: call it on a thread.

Two writers of one object write the same bytes; the last rename wins. Who deletes while another reads takes nothing from
the reader: it has the file open.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from common.errors import ConfigError
from common.tiers.folder_use import FolderRoom
from common.tiers.object_header import (
    HEADER_BYTES,
    BadHeaderError,
    ObjectHeader,
    decode_header,
    former_name,
    object_name,
)
from common.tiers.store import ObjectReadError, ObjectWriteError

TEMPORARY = ".tmp"
SUFFIX = ".kv"
MAX_BUFFERS = 512
"""Buffers of one ``preadv`` or ``pwritev``: below IOV_MAX, which is 1,024 on Linux."""
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_FILE_ERRORS = (errno.ELOOP, errno.ENXIO)
"""Of opening a symbolic link, or a socket."""
GONE_ERRORS = (errno.ENOENT, errno.ESTALE)
"""ESTALE: another client of a file server deleted it."""
PASSING_ERRORS = frozenset(
    (
        errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN,
        errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
    )
)  # fmt: skip
"""Of this process, or of the whole filesystem. Any other error is taken for one of that file alone."""
OLD_S = 3600.0
"""Age at which a file that another process may have begun is taken for a dead one's."""


class ObjectFolder:
    """``common.tiers.store.ObjectStore``. ``is_shared``: other clusters may write here too; what cannot be read with
    this secret may be theirs. ``alone_until``: files that are older, in ``time.time``, are no other living process's;
    default: all, in a shared folder none. Temporaries of others are left alone for an hour. ``room``: the bound that
    all who write there keep; ``FolderWatch`` looks for it."""

    def __init__(
        self,
        folder: Path,
        secret: bytes,
        *,
        is_shared: bool = False,
        alone_until: float | None = None,
        syncs: bool = True,
        room: FolderRoom | None = None,
    ) -> None:
        self.folder = folder
        self._alone_until = alone_until if alone_until is not None else 0.0 if is_shared else math.inf
        self._secret = secret
        self.is_shared = is_shared
        self._syncs = syncs
        self.room = room
        self._failing: set[str] = set()
        """Names of what could not be read: it is written again, over the file that is there."""

    @property
    def place(self) -> str:
        return str(self.folder)

    def put(
        self, header: ObjectHeader, buffers: Sequence[memoryview], is_unchanged: Callable[[], bool] = lambda: True
    ) -> int:
        assert sum(buffer.nbytes for buffer in buffers) == header.payload_bytes
        name = object_name(self._secret, header)
        path = self._path(name)
        if self.room is not None and not self.room.take(HEADER_BYTES + header.payload_bytes):
            raise ObjectWriteError("others")
        temporary = path.with_name(f"{name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
            try:
                digest = hmac.new(self._secret, digestmod=sha256)
                for buffer in buffers:
                    digest.update(buffer)
                if not is_unchanged():
                    raise ObjectWriteError("stale")
                _write_all(descriptor, buffers, HEADER_BYTES)
                _write_all(descriptor, [memoryview(header.encode(self._secret, digest.digest()))], 0)
                if self._syncs:
                    os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
            temporary.replace(path)
            if self._syncs:
                _sync_folder(path.parent)
            self._failing.discard(name)
        except (OSError, ObjectWriteError) as exc:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if self.room is not None:
                self.room.give_back(HEADER_BYTES + header.payload_bytes)
            if isinstance(exc, ObjectWriteError):
                raise
            raise ObjectWriteError("full" if exc.errno in FULL_ERRORS else "io") from exc
        return HEADER_BYTES + header.payload_bytes

    def get(self, wanted: ObjectHeader, buffers: Sequence[memoryview]) -> ObjectHeader:
        path = self._path(object_name(self._secret, wanted))
        descriptor = self._open(path)
        try:
            header, payload_digest, size = self._read_header(descriptor)
            stored = replace(header, history=wanted.history, origin=wanted.origin)
            if stored != wanted or sum(buffer.nbytes for buffer in buffers) != wanted.payload_bytes:
                raise ObjectReadError("other")
            if size != HEADER_BYTES + wanted.payload_bytes:
                raise ObjectReadError("short")
            _read_all(descriptor, buffers, HEADER_BYTES)
        except OSError as exc:
            raise ObjectReadError(self._reason(path, exc)) from exc
        finally:
            os.close(descriptor)
        digest = hmac.new(self._secret, digestmod=sha256)
        for buffer in buffers:
            digest.update(buffer)
        if not hmac.compare_digest(digest.digest(), payload_digest):
            raise ObjectReadError("digest")
        return header

    def has(self, header: ObjectHeader) -> bool:
        """Whether there is a plain file of that name, and no read of it has failed. Raises OSError."""
        name = object_name(self._secret, header)
        with contextlib.suppress(FileNotFoundError):
            return name not in self._failing and stat.S_ISREG(self._path(name).lstat().st_mode)
        return False

    def touch(self, header: ObjectHeader) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._path(object_name(self._secret, header)))

    def age_s(self, header: ObjectHeader) -> float:
        with contextlib.suppress(OSError):
            return time.time() - self._path(object_name(self._secret, header)).stat().st_mtime
        return 0.0

    def delete(self, header: ObjectHeader) -> None:
        name = object_name(self._secret, header)
        self._unlink(self._path(name))
        self._failing.discard(name)

    def sweep(self, header: ObjectHeader) -> bool:
        path = self._path(object_name(self._secret, header))
        with contextlib.suppress(FileNotFoundError):
            if self._is_nobodys(path):
                return self._unlink(path)
        return False

    def scan(self, fingerprint: bytes) -> Iterator[ObjectHeader | str]:
        """Headers of what is here of that model, in no order; of the rest the reasons why it is of no use
        (``look``). Raises OSError."""
        for folder in self.folders():
            for path in sorted(folder.iterdir()):
                result = self.look(path)
                if isinstance(result, str) or result.fingerprint == fingerprint:
                    yield result

    def folders(self) -> list[Path]:
        """Where objects are. Raises OSError."""
        return sorted(path for path in self.folder.iterdir() if path.is_dir() and not path.is_symlink())

    def look(self, path: Path) -> ObjectHeader | str:
        """What a file says of itself. What is damaged, cut short or a dead writer's is deleted: then why. "missing": it
        went, or a writer gave it its name, since it was listed. "io": the system would not say; "failing": nor is it
        likely to, of this file."""
        try:
            if path.suffix != SUFFIX:
                if self._is_nobodys(path):
                    path.unlink()
                return "temporary"
            descriptor = self._open(path)
            try:
                header, _, size = self._read_header(descriptor)
            finally:
                os.close(descriptor)
            reason = ""
            if size != HEADER_BYTES + header.payload_bytes:
                reason = "short"
            elif path.name != (name := object_name(self._secret, header)) + SUFFIX:
                if path.name == former_name(self._secret, header) + SUFFIX:
                    self._rename(path, name)
                    return "missing"  # from there; it is found where it is now
                reason = "other"
            if not reason:
                return header
        except ObjectReadError as exc:
            reason = exc.reason
            if reason in ("missing", "io", "failing"):
                return reason  # by now there may be a new one under that name; or nothing is known of it
        except OSError as exc:
            return self._reason(path, exc)
        # In a shared folder, what cannot be read with this key may be another cluster's.
        if not (self.is_shared and reason == "header"):
            with contextlib.suppress(OSError):
                path.unlink()
        return reason

    def _rename(self, path: Path, name: str) -> None:
        """Raises OSError."""
        target = self._path(name)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        path.replace(target)
        if self._syncs:
            _sync_folder(target.parent)
            _sync_folder(path.parent)

    def _unlink(self, path: Path) -> bool:
        try:
            num_bytes = path.lstat().st_size
            path.unlink()
        except FileNotFoundError:
            return False
        if self.room is not None:
            self.room.give_back(num_bytes)
        return True

    def _is_nobodys(self, path: Path) -> bool:
        written_s = path.lstat().st_mtime
        return written_s < self._alone_until or time.time() - written_s > OLD_S

    def _open(self, path: Path) -> int:
        try:
            # NONBLOCK: a pipe under that name must not hang the reader.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as exc:
            raise ObjectReadError("unreadable" if exc.errno in NO_FILE_ERRORS else self._reason(path, exc)) from exc
        return descriptor

    def _reason(self, path: Path, exc: OSError) -> str:
        """Why a file could not be read."""
        if exc.errno in GONE_ERRORS:
            return "missing"
        if exc.errno in PASSING_ERRORS:
            return "io"
        self._failing.add(path.stem)
        return "failing"

    def _read_header(self, descriptor: int) -> tuple[ObjectHeader, bytes, int]:
        """Raises ObjectReadError or OSError."""
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ObjectReadError("unreadable")
        try:
            header, digest = decode_header(os.pread(descriptor, HEADER_BYTES, 0), self._secret)
        except BadHeaderError as exc:
            raise ObjectReadError("short" if exc.reason == "short" else "header") from exc
        return header, digest, status.st_size

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / (name + SUFFIX)


def open_folder(path: str) -> Path:
    """Makes the folder, for its owner alone. Raises ConfigError: it cannot be used, or others may read it."""
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        probe = folder / f"probe.{os.getpid()}{TEMPORARY}"
        probe.touch(mode=0o600)
        probe.unlink()
    except OSError as exc:
        raise ConfigError(f"--kv-tier {path}: {exc.strerror}", param="--kv-tier") from exc
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"--kv-tier {path} has mode {mode:04o} and owner {status.st_uid}: others could read what clients asked; it "
            f"must be 0700 and belong to user {os.getuid()}",
            param="--kv-tier",
        )
    return folder


def _write_all(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    for part in _parts(buffers):
        while part:
            offset += (num_bytes := os.pwritev(descriptor, part, offset))
            part = _rest(part, num_bytes)


def _read_all(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    for part in _parts(buffers):
        while part:
            num_bytes = os.preadv(descriptor, part, offset)
            if num_bytes == 0:
                raise ObjectReadError("short")
            offset += num_bytes
            part = _rest(part, num_bytes)


def _parts(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    flat = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    for start in range(0, len(flat), MAX_BUFFERS):
        yield flat[start : start + MAX_BUFFERS]


def _rest(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the buffers behind their first ``num_bytes``."""
    for number, buffer in enumerate(buffers):
        if num_bytes < buffer.nbytes:
            return [buffer[num_bytes:], *buffers[number + 1 :]]
        num_bytes -= buffer.nbytes
    return []


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
