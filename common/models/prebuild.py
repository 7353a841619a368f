"""Compiles the C++ ops ahead of time, so that no node does it at its first start.

``python -m common.models.prebuild [FOLDER]``: for this machine's CPU, into FOLDER, which nodes get as ``--prebuilt-ops
FOLDER``, or into the user's cache. With ``--levels``, for images: for every level of CPU that this architecture has
(:mod:`common.ops.cpu.levels`), of which a node takes the best that its CPU can run. Ends with status 1 and the reason
where it cannot be done.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from common.models.loading.fingerprint import user_cache_dir
from common.ops.cpu.build import BuildError, load_library, prebuild
from common.ops.cpu.levels import levels_of_machine

USAGE = "usage: python -m common.models.prebuild [--levels] [FOLDER]\n"


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    levels = levels_of_machine() if words[:1] == ["--levels"] else None
    if levels is not None:
        del words[0]
    if len(words) > 1 or any(word.startswith("-") for word in words):
        sys.stderr.write(USAGE)
        return 2
    folder = Path(words[0]) if words else user_cache_dir()
    try:
        if levels:
            prebuild(folder, levels)
        else:  # an architecture without levels: for this CPU
            load_library(folder)
    except BuildError as exc:
        sys.stderr.write(f"the C++ ops cannot be compiled here: {exc}\n")
        return 1
    sys.stdout.write(f"the C++ ops are in {folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
