"""How much a verified pull costs beside a bare NIXL READ of the same descriptors: ``python -m benchmarks.transfer``.

Two processes on this machine: a holder, and this one, which alternates between both ways in one run, so that whatever
else the machine does hits both alike. A pull is data, generations, comparison, and the way through the poll thread and
back; the bare READ is create, post, spin until done. Blocks are read in shuffled order unless ``--contiguous``. Choose
the transport with UCX_TLS (for example ``UCX_TLS=tcp,self``).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import platform
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from common.transfer.backend import PeerMetadata, Read, Region
from common.transfer.nixl_backend import PROGRESS_TIMEOUT_US, NixlBackend, load_bindings
from common.transfer.puller import ExpectedGeneration, Puller, PullJob, PullOutcome, PullStatus

EPOCH = 1
GENERATION = 7
DEADLINE_S = 20.0


def make_regions(num_blocks: int, block_bytes: int, fill: int) -> list[Region]:
    """Blocks filled with one byte value, and their generations; unit 0 is the null block and the epoch."""
    memory = mmap.mmap(-1, num_blocks * block_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, fill, num_blocks * block_bytes)
    generations = (ctypes.c_uint64 * num_blocks)(EPOCH, *([GENERATION] * (num_blocks - 1)))
    return [
        Region("blocks", address, num_blocks, block_bytes, null_unit=True, owner=memory),
        Region("block_generations", ctypes.addressof(generations), num_blocks, 8, owner=generations),
    ]


def run_holder(pipe: Connection, num_blocks: int, block_bytes: int) -> None:
    backend = NixlBackend(engine_id="holder", epoch=EPOCH)
    backend.register(make_regions(num_blocks, block_bytes, fill=0xAB))
    pipe.send_bytes(backend.metadata())
    pipe.recv_bytes()
    backend.close()


class BareReader:
    """NIXL without anything of ours: one agent of its own, the same descriptors."""

    def __init__(self, metadata: bytes, blocks: Region, pairs: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        self._nixl = nixl = load_bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_TIMEOUT_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        self._agent = nixl.nixlAgent("bare-reader", config)
        self._agent.createBackend("UCX", {})
        self._agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(blocks.address, blocks.num_bytes, 0, "")]), [])
        announced = PeerMetadata.from_bytes(metadata)
        self._peer = announced.name
        self._agent.loadRemoteMD(announced.agent_blob())
        remote = next(region for region in announced.regions if region.name == "blocks")
        self._rows = [self._make_rows(blocks, pairs[:, 0]), self._make_rows(remote, pairs[:, 1])]

    @staticmethod
    def _make_rows(region: Region, units: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        rows = np.zeros((len(units), 3), dtype=np.uint64)
        rows[:, 0] = np.uint64(region.address) + units * np.uint64(region.unit_bytes)
        rows[:, 1] = region.unit_bytes
        return rows

    def read(self) -> float:
        nixl, agent = self._nixl, self._agent
        started_s = time.perf_counter()
        local, remote = (nixl.nixlXferDList(nixl.DRAM_SEG, rows) for rows in self._rows)
        transfer = agent.createXferReq(nixl.NIXL_READ, local, remote, self._peer)
        status = agent.postXferReq(transfer)
        while status == nixl.NIXL_IN_PROG:
            if time.perf_counter() - started_s > DEADLINE_S:
                raise TimeoutError("the bare READ did not finish")
            time.sleep(0)
            status = agent.getXferStatus(transfer)
        seconds = time.perf_counter() - started_s
        agent.releaseXferReq(transfer)
        return seconds


def pull_once(puller: Puller, make_job: Callable[[], PullJob]) -> float:
    done: queue.Queue[PullOutcome] = queue.Queue()
    started_s = time.perf_counter()
    puller.submit(make_job(), done.put)
    outcome = done.get(timeout=DEADLINE_S + 1)
    seconds = time.perf_counter() - started_s
    if outcome.status is not PullStatus.OK:
        raise RuntimeError(f"pull ended {outcome.status.value}: {outcome.message}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="payload of one pull")
    parser.add_argument("--block-kib", type=int, default=64, help="bytes of one block")
    parser.add_argument("--repeat", type=int, default=7, help="measured rounds, after two to warm up")
    parser.add_argument("--contiguous", action="store_true", help="neighbouring blocks, which merge in a pull")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    block_bytes = args.block_kib << 10
    num_read = (args.mib << 20) // block_bytes
    units = list(range(1, num_read + 1))
    remote_units = units.copy()
    if not args.contiguous:
        random.Random(0).shuffle(remote_units)
    pairs = list(zip(units, remote_units, strict=True))

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    holder = context.Process(target=run_holder, args=(there, num_read + 1, block_bytes), daemon=True)
    holder.start()
    if not here.poll(60):
        raise TimeoutError("the holder did not start")
    metadata = here.recv_bytes()

    regions = make_regions(num_read + 1, block_bytes, fill=0)
    backend = NixlBackend(engine_id="reader", epoch=2)
    backend.register(regions)
    peer = backend.add_peer(metadata)
    puller = Puller(backend)
    bare = BareReader(metadata, regions[0], np.array(pairs, dtype=np.uint64))
    generations = [ExpectedGeneration("block_generations", unit, GENERATION) for unit in remote_units]

    def make_job() -> PullJob:
        reads = [Read("blocks", "blocks", pairs)]
        return PullJob("benchmark", peer, reads, generations, EPOCH, time.monotonic() + DEADLINE_S)

    bare_s: list[float] = []
    pull_s: list[float] = []
    for _ in range(args.repeat + 2):
        bare_s.append(bare.read())
        pull_s.append(pull_once(puller, make_job))
    got = ctypes.string_at(regions[0].address + block_bytes, num_read * block_bytes)
    if got != b"\xab" * len(got):
        raise RuntimeError("wrong bytes")

    puller.close()
    backend.close()
    here.send_bytes(b"stop")
    holder.join(10)

    bare_median_s, pull_median_s = statistics.median(bare_s[2:]), statistics.median(pull_s[2:])
    result = {
        "config": {
            "mib": args.mib,
            "block_kib": args.block_kib,
            "blocks": num_read,
            "order": "contiguous" if args.contiguous else "shuffled",
            "repeat": args.repeat,
            "UCX_TLS": os.environ.get("UCX_TLS", ""),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "bare_read_ms": round(1e3 * bare_median_s, 3),
        "pull_ms": round(1e3 * pull_median_s, 3),
        "bare_read_mib_per_s": round(args.mib / bare_median_s),
        "pull_mib_per_s": round(args.mib / pull_median_s),
        "ratio": round(pull_median_s / bare_median_s, 3),
        "bare_read_range_ms": [round(1e3 * min(bare_s[2:]), 3), round(1e3 * max(bare_s[2:]), 3)],
        "pull_range_ms": [round(1e3 * min(pull_s[2:]), 3), round(1e3 * max(pull_s[2:]), 3)],
    }
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key}: {value}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
