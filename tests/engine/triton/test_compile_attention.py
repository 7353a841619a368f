"""Attention compiles for the GPUs that are served, in what a multiprocessor has. See ``compile_attention.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Bytes a program may have: of 8.6 and 8.9 in place of 8.0, which has more; of 9.0; of 10.0
_SHARED_MEMORY = {80: 101_376, 90: 232_448, 100: 232_448}
_FULL = pytest.mark.full


@pytest.mark.parametrize("capability", [pytest.param(80, marks=_FULL), 90, pytest.param(100, marks=_FULL)])
@pytest.mark.timeout(900)
def test_attention_when_compiled_then_nothing_spills_and_float32_is_whole(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.triton.compile_attention", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) > 60
    for variant in found:
        assert variant["stack"] == 0, variant
        assert not variant["is_tf32"], variant
        assert variant["shared"] <= _SHARED_MEMORY[capability], variant
