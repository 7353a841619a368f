"""Compiles the variants of attention that models use for one compute capability, without a GPU and without the
interpreter, and writes a line of JSON for each: registers, stack, shared memory, whether products are tf32."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.ops.triton.attention import Shape, attend_constants, choose_tiling
from common.ops.triton.attention_kernels import attend_kernel, combine_kernel

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
# (query heads to a K/V head, head_size, head_size_v, latents)
_HEADS = ((4, 64, 64, False), (1, 80, 80, False), (4, 96, 96, False), (4, 128, 128, False), (7, 128, 128, False),
          (1, 192, 128, False), (8, 256, 256, False), (16, 576, 512, True), (32, 576, 512, True))  # fmt: skip
# (most tokens of a tile, splits, whether rows see beyond themselves, window)
_WORK = (
    (1, 1, False, 0),
    (1, 16, False, 0),
    (4, 4, False, 0),
    (512, 1, False, 0),
    (512, 1, True, 0),
    (512, 1, False, 4096),
)


def _compile(function: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: int) -> Any:
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names}
    # As at run time: pointers and strides are multiples of 16, but for those of the step's tables.
    aligned = {i for i, name in enumerate(names) if types.get(name, "fp32") not in ("fp32", "*i32")}
    source = ASTSource(function, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _describe(kernel: Any, **variant: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = {name.lower(): int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", usage.stdout + usage.stderr)}
    return {**variant, **found, "shared": kernel.metadata.shared, "is_tf32": "tf32" in kernel.asm["ptx"]}


def variants(capability: int) -> Iterator[dict[str, Any]]:
    strides = dict.fromkeys(("q_row", "q_head", "k_block", "k_token", "k_head", "v_block", "v_token", "v_head"), "i32")
    floats = {"part": "*fp32", "part_lse": "*fp32", "scale": "fp32"}
    for dtype, tensor in _TYPES.items():
        pools = dict.fromkeys(("query", "k_pool", "v_pool", "out"), tensor)
        for ratio, size, size_v, is_latent in _HEADS:
            shape = Shape(dtype, 1 if is_latent else 8, ratio, size, size_v, is_latent, capability // 10)
            for num_tokens, splits, has_seen, window in _WORK:
                if (is_latent and (has_seen or window)) or (
                    dtype != torch.bfloat16 and (has_seen or window or splits > 1)
                ):
                    continue
                tiling = choose_tiling(shape, num_tokens)
                constants = attend_constants(shape, tiling, splits, num_tokens == 1, has_seen, window, 16)
                types = {**pools, **strides, **floats}
                options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
                kernel = _compile(attend_kernel, types, constants, capability, **options)
                yield _describe(kernel, name="attend", dtype=str(dtype), heads=(ratio, size, size_v),
                                work=(num_tokens, splits, has_seen, window), tiling=str(tiling))  # fmt: skip
        constants = {"DECODE": True, "KV_HEADS": 8, "RATIO": 4, "DV": 128, "SPLITS": 64, "ROWS": 4, "BM": 16, "BV": 128}
        kernel = _compile(combine_kernel, {**floats, "out": tensor}, constants, capability, num_warps=4)
        yield _describe(kernel, name="combine", dtype=str(dtype))


if __name__ == "__main__":
    for line in variants(int(sys.argv[1])):
        print(json.dumps(line), flush=True)
