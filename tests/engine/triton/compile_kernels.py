"""Compiles what the calls of ``launches.py`` launch, for one compute capability, without a GPU and without the
interpreter; writes a line of JSON for each: registers, stack, shared memory, columns of tensor memory, whether products
are tf32, whether anything is written to the GPU's memory: of a kernel that takes too much tensor memory Triton leaves a
trap alone, which has no stack and few registers.

Kernels are compiled for the arguments they are launched with, as at run time: dtypes, numbers that are a multiple of
16, compile-time constants, warps. ``--quick``: the first launch of each kernel, in bfloat16. ``--match``: calls whose
dtype and name, "float32 mamba2 48x64x128", the expression is found in.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from common.ops.triton import attention
from tests.engine.triton.launches import calls

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_MULTIPROCESSORS = 132


@dataclasses.dataclass
class Launch:
    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder:
    """In place of launches while it is entered."""

    def __init__(self, capability: int) -> None:
        self.launches: list[Launch] = []
        self._device = attention._Device(_MULTIPROCESSORS, capability // 10)

    def __enter__(self) -> Recorder:
        self._stock = JITFunction.run, attention._device
        launches = self.launches

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            launches.append(Launch(kernel, args, kwargs))

        JITFunction.run = run
        attention._device = lambda device: self._device
        return self

    def __exit__(self, *args: object) -> None:
        JITFunction.run, attention._device = self._stock


def compile_launch(launch: Launch, target: GPUTarget, seen: set[str]) -> Any:
    """None if the same code was compiled before."""
    backend, kernel = make_backend(target), launch.kernel
    kwargs = {**launch.kwargs, "debug": False, "instrumentation_mode": ""}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.args, **kwargs)
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    key = repr((kernel.__name__, kernel.module, specialization, sorted(constants.items()), options.__dict__))
    if key in seen:
        return None
    seen.add(key)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def describe(compiled: Any, **launch: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = {name.lower(): int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", usage.stdout + usage.stderr)}
    metadata = compiled.metadata
    return {
        **launch,
        **found,
        "warps": metadata.num_warps,
        "shared": metadata.shared,
        "tensor": metadata.tmem_size or 0,
        "is_tf32": "tf32" in compiled.asm["ptx"],
        "writes": "st.global" in compiled.asm["ptx"],
    }


def compiled_kernels(capability: int, *, is_quick: bool, match: str) -> Iterator[dict[str, Any]]:
    target, seen = GPUTarget("cuda", capability, 32), set[str]()
    for dtype in _DTYPES[:1] if is_quick else _DTYPES:
        dtype_name = str(dtype).removeprefix("torch.")
        for call, launch in calls(dtype):
            if not re.search(match, f"{dtype_name} {call}"):
                continue
            with Recorder(capability) as recorder:
                launch()
            for each in recorder.launches:
                name = f"{each.kernel.module.rpartition('.')[2]}.{each.kernel.__name__}"
                if is_quick and name in seen:
                    continue
                if (compiled := compile_launch(each, target, seen)) is not None:
                    seen.add(name)
                    yield describe(compiled, kernel=name, dtype=dtype_name, call=call)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--match", default="")
    arguments = parser.parse_args()
    for line in compiled_kernels(arguments.capability, is_quick=arguments.quick, match=arguments.match):
        print(json.dumps(line), flush=True)
