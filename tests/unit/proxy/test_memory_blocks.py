"""What the proxy's process keeps of memory that it has freed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

LEAVE_HOLES = """
import os, resource
from proxy.__main__ import give_large_blocks_back

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

if {is_given_back}:
    give_large_blocks_back()
largest = b"x" * 2**23
del largest
before = resident_mib()
large, small = [], []
for _ in range(64):
    large.append(b"x" * 2**20)
    small.append(b"x" * 2**17)  # between them, for as long as the process runs
large.clear()
print(resident_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, whose malloc this is about")
@pytest.mark.parametrize("is_given_back", [True, False], ids=["given back", "control: glibc's own limit"])
def test_large_blocks_when_freed_between_small_ones_then_are_the_systems_again(is_given_back: bool) -> None:
    code = LEAVE_HOLES.format(is_given_back=is_given_back)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert (float(done.stdout) < 24) is is_given_back, done.stdout
