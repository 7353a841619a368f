"""Part ``transfer``: two processes and NIXL between them, blocks in the GPU's memory (UCX then takes cuda_ipc).

What ``benchmarks.transfer`` measures: a bare READ, and a pull with its generation check; beside them one copy of as
many bytes out of memory that the other process has opened to this one (CUDA IPC), which is all that the hardware does.
Then pulls one after the other for the soak's seconds; what they brought is compared every 50th time.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing  # teaches pipes to carry tensors

from benchmarks.gpu.measure.timing import find_device, measure
from benchmarks.gpu.settings import Row, Settings
from benchmarks.transfer import Reader, make_storage, run_holder
from common.errors import TransferError
from common.transfer.nixl.bindings import load_bindings

START_S = 60.0
CHECK_EVERY = 50


def run(settings: Settings) -> Iterator[Row]:
    device = find_device()
    mib, block_kib, repeat = (8, 64, 2) if settings.smoke else (1024, 256, 9)
    context = multiprocessing.get_context("spawn")
    yield _ipc_copy(context, mib << 20, device)
    try:
        load_bindings()
    except TransferError as exc:
        yield {"kind": "pulls", "error": str(exc)}
        return
    name = "cuda:0" if device.type == "cuda" else "cpu"
    num_read = (mib << 10) // block_kib
    here, there = context.Pipe()
    holder = context.Process(target=run_holder, args=(there, num_read + 1, block_kib, name), daemon=True)
    holder.start()
    try:
        units = list(range(1, num_read + 1))
        remote = random.Random(0).sample(units, num_read)
        storage = make_storage(num_read + 1, block_kib, name)
        reader = Reader(_receive(here), storage, list(zip(units, remote, strict=True)))
        yield from _ways(reader, mib, repeat)
        yield _soak(reader, mib, min(settings.soak_s, 1.0) if settings.smoke else settings.soak_s)
        reader.close()
        here.send_bytes(b"stop")
        holder.join(10)
    finally:
        holder.kill()


def _ways(reader: Reader, mib: int, repeat: int) -> Iterator[Row]:
    for name, way in (("bare READ", reader.bare_read), ("pull", reader.pull)):
        reader.clear()
        way()
        reader.check()
        samples = [way() for _ in range(repeat)]
        yield {
            "kind": "rates",
            "way": name,
            "mib": mib,
            "ms": 1e3 * statistics.median(samples),
            "worst_ms": 1e3 * max(samples),
            "gb_per_s": (mib << 20) / statistics.median(samples) / 1e9,
        }


def _soak(reader: Reader, mib: int, seconds: float) -> Row:
    """Raises at the first pull that fails or brought wrong bytes."""
    count, checks, begin_s = 0, 0, time.monotonic()
    slowest = 0.0
    while time.monotonic() - begin_s < seconds:
        is_checked = count % CHECK_EVERY == 0
        if is_checked:
            reader.clear()
        slowest = max(slowest, reader.pull())
        if is_checked:
            reader.check()
            checks += 1
        count += 1
    reader.check()
    return {
        "kind": "soak",
        "seconds": time.monotonic() - begin_s,
        "pulls": count,
        "gb": count * (mib << 20) / 1e9,
        "checked": checks + 1,
        "slowest_ms": 1e3 * slowest,
    }


def _ipc_copy(context: Any, num_bytes: int, device: torch.device) -> Row:
    here, there = context.Pipe()
    lender = context.Process(target=_lend, args=(there, num_bytes, device.type), daemon=True)
    lender.start()
    try:
        remote: torch.Tensor = _receive(here, is_object=True)
        local = torch.empty_like(remote)
        timing = measure([partial(local.copy_, remote)], device, budget_s=0.2, captured=False)
        is_right = bool((local == 7).all())
        del remote  # before its owner ends
        here.send_bytes(b"stop")
        lender.join(10)
    finally:
        lender.kill()
    rate = num_bytes / timing.seconds / 1e9
    return {"kind": "rates", "way": "copy from the other process", "mib": num_bytes >> 20,
            "ms": 1e3 * timing.seconds, "gb_per_s": rate, "is_right": is_right}  # fmt: skip


def _lend(pipe: Connection, num_bytes: int, device: str) -> None:
    tensor = torch.full((num_bytes,), 7, dtype=torch.uint8, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    pipe.send(tensor)
    pipe.recv_bytes()


def _receive(pipe: Connection, *, is_object: bool = False) -> Any:
    if not pipe.poll(START_S):
        raise TimeoutError("the other process did not start")
    return pipe.recv() if is_object else pipe.recv_bytes()
