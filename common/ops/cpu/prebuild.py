"""Compiles the C++ ops for every level of CPU that this architecture has, for images that run on CPUs nobody knows yet.

``python -m common.ops.cpu.prebuild FOLDER``; nodes get it as ``--prebuilt-ops FOLDER`` and take the best library that
their CPU can run. Needs a compiler and nothing else of this project. Ends with status 1 and the reason where it cannot
be done. (``python -m common.models.prebuild`` compiles for the CPU that it runs on.)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from common.ops.cpu.build import BuildError, prebuild
from common.ops.cpu.levels import levels_of_machine


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.stderr.write("usage: python -m common.ops.cpu.prebuild FOLDER\n")
        return 2
    try:
        prebuild(Path(argv[0]), levels_of_machine())
    except BuildError as exc:
        sys.stderr.write(f"the C++ ops cannot be compiled here: {exc}\n")
        return 1
    sys.stdout.write(f"the C++ ops for {', '.join(each.name for each in levels_of_machine())} are in {argv[0]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
