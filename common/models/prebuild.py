"""Compiles the C++ ops for this machine's CPU into the user's cache, so that no node does it at its first start.

``python -m common.models.prebuild``, for images. Ends with status 1 and the reason where it cannot be done.
"""

from __future__ import annotations

import sys

from common.models.fingerprint import user_cache_dir
from common.ops.cpp.build import BuildError, load_library


def main() -> int:
    folder = user_cache_dir()
    try:
        load_library(folder)
    except BuildError as exc:
        sys.stderr.write(f"the C++ ops cannot be compiled here: {exc}\n")
        return 1
    sys.stdout.write(f"the C++ ops are in {folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
