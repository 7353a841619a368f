"""Objects of a tier's folder: whole or absent, each damage found, nothing left over, no wait for a hung disk."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.tiers import folder as folder_module
from common.tiers.folder import TEMPORARY, ObjectFolder, open_folder
from common.tiers.folder_watch import FolderWatch
from common.tiers.object_header import (
    HEADER_BYTES,
    MAX_TAIL_TOKENS,
    ObjectHeader,
    ObjectKind,
    decode_header,
    has_room,
    object_name,
)
from common.tiers.secrets import SECRET_FILE, derived_secret, folder_secret
from common.tiers.store import ObjectReadError, ObjectStore, ObjectWriteError
from common.tiers.timed_reads import TimedReads

SECRET = derived_secret("cluster key")
MODEL = b"m" * 32
EXTENT = ObjectHeader(ObjectKind.EXTENT, MODEL, 0, b"k" * 32, b"p" * 32, 512, 4096, start=16, num_blocks=16)
STATE = ObjectHeader(
    ObjectKind.STATE, MODEL, 0, b"s" * 32, b"k" * 32, 515, 1000, history=(256, 2), origin="semantic",
    tail_tokens=(1, 2, 3), row_bytes=64,
)  # fmt: skip
TAIL = ObjectHeader(ObjectKind.TAIL, MODEL, 0, b"s" * 32, b"k" * 32, 515, 300)


def payload_of(header: ObjectHeader) -> bytes:
    return random.Random(header.kind).randbytes(header.payload_bytes)


def buffers_of(data: bytes, *cuts: int) -> list[memoryview]:
    edges = [0, *cuts, len(data)]
    return [memoryview(data)[start:end] for start, end in itertools.pairwise(edges)]


def put(store: ObjectStore, header: ObjectHeader) -> None:
    assert store.put(header, buffers_of(payload_of(header), 7, 7, 200)) == HEADER_BYTES + header.payload_bytes


def get(store: ObjectStore, header: ObjectHeader) -> bytes:
    """In two buffers. Raises ObjectReadError."""
    into = bytearray(header.payload_bytes)
    store.get(header, [memoryview(into)[:100], memoryview(into)[100:]])
    return bytes(into)


def path_of(root: Path, header: ObjectHeader) -> Path:
    name = object_name(SECRET, header)
    return root / name[:2] / f"{name}.kv"


def read_reason(store: ObjectStore, header: ObjectHeader) -> str:
    try:
        return "" if get(store, header) == payload_of(header) else "WRONG"
    except ObjectReadError as exc:
        return exc.reason


@pytest.fixture
def store(tmp_path: Path) -> ObjectFolder:
    store = ObjectFolder(tmp_path, SECRET)
    for header in (EXTENT, STATE, TAIL):
        put(store, header)
    return store


@pytest.mark.parametrize("header", [EXTENT, STATE, TAIL])
def test_object_when_written_then_it_is_read_back_and_for_its_owner_alone(
    store: ObjectFolder, tmp_path: Path, header: ObjectHeader
) -> None:
    assert get(store, header) == payload_of(header)
    path = path_of(tmp_path, header)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_size == HEADER_BYTES + header.payload_bytes
    asked = replace(header, history=(0, 0), origin="")
    assert store.get(asked, [memoryview(bytearray(header.payload_bytes))]) == header
    assert sorted(map(repr, store.scan(MODEL))) == sorted(map(repr, (EXTENT, STATE, TAIL)))
    assert list(store.scan(b"x" * 32)) == []


@pytest.mark.parametrize("header", [EXTENT, STATE, TAIL])
def test_byte_when_any_is_flipped_then_the_read_is_refused(
    store: ObjectFolder, tmp_path: Path, header: ObjectHeader
) -> None:
    path, rng = path_of(tmp_path, header), random.Random(1)
    whole = path.read_bytes()
    row_start = len(whole) - header.row_bytes
    places = {*range(0, 300, 3), *range(HEADER_BYTES - 40, HEADER_BYTES + 40), len(whole) - 1, row_start - 1}
    places |= {rng.randrange(len(whole)) for _ in range(60)} | set(range(row_start, len(whole), 5))
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert read_reason(store, header) == ("header" if place < HEADER_BYTES else "digest"), place
    path.write_bytes(whole)
    assert read_reason(store, header) == ""


def test_file_when_cut_or_longer_then_the_read_is_refused_and_a_scan_deletes_it(
    store: ObjectFolder, tmp_path: Path
) -> None:
    path = path_of(tmp_path, EXTENT)
    whole = path.read_bytes()
    for data in (b"", whole[:100], whole[:HEADER_BYTES], whole[:-1], whole + b"x"):
        path.write_bytes(data)
        assert read_reason(store, EXTENT) == "short"
    assert "short" in list(store.scan(MODEL))
    assert not path.exists()
    assert read_reason(store, EXTENT) == "missing"
    path.write_bytes(whole[:HEADER_BYTES] + bytes(EXTENT.payload_bytes))  # its full size, and zeros
    assert read_reason(store, EXTENT) == "digest"


@pytest.mark.parametrize(
    "other",
    [
        replace(EXTENT, key=b"o" * 32),
        replace(EXTENT, fingerprint=b"n" * 32),
        replace(EXTENT, parent_key=b"q" * 32),
        replace(EXTENT, group_id=1),
        replace(EXTENT, start=0),
        replace(EXTENT, position=511),
        replace(EXTENT, kind=ObjectKind.TAIL),
        replace(EXTENT, payload_bytes=4000),
        STATE,
    ],
)
def test_valid_object_when_it_lies_under_anothers_name_then_it_is_refused(
    store: ObjectFolder, tmp_path: Path, other: ObjectHeader
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    put(ObjectFolder(elsewhere, SECRET), other)
    shutil.copy(path_of(elsewhere, other), path_of(tmp_path, EXTENT))
    assert read_reason(store, EXTENT) == "other"


def test_state_when_one_node_has_it_with_its_row_and_another_without_then_both_stay_readable(tmp_path: Path) -> None:
    one, other = (ObjectFolder(tmp_path, SECRET, is_shared=True) for _ in range(2))
    bare = replace(STATE, row_bytes=0, payload_bytes=STATE.payload_bytes - STATE.row_bytes)
    put(one, bare)
    assert not other.has(STATE)
    put(other, STATE)
    for each in (one, other):
        assert [read_reason(each, header) for header in (bare, STATE)] == ["", ""]
        assert sorted(map(repr, each.scan(MODEL))) == sorted(map(repr, (bare, STATE)))
    one.delete(bare)
    assert [read_reason(other, header) for header in (bare, STATE)] == ["missing", ""]


@pytest.mark.parametrize("is_shared", [False, True])
def test_state_when_it_has_the_name_from_before_those_without_a_row_had_their_own_then_a_look_gives_it_that(
    tmp_path: Path, is_shared: bool
) -> None:
    store = ObjectFolder(tmp_path, SECRET, is_shared=is_shared)
    bare = replace(STATE, row_bytes=0, payload_bytes=STATE.payload_bytes - STATE.row_bytes)
    put(store, bare)
    path_of(tmp_path, STATE).parent.mkdir(exist_ok=True)
    path_of(tmp_path, bare).rename(path_of(tmp_path, STATE))
    watch = FolderWatch(store, MODEL)
    looks = [watch.look() for _ in range(2)]
    assert [header for changes in looks for header in changes.added] == [bare]
    assert [changes.removed for changes in looks] == [[], []]
    assert read_reason(store, bare) == ""
    assert len(list(tmp_path.rglob("*.kv"))) == 1


def test_object_when_made_without_the_key_then_it_is_refused(store: ObjectFolder, tmp_path: Path) -> None:
    forger = ObjectFolder(tmp_path / "forged", derived_secret("another key"))
    (tmp_path / "forged").mkdir()
    put(forger, EXTENT)
    forged = next((tmp_path / "forged").rglob("*.kv"))
    assert forged.name != path_of(tmp_path, EXTENT).name  # nor is a name told without the key
    shutil.copy(forged, path_of(tmp_path, EXTENT))
    assert read_reason(store, EXTENT) == "header"
    shared = ObjectFolder(tmp_path, SECRET, is_shared=True)
    assert "header" in list(shared.scan(MODEL))
    assert path_of(tmp_path, EXTENT).exists()  # in a shared folder it may be another cluster's
    assert "header" in list(store.scan(MODEL))
    assert not path_of(tmp_path, EXTENT).exists()


def test_file_when_it_cannot_be_read_then_the_read_is_refused(store: ObjectFolder, tmp_path: Path) -> None:
    path = path_of(tmp_path, EXTENT)
    target = path_of(tmp_path, STATE)
    path.unlink()
    assert read_reason(store, EXTENT) == "missing"
    path.mkdir()
    assert read_reason(store, EXTENT) == "unreadable"
    path.rmdir()
    path.symlink_to(target)
    assert read_reason(store, EXTENT) == "unreadable"
    path.unlink()
    os.mkfifo(path)  # would hang who opens it to read
    assert read_reason(store, EXTENT) == "unreadable"
    assert "unreadable" in list(store.scan(MODEL))
    assert list(tmp_path.rglob("*.kv")) != []
    assert not path.exists()


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ESTALE, "missing"), (errno.EIO, "failing"), (errno.EACCES, "failing"), (errno.EMFILE, "io"),
     (errno.ENOMEM, "io"), (errno.EHOSTDOWN, "io"), (errno.ETIMEDOUT, "io"), (errno.ENOTCONN, "io")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["open", "pread", "preadv"])
def test_file_when_the_system_refuses_a_read_then_it_stays_and_is_written_anew_if_it_alone_fails(
    store: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str, name: str
) -> None:
    def fail(*args: Any) -> int:
        raise OSError(number, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.os, name, fail)
        assert read_reason(store, EXTENT) == reason
    assert path_of(tmp_path, EXTENT).exists()
    assert store.has(EXTENT) == (reason != "failing")
    put(store, EXTENT)
    assert store.has(EXTENT)
    assert read_reason(store, EXTENT) == ""


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "io"), (errno.EROFS, "io")]
)
@pytest.mark.parametrize("name", ["pwritev", "fdatasync"])
def test_disk_when_it_refuses_then_nothing_is_left_and_the_older_object_stays(
    store: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str, name: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    calls = []

    def fail(*args: Any) -> int:
        calls.append(args)
        if name == "fdatasync" or len(calls) > 1:
            raise OSError(number, "injected")
        return os.write(args[0], b"x" * 10)  # a short write first: a partial file is there

    monkeypatch.setattr(folder_module.os, name, fail)
    with pytest.raises(ObjectWriteError) as caught:
        store.put(replace(EXTENT, key=b"f" * 32), buffers_of(payload_of(EXTENT)))
    assert caught.value.reason == reason
    with pytest.raises(ObjectWriteError):
        store.put(EXTENT, buffers_of(payload_of(EXTENT)))
    monkeypatch.undo()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == [path for path in before if path.is_file()]
    assert read_reason(store, EXTENT) == ""


def test_write_when_the_system_takes_a_few_bytes_at_a_time_then_all_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(folder_module.os, "pwritev", lambda fd, parts, at: write(fd, [parts[0][:333]], at))
    monkeypatch.setattr(folder_module.os, "preadv", lambda fd, parts, at: read(fd, [parts[0][:77]], at))
    store = ObjectFolder(tmp_path, SECRET)
    put(store, EXTENT)
    assert get(store, EXTENT) == payload_of(EXTENT)


def test_object_when_it_has_more_buffers_than_one_call_takes_then_all_arrive(tmp_path: Path) -> None:
    store, data = ObjectFolder(tmp_path, SECRET), payload_of(EXTENT)
    cuts = range(3, len(data) - 1, 3)
    store.put(EXTENT, buffers_of(data, *cuts))
    into = bytearray(len(data))
    edges = [0, *cuts, len(data)]
    store.get(EXTENT, [memoryview(into)[a:b] for a, b in itertools.pairwise(edges)])
    assert bytes(into) == data


def test_reader_when_the_object_is_deleted_or_written_again_meanwhile_then_it_reads_it_whole(
    store: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv
    for change in (lambda: store.delete(EXTENT), lambda: put(store, EXTENT)):

        def change_first(fd: int, parts: Any, at: int, change: Any = change) -> int:
            change()
            return read(fd, parts, at)

        monkeypatch.setattr(folder_module.os, "preadv", change_first)
        assert read_reason(store, EXTENT) == ""
        monkeypatch.setattr(folder_module.os, "preadv", read)
        put(store, EXTENT)
    store.delete(TAIL)
    store.delete(TAIL)  # whoever came first
    assert read_reason(store, TAIL) == "missing"


WRITER = """
import sys
from pathlib import Path
from tests.unit.tiers.test_folder import *
store, number = ObjectFolder(Path(sys.argv[1]), SECRET), 0
print("writing", flush=True)
while True:
    header = replace(EXTENT, key=number.to_bytes(32, "big"), payload_bytes=4 << 20)
    store.put(header, [memoryview(bytes([number % 251 + 1]) * (4 << 20))])
    number += 1
"""


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.full)])
def test_writer_when_killed_then_what_has_a_name_is_whole_and_the_rest_is_swept(tmp_path: Path, count: int) -> None:
    rng = random.Random(0)
    store = ObjectFolder(tmp_path, SECRET)
    for _ in range(count):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(rng.random() * 0.1)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        found = [each for each in store.scan(MODEL) if isinstance(each, ObjectHeader)]
        for header in found:
            into = bytearray(header.payload_bytes)
            store.get(header, [memoryview(into)])
            assert set(into) == {int.from_bytes(header.key, "big") % 251 + 1}
            store.delete(header)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_temporary_files_when_the_folder_is_shared_then_young_ones_stay(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    young, old = tmp_path / "ab" / "a.1.tmp", tmp_path / "ab" / "b.1.tmp"
    for path in (young, old):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    assert list(ObjectFolder(tmp_path, SECRET, is_shared=True).scan(MODEL)) == ["temporary", "temporary"]
    assert (young.exists(), old.exists()) == (True, False)


class ChangingFolder(ObjectFolder):
    """A writer is at work: ``change`` is called each time between the name of a file and the look into it."""

    change: Callable[[Path], object] = staticmethod(lambda path: None)

    def look(self, path: Path) -> ObjectHeader | str:
        self.change(path)
        return super().look(path)


def test_look_when_a_file_gets_its_name_or_goes_meanwhile_then_that_is_no_damage(tmp_path: Path) -> None:
    store = ChangingFolder(tmp_path, SECRET)
    watch = FolderWatch(store, MODEL)
    for header in (EXTENT, STATE):
        put(store, header)
    written, deleted = path_of(tmp_path, EXTENT), path_of(tmp_path, STATE)
    temporary = written.rename(written.with_name(f"{written.stem}.1.ab{TEMPORARY}"))
    store.change = lambda path: path.rename(written) if path == temporary else path.unlink(missing_ok=True)
    changes = watch.look()
    assert (changes.added, changes.removed, changes.useless) == ([], [], {"missing": 2})
    store.change = lambda path: None
    changes = watch.look()
    assert (changes.added, changes.removed, changes.useless) == ([EXTENT], [], {})
    assert not deleted.exists()


def test_look_when_an_object_goes_and_is_written_again_meanwhile_then_it_stays(tmp_path: Path) -> None:
    class RewrittenFolder(ObjectFolder):
        def _open(self, path: Path) -> int:
            path.unlink()
            try:
                return super()._open(path)
            finally:
                put(self, STATE)

    store, path = RewrittenFolder(tmp_path, SECRET), path_of(tmp_path, STATE)
    put(store, STATE)
    assert store.look(path) == "missing"
    assert path.exists()


def test_folder_when_others_may_read_it_then_it_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    assert open_folder(str(folder)).stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match=r"--kv-tier .* has mode 0750"):
        open_folder(str(folder))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="--kv-tier"):
        open_folder(str(file))


def test_secret_when_asked_for_again_then_it_is_the_same_and_for_its_owner_alone(tmp_path: Path) -> None:
    first = folder_secret(tmp_path)
    assert first == folder_secret(tmp_path) != derived_secret("")
    assert (tmp_path / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [SECRET_FILE]
    (tmp_path / SECRET_FILE).write_bytes(first[:5])  # a crash cut it short
    assert len(folder_secret(tmp_path)) == 32
    assert folder_secret(tmp_path) != first


def test_header_when_its_tail_is_the_longest_then_it_fits() -> None:
    header = replace(STATE, tail_tokens=tuple(range(MAX_TAIL_TOKENS)))
    assert len(header.encode(SECRET, bytes(32))) == HEADER_BYTES


def test_header_when_its_tail_has_rows_of_images_then_they_come_back() -> None:
    rows = (2**255 + 1, 2**256 - 1)
    header = replace(STATE, tail_tokens=(5, *rows, 2**32 - 2))
    assert decode_header(header.encode(SECRET, bytes(32)), SECRET) == (header, bytes(32))
    assert has_room((rows[0],) * (MAX_TAIL_TOKENS // 9))
    assert not has_room((rows[0],) * (MAX_TAIL_TOKENS // 9 + 1))


class Outcomes:
    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.num_delivered = 0
        self.arrived = threading.Event()

    def on_outcome(self, reason: str) -> None:
        self.outcomes.append(reason)
        self.arrived.set()

    def deliver(self) -> None:
        self.num_delivered += 1


def submit(reads: TimedReads, read: Any, timeout_s: float = 30.0) -> Outcomes:
    outcomes = Outcomes()

    def fetch() -> Any:
        read()
        return outcomes.deliver

    reads.submit(fetch, timeout_s, outcomes.on_outcome)
    return outcomes


def fail() -> None:
    raise ObjectReadError("digest")


def test_reads_when_they_end_in_time_then_one_outcome_each() -> None:
    reads = TimedReads()
    good, bad, broken = submit(reads, lambda: None), submit(reads, fail), submit(reads, lambda: 1 / 0)
    for each, reason in ((good, ""), (bad, "digest"), (broken, "io")):
        assert each.arrived.wait(30)
        assert (each.outcomes, each.num_delivered) == ([reason], reason == "")
    reads.close()


def test_read_when_it_hangs_then_a_deadline_and_nothing_is_delivered_and_others_go_on() -> None:
    reads, released = TimedReads(num_threads=2), threading.Event()
    hung = submit(reads, released.wait, 0.05)
    assert hung.arrived.wait(30)
    assert hung.outcomes == ["deadline"]
    beside = submit(reads, lambda: None)
    assert beside.arrived.wait(30)
    assert beside.outcomes == [""]
    second = submit(reads, released.wait, 0.05)
    assert second.arrived.wait(30)
    assert reads.is_stuck
    assert submit(reads, lambda: None).outcomes == ["stuck"]  # at once, on this thread
    released.set()
    while reads.is_stuck:
        time.sleep(0.001)
    after = submit(reads, lambda: None)
    assert after.arrived.wait(30)
    assert after.outcomes == [""]
    for each in (hung, second):
        assert (len(each.outcomes), each.num_delivered) == (1, 0)
    reads.close()


def test_read_when_its_deadline_passes_in_the_queue_then_it_never_begins() -> None:
    reads, released = TimedReads(num_threads=1), threading.Event()
    submit(reads, released.wait)
    began: list[int] = []
    queued = submit(reads, lambda: began.append(1), 0.05)
    assert queued.arrived.wait(30)
    assert queued.outcomes == ["deadline"]
    released.set()
    last = submit(reads, lambda: None)
    assert last.arrived.wait(30)
    assert began == []
    reads.close()
    assert submit(reads, lambda: None).outcomes == ["stuck"]


def test_read_when_what_it_brought_cannot_be_delivered_then_it_has_an_outcome_and_the_thread_goes_on() -> None:
    reads, outcomes = TimedReads(num_threads=1), Outcomes()

    def deliver() -> None:
        raise ValueError("another size")

    reads.submit(lambda: deliver, 30.0, outcomes.on_outcome)
    assert outcomes.arrived.wait(30)
    assert outcomes.outcomes == ["io"]
    after = submit(reads, lambda: None)
    assert after.arrived.wait(30)
    assert after.outcomes == [""]
    reads.close()
