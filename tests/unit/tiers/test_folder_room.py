"""A folder that several write stays within its size, whoever looks, deletes or dies when."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from common.tiers import folder_use
from common.tiers.folder import ObjectFolder
from common.tiers.folder_use import FolderRoom
from common.tiers.folder_watch import FolderWatch
from common.tiers.object_header import HEADER_BYTES, ObjectHeader, ObjectKind
from common.tiers.store import ObjectWriteError

SECRET, MODEL = b"s" * 32, b"m" * 32
SIZE = 20 * HEADER_BYTES


class Writer:
    """One of several users of a folder."""

    def __init__(self, folder: Path) -> None:
        self.store = ObjectFolder(folder, SECRET, syncs=False, room=FolderRoom(folder, SIZE))
        self.watch = FolderWatch(self.store, MODEL)


def extent(number: int) -> ObjectHeader:
    return ObjectHeader(
        ObjectKind.EXTENT, MODEL, 0, b"%032d" % number, b"p" * 32, 16, 100 + number % 3000, num_blocks=1
    )


def put(writer: Writer, header: ObjectHeader) -> bool:
    try:
        writer.store.put(header, [memoryview(bytes(header.payload_bytes))])
    except ObjectWriteError as exc:
        if exc.reason != "others":
            raise
        return False
    return True


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.kv"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_folder_when_several_write_delete_look_and_die_then_it_never_exceeds_its_size(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    writers = [Writer(tmp_path) for _ in range(3)]
    there: list[ObjectHeader] = []
    num_put = num_refused = 0
    for number in range(400):
        which = rng.randrange(3)
        action = rng.random()
        if action < 0.5:
            is_put = put(writers[which], extent(number))
            num_put += is_put
            num_refused += not is_put
            there += [extent(number)] * is_put
        elif action < 0.7 and there:
            header = there.pop(rng.randrange(len(there)))
            for writer in rng.sample(writers, rng.choice([1, 1, 2])):  # two at a time delete it once
                writer.store.delete(header)
        elif action < 0.95:
            writers[which].watch.look()
        else:
            writers[which] = Writer(tmp_path)  # killed and started again
        assert num_bytes(tmp_path) <= SIZE
    assert num_put > 30 < num_refused
    # And what one may write now is what is left, for each of them.
    for writer in writers:
        writer.watch.look()
    for header in there:
        writers[0].store.delete(header)
    for writer in writers:
        writer.watch.look()
    assert put(writers[1], extent(SIZE))
    assert num_bytes(tmp_path) < SIZE


def test_folder_when_look_and_delete_cross_then_nothing_is_counted_as_gone_twice(tmp_path: Path) -> None:
    one, other = Writer(tmp_path), Writer(tmp_path)
    assert not put(one, extent(1))  # it has not looked yet
    for writer in (one, other):
        writer.watch.look()
    headers = [extent(number) for number in range(15)]
    assert all(put(one, header) for header in headers)
    other.watch.look()
    assert not put(other, extent(10**6))  # what was put since its look before counts twice: it may have been under way
    room = other.store.room
    assert room is not None
    room.begin_look()
    one.store.delete(headers[0])  # the look does not see it any more
    room.end_look(num_bytes(tmp_path))
    while put(other, extent(random.Random(num_bytes(tmp_path)).randrange(10**6))):
        assert num_bytes(tmp_path) <= SIZE
    assert num_bytes(tmp_path) > SIZE - 3 * HEADER_BYTES


def test_write_when_it_fails_then_its_room_is_given_back(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.watch.look()
    for number in range(100):
        with pytest.raises(ObjectWriteError, match="stale"):
            writer.store.put(extent(number), [memoryview(bytes(extent(number).payload_bytes))], lambda: False)
    assert put(writer, extent(1))


def test_room_when_a_stopped_process_has_the_lock_then_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_use, "LOCK_S", 0.02)
    writer, other = Writer(tmp_path), Writer(tmp_path)
    writer.watch.look()
    assert other.store.room is not None
    with other.store.room._counts():
        assert not put(writer, extent(1))
    assert put(writer, extent(1))
    status = (tmp_path / folder_use.USAGE_FILE).stat()
    assert (status.st_mode & 0o777, status.st_size) == (0o600, 16)


def test_room_when_it_is_closed_while_a_look_goes_on_then_nothing_may_be_put_and_nothing_breaks(tmp_path: Path) -> None:
    room = FolderRoom(tmp_path, 1000)
    room.begin_look()
    room.close()
    room.end_look(0)
    room.give_back(10)
    assert not room.take(10)
    room.close()
