"""Looks at a folder of which a part cannot be read: nothing that is there is forgotten, or swept away."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from common.kv_cache.tiers.stored_prefix import StoredPrefix
from common.node.tiers.prefix_objects import PrefixObjects
from common.node.tiers.scanner import TierScanner
from common.tiers import folder as folder_module
from common.tiers.catalogue import Catalogue
from common.tiers.folder import ObjectFolder
from common.tiers.folder_watch import FolderWatch
from tests.unit.tiers.test_catalogue import DEEP, FULL, MODEL

SECRET = b"s" * 32


@dataclass
class Scan:
    """A scanner over a folder with one prefix, ``DEEP``, that somebody else wrote long ago; looks when it is told."""

    folder: Path
    whole: list[StoredPrefix] = field(default_factory=list)
    useless: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        store = ObjectFolder(self.folder, SECRET, syncs=False)
        for header in DEEP:
            store.put(header, [memoryview(bytes(header.payload_bytes))])
        self.catalogue = Catalogue(16, [FULL])
        self.scanner = TierScanner(
            store, FolderWatch(store, MODEL), cast(PrefixObjects, None), self.catalogue, self._on_change,
            self.useless.append,
        )  # fmt: skip

    def _on_change(self, whole: Sequence[StoredPrefix], gone: Sequence[bytes]) -> None:
        assert not gone
        self.whole += whole

    def look(self) -> None:
        self.scanner._look()

    def check_whole(self) -> None:
        assert [prefix.position for prefix in self.whole] == [595]
        assert self.catalogue.useless() == []
        assert len(list(self.folder.rglob("*.kv"))) == len(DEEP)


@pytest.fixture
def scan(tmp_path: Path) -> Scan:
    return Scan(tmp_path)


def test_look_when_a_part_of_the_folder_cannot_be_listed_once_then_nothing_is_lost_or_swept(
    scan: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = max(path for path in scan.folder.iterdir() if path.is_dir())  # looked at last
    iterdir = Path.iterdir

    def fail(self: Path) -> Iterator[Path]:
        if self == refused:
            raise OSError(errno.ESTALE, "injected")
        return iterdir(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fail)
        with pytest.raises(OSError, match="injected"):
            scan.look()
    assert not scan.scanner.has_looked
    scan.look()
    scan.check_whole()


@pytest.mark.parametrize("name", ["open", "fstat", "pread"])
@pytest.mark.parametrize(
    ("number", "useless"), [(errno.EMFILE, [{"io": 1}]), (errno.ESTALE, []), (errno.EIO, [{"failing": 1}])]
)
def test_look_when_the_system_refuses_a_file_once_then_it_stays_and_is_found_next_time(
    scan: Scan, monkeypatch: pytest.MonkeyPatch, name: str, number: int, useless: list[dict[str, int]]
) -> None:
    call, calls = getattr(os, name), itertools.count()

    def refuse_first(*args: Any) -> Any:
        if not next(calls):
            raise OSError(number, "injected")
        return call(*args)

    monkeypatch.setattr(folder_module.os, name, refuse_first)
    scan.look()
    assert (scan.whole, scan.useless) == ([], useless)
    scan.look()
    scan.check_whole()
    assert scan.useless == useless


def test_look_when_a_file_cannot_be_read_ever_then_it_is_told_once_and_opened_when_its_sub_folder_changes(
    scan: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in scan.folder.iterdir():
        os.utime(folder, (0, 0))
    bad, open_file, opened = max(scan.folder.rglob("*.kv")), os.open, list[Path]()

    def fail(path: Any, *args: Any, **fields: Any) -> int:
        if path == bad:
            opened.append(path)
            raise OSError(errno.EIO, "injected")
        return open_file(path, *args, **fields)

    monkeypatch.setattr(folder_module.os, "open", fail)
    scan.look()
    assert len(list(scan.folder.rglob("*.kv"))) == len(DEEP)  # nothing is swept before it was tried again
    for _ in range(3):
        scan.look()
    assert (scan.whole, scan.useless, len(opened)) == ([], [{"failing": 1}], 2)
    assert list(scan.folder.rglob("*.kv")) == [bad]  # sweeps go on: what needed it is useless, and it stays
    monkeypatch.undo()
    scan.look()
    assert scan.catalogue.useless() == []  # not opened again
    store = ObjectFolder(scan.folder, SECRET, syncs=False)
    for header in DEEP:
        store.put(header, [memoryview(bytes(header.payload_bytes))])
    scan.look()
    scan.check_whole()
    assert scan.useless == [{"failing": 1}]


def test_look_when_an_object_of_a_shared_folder_is_of_another_key_then_it_is_opened_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = DEEP[0]
    ObjectFolder(tmp_path, b"another cluster's secret").put(header, [memoryview(bytes(header.payload_bytes))])
    store = ObjectFolder(tmp_path, SECRET, is_shared=True)
    watch = FolderWatch(store, MODEL)
    assert watch.look().useless == {"header": 1}
    monkeypatch.setattr(store, "look", None)
    assert watch.look().useless == {}  # though the sub-folder has just changed, and is listed again
    assert len(list(tmp_path.rglob("*.kv"))) == 1
