"""Which weights these are: a digest over config, weight bytes, dtype and revision, without torch.

Two fine-tunes with one name must never share a prefix, so every weight file's content counts. Reading gigabytes at
each start is too slow, so a file's digest is remembered under the user's cache folder: for this path, size, times of
modification and of change, and a sample of the content that is read at every start. Tools that copy keep the time of
modification (``cp -p``, ``rsync -t``). Nobody can set the time of change, but some file systems do not keep it; then
the sample tells.
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
_HEAD_BYTES = 1024 * 1024
"""Bytes of a weight file's beginning in the sample: a safetensors header (names, shapes, places of all tensors) of
some 8,000 tensors."""
_NUM_PIECES = 512
"""Pieces of the rest in the sample, evenly spread: in a file of 5 GB one each 10 MB, so that no large matrix is left
out."""
_PIECE_BYTES = 8 * 1024
"""Bytes of a piece. With them a sample is 5 MiB of a file of any size: 7 ms where they are in memory, 44 ms on a local
disk."""


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
    times = f"{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
    identity = f"{path.resolve()}\0{stat.st_size}\0{times}\0{_sample_digest(path, stat.st_size)}"
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


def _sample_digest(path: Path, num_bytes: int) -> str:
    """Hex digest of the file's beginning and of pieces of the rest; of all of a small file."""
    digest = hashlib.blake2b(digest_size=32)
    rest = max(0, num_bytes - _HEAD_BYTES)
    stride = max(_PIECE_BYTES, rest // _NUM_PIECES)
    with path.open("rb", buffering=0) as file:
        digest.update(file.read(_HEAD_BYTES))
        for position in range(_HEAD_BYTES, num_bytes, stride):
            file.seek(position)
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
