"""Files with keys: their names are flags, the keys are in no configuration."""

from __future__ import annotations

import logging
import os
import stat

from common.errors import ConfigError

logger = logging.getLogger(__name__)


def read_key_file(path: str, option: str) -> tuple[str, ...]:
    """The keys in a file, one a line; blank lines and lines that start with ``#`` do not count. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                logger.warning("%s %s can be read by every user of this machine: chmod o-r", option, path)
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise ConfigError(f"{option} {path}: {reason}", param=option) from exc
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{option} {path} holds no key", param=option)
    return keys
