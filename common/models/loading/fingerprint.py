"""Which weights these are: a digest over config, weight bytes, dtype and revision, without torch.

Two fine-tunes with one name must never share a prefix, so every weight file's content counts. Reading gigabytes at
each start is too slow, so a file's digest is remembered under the user's cache folder by (path, size, modification
time).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Files whose content a run depends on, beside the config.
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.index.json")
# Config fields that say where a checkpoint came from or how it is run, not what it computes.
_VOLATILE_KEYS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation"})
_READ_BYTES = 8 * 1024 * 1024
"""Bytes of a weight file in memory at a time: enough that reading is not bound by calls."""


def user_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/tandem``, or ``~/.cache/tandem``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tandem"


def _write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that another process sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        scratch = Path(file.name)
        try:
            file.write(text)
            file.flush()
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


def model_fingerprint(
    folder: Path, raw_config: Mapping[str, Any], *, dtype: str, revision: str | None, cache_dir: Path | None = None
) -> str:
    """Hex digest (32 bytes) of the checkpoint in ``folder`` as it will be run.

    ``dtype`` is the dtype of the run, not of the files; ``cache_dir`` defaults to :func:`user_cache_dir`.
    """
    files = sorted({path for pattern in _WEIGHT_PATTERNS for path in folder.glob(pattern)})
    cache_dir = user_cache_dir() if cache_dir is None else cache_dir
    facts = {
        "config": _normalised(raw_config),
        "weights": {path.name: _file_digest(path, cache_dir) for path in files},
        "dtype": dtype,
        "revision": revision,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=32).hexdigest()


def _normalised(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _normalised(v) for k, v in value.items() if k not in _VOLATILE_KEYS}
    if isinstance(value, list | tuple):
        return [_normalised(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _file_digest(path: Path, cache_dir: Path) -> str:
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    remembered = cache_dir / "digests" / hashlib.blake2b(identity.encode(), digest_size=20).hexdigest()
    with contextlib.suppress(OSError):  # not remembered, or the cache folder cannot be read: compute it
        if len(known := remembered.read_text()) == 64:
            return known
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    with contextlib.suppress(OSError):  # a read-only home costs time at the next start, nothing else
        _write_atomically(remembered, digest.hexdigest())
    return digest.hexdigest()
