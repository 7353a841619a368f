"""All kernels compile for the GPUs that are served, in what a multiprocessor has. See ``compile_kernels.py``."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import common.ops

# Bytes a program may have: of 8.6 and 8.9 in place of 8.0, which has more; of 9.0; of 10.0
_SHARED_MEMORY = {80: 101_376, 90: 232_448, 100: 232_448}
_TENSOR_MEMORY = 512
"""Columns that a multiprocessor has, from 10.0 on."""
_FULL = pytest.mark.full


def compile_kernels(capability: int, *options: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.triton.compile_kernels", str(capability), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def kernels() -> set[str]:
    """Names of all functions of ``common/ops/triton`` that are launched: which no other one calls."""
    names, called = {}, set()
    for path in Path(*common.ops.__path__, "triton").rglob("*.py"):
        for function in ast.parse(path.read_text()).body:
            if isinstance(function, ast.FunctionDef) and any("jit" in ast.dump(d) for d in function.decorator_list):
                names[f"{path.stem}.{function.name}"] = function.name
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                called |= {call.id for call in calls if isinstance(call, ast.Name)}
    return {name for name, function in names.items() if function not in called}


def check(found: list[dict[str, Any]], capability: int, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{capability}: kernel, dtype, call: warps, registers and stack a thread, shared and tensor memory")
        for each in found:
            print(
                "{kernel:32s} {dtype:8s} {call:34s} {warps:2d} {reg:4d} {stack:3d} {shared:7d} {tensor:4d}".format(
                    **each
                )
            )
    assert {each["kernel"] for each in found} == kernels()
    most = _SHARED_MEMORY[capability]
    wrong = [
        each
        for each in found
        if each["stack"] or each["is_tf32"] or not each["writes"]
        or each["shared"] > most or each["tensor"] > _TENSOR_MEMORY
    ]  # fmt: skip
    assert not wrong, "\n".join(map(str, wrong))


def test_kernels_when_compiled_then_they_fit_and_nothing_spills(capsys: pytest.CaptureFixture[str]) -> None:
    check(compile_kernels(90, "--quick"), 90, capsys)


@_FULL
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.timeout(3000)
def test_kernels_when_compiled_in_all_shapes_then_they_fit_and_float32_is_whole(
    capability: int, capsys: pytest.CaptureFixture[str]
) -> None:
    check(compile_kernels(capability), capability, capsys)
