"""Compiles the C++ ops for this machine's CPU ahead of time, so that no node does it at its first start.

``python -m common.models.prebuild [FOLDER]``, for images: into FOLDER, which nodes get as ``--prebuilt-ops FOLDER``, or
into the user's cache. Ends with status 1 and the reason where it cannot be done.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from common.models.loading.fingerprint import user_cache_dir
from common.ops.cpu.build import BuildError, load_library

USAGE = "usage: python -m common.models.prebuild [FOLDER]\n"


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1 or any(word.startswith("-") for word in argv):
        sys.stderr.write(USAGE)
        return 2
    folder = Path(argv[0]) if argv else user_cache_dir()
    try:
        load_library(folder)
    except BuildError as exc:
        sys.stderr.write(f"the C++ ops cannot be compiled here: {exc}\n")
        return 1
    sys.stdout.write(f"the C++ ops are in {folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
