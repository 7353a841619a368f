"""The secret under which a tier's names and digests are made: from the cluster key, else of this folder alone."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path

SECRET_FILE = "secret"  # noqa: S105 - a name
SECRET_BYTES = 32


def derived_secret(cluster_key: str) -> bytes:
    """The same for all nodes with that key; says nothing about it."""
    return hmac.digest(cluster_key.encode(), b"tandem tier objects 1", "sha256")


def folder_secret(folder: Path) -> bytes:
    """A random secret kept in the folder, for its owner alone; made when there is none. Raises OSError."""
    path = folder / SECRET_FILE
    with contextlib.suppress(FileNotFoundError):
        kept = path.read_bytes()
        if len(kept) == SECRET_BYTES:
            return kept
        path.unlink()  # cut short by a crash: nothing was written under it yet, or it cannot be read any more
    fresh = path.with_name(f"{SECRET_FILE}.{os.getpid()}.{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(SECRET_BYTES))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(fresh, path)  # the first of several processes wins
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
    return path.read_bytes()
