"""Part ``ops``: each op at the sizes of published models in bfloat16, against its floor and the torch ops.

Decode steps of 1, 32, 128 and 256 sequences behind 1,024 tokens, and one prompt of 8,192 tokens. Small launches are
replayed from a CUDA graph (``graph``); the torch ops run as they are, at batch 32 and in the prompt. ``floor_us``: what
is counted in ``op_calls.py`` over the card's measured rates; below some 5 us it is launching that counts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.gpu.measure.op_calls import DTYPE, Work, op_calls
from benchmarks.gpu.measure.op_shapes import ANCHORS_US, SHAPES, SMOKE_SHAPES, OpShape
from benchmarks.gpu.measure.timing import Ceilings, find_device, measure, measure_ceilings, synchronize
from benchmarks.gpu.settings import Row, Settings
from common.models.loading.fingerprint import user_cache_dir
from common.ops.interface import Ops
from common.ops.select import create_ops
from common.ops.torch.backend import TorchOps

CONTEXT = 1024
ROUND_BYTES = 256 << 20
"""Moved by the calls of one round together: five times the L2 cache of an H200."""
MAX_COPIES = 32
MAX_BLOCKS = 1 << 17
"""Of a pool: 8 GiB of the widest K/V here."""
TORCH_BATCH = 32


def run(settings: Settings) -> Iterator[Row]:
    device = find_device()
    ceilings = measure_ceilings(device)
    ops = create_ops(settings.backend_on(device.type), dtype=DTYPE, device=device, cache_dir=user_cache_dir())
    batches, context, prompt = ((1, 3), 20, 40) if settings.smoke else ((1, 32, 128, 256), CONTEXT, 8192)
    works = [Work(1, prompt, 0, device), *(Work(batch, 1, context, device) for batch in batches)]
    with torch.inference_mode():
        for shape in SMOKE_SHAPES if settings.smoke else SHAPES:
            for work in works:
                with_torch = not work.start or work.batch in (TORCH_BATCH, 3)
                yield _measure(shape, work, ops, ceilings, with_torch=with_torch)
                synchronize(device)  # raises where a kernel has left the device unusable
                gc.collect()


def _measure(shape: OpShape, work: Work, ops: Ops, ceilings: Ceilings, *, with_torch: bool) -> Row:
    row: dict[str, object] = {"kind": ops.name, "op": shape.op, "model": shape.model, "work": str(work)}
    try:
        moved = op_calls(shape, work).num_bytes
        is_tiny = work.device.type == "cpu"
        copies = 2 if is_tiny else max(2, min(MAX_COPIES, ROUND_BYTES // int(moved), MAX_BLOCKS // work.num_blocks))
        calls = op_calls(shape, replace(work, copies=copies))
        of = calls.prepare()
        floor_s = ceilings.floor_s(calls.num_bytes, calls.flops)
        row |= {"mb": calls.num_bytes / 1e6, "gflop": calls.flops / 1e9, "floor_us": 1e6 * floor_s}
        mine = of(ops)
        if mine is not None:
            timing = measure(mine, work.device, budget_s=0.15)
            row |= {
                "us": 1e6 * timing.seconds,
                "of_floor": floor_s / timing.seconds,
                "gb_per_s": calls.num_bytes / timing.seconds / 1e9,
                "graph": timing.is_captured,
            }
        if with_torch and ops.name != "torch":
            theirs = of(TorchOps())
            timing = measure(theirs[:2] if theirs else [], work.device, budget_s=0.1, captured=False)
            row["torch_us"] = 1e6 * timing.seconds
        anchor = ANCHORS_US.get((shape.op, shape.model, str(work)))
        if anchor is not None:
            row |= {"anchor_us": anchor[0], "anchor": anchor[1]}
    except Exception as exc:  # noqa: BLE001  # a kernel that fails at one size must not hide the others
        row["error"] = f"{type(exc).__name__}: {exc}"
    return row
