"""What appears in a folder of objects and what goes, look by look: by this process or by others.

A file that is new is looked into once, one that cannot be read once more and then when its sub-folder changes; a
sub-folder whose time of change is as it was is not even listed. So a look at a folder in which nothing happened costs a
``stat`` for each of its 256 sub-folders.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from common.tiers.folder import ObjectFolder
from common.tiers.object_header import ObjectHeader, file_bytes
from common.tiers.store import Changes

SETTLED_S = 2.0
"""A sub-folder that changed this short before it was listed is listed again: times of change are that coarse on some
filesystems."""

PASSING = ("temporary", "missing", "io")
"""What a look finds that may be another thing at the next one, though the sub-folder does not change."""


@dataclass(slots=True)
class _Listing:
    changed_ns: int = 0
    is_settled: bool = False
    headers: dict[str, ObjectHeader | None] = field(default_factory=dict)  # by file name; None: no object of ours
    failing: set[str] = field(default_factory=set)
    """Names of files that cannot be read; each is counted once."""


class FolderWatch:
    """``common.tiers.store.Watch``. ``fingerprint``: of the model whose objects are told."""

    def __init__(self, store: ObjectFolder, fingerprint: bytes) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._listings: dict[Path, _Listing] = {}
        self._num_bytes = 0

    def look(self) -> Changes:
        changes = Changes()
        room = self._store.room
        if room is not None:
            room.begin_look()
        folders = self._store.folders()
        # Noted when all of it is known: nobody would hear of what a failed look found.
        listings: dict[Path, _Listing] = {}
        for folder in folders:
            listed = self._list(folder)
            if listed is not None:
                listings[folder], names = listed
                self._look_into(folder, listings[folder], names, changes)
        for folder in self._listings.keys() - set(folders):
            changes.removed += filter(None, self._listings.pop(folder).headers.values())
        self._listings |= listings
        self._num_bytes += sum(map(file_bytes, changes.added)) - sum(map(file_bytes, changes.removed))
        if room is not None:
            room.end_look(self._num_bytes)
        return changes

    def _list(self, folder: Path) -> tuple[_Listing, set[str]] | None:
        """What is known, and the names that are there; None: it is as it was, or gone. Raises OSError."""
        known = self._listings.get(folder, _Listing())
        try:
            now_s, changed_ns = time.time(), folder.stat().st_mtime_ns
            if known.is_settled and changed_ns == known.changed_ns:
                return None
            names = {path.name for path in folder.iterdir()}
        except FileNotFoundError:
            return None  # gone meanwhile: the next look tells
        is_settled = now_s - changed_ns / 1e9 > SETTLED_S
        return _Listing(changed_ns, is_settled, dict(known.headers), set(known.failing)), names

    def _look_into(self, folder: Path, listing: _Listing, names: set[str], changes: Changes) -> None:
        for name in listing.headers.keys() - names:
            header = listing.headers.pop(name)
            if header is not None:
                changes.removed.append(header)
        listing.failing &= names
        for name in names - listing.headers.keys():
            found = self._store.look(folder / name)
            if found == "failing":
                if name in listing.failing:
                    continue  # it may be written again: only then the sub-folder changes
                listing.failing.add(name)
                listing.is_settled = False
                changes.useless[found] += 1
                continue
            listing.failing.discard(name)
            if isinstance(found, str):
                changes.useless[found] += 1
                if found in PASSING:
                    listing.is_settled = False
                elif found == "header" and self._store.is_shared:
                    listing.headers[name] = None  # it stays: another cluster's
            elif found.fingerprint == self._fingerprint:
                listing.headers[name] = found
                changes.added.append(found)
            else:
                listing.headers[name] = None
