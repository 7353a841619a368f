"""What a verified pull costs beside a bare NIXL READ of the same descriptors: ``python -m benchmarks.transfer``.

Two processes on this machine: a holder, and this one, which alternates between the ways in one run, so that whatever
else the machine does hits all alike; medians. Choose the transport with UCX_TLS (for example ``UCX_TLS=tcp,self``).

- *bare READ*: NIXL alone, create, post, yield until done.
- *pull*: data, generations and tags of every block, comparison, and the way through the poll thread and back.
- *pull, one block checked*: the same data with one block's generation: the difference is the generation check.
- *digests*: hashing what was pulled, as holder and as reader do with ``--kv-transfer-verify all``; on top of a pull.

Blocks are read in shuffled order unless ``--contiguous``. Memory: the payload once in each process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.spec import AttentionLayerSpec, KVCacheConfig, ModelGeometry
from common.node.device import thread_entry
from common.node.digests import VERIFY_ALL, find_mismatch, make_digests
from common.server.serve import end_process
from common.transfer.announcement import PeerMetadata
from common.transfer.generation_check import GENERATION_BYTES
from common.transfer.jobs import ExpectedGeneration, PullJob, PullOutcome, PullStatus
from common.transfer.nixl.agent import PROGRESS_TIMEOUT_US
from common.transfer.nixl.backend import NixlBackend
from common.transfer.nixl.bindings import load_bindings
from common.transfer.nixl.descriptors import memory_kind
from common.transfer.puller import Puller
from common.transfer.reads import Read
from common.transfer.regions import Peer, Region

EPOCH = 1
GENERATION = 7
DEADLINE_S = 60.0
BLOCK_SIZE, HEAD_SIZE = 16, 128
KIB_PER_HEAD = 2 * BLOCK_SIZE * HEAD_SIZE * 2 >> 10


def make_storage(num_blocks: int, block_kib: int, device: str = "cpu") -> KVStorage:
    """One attention layer whose blocks of 16 tokens have ``block_kib`` KiB, and no state."""
    num_heads, rest = divmod(block_kib, KIB_PER_HEAD)
    if rest or not num_heads:
        raise SystemExit(f"--block-kib {block_kib}: must be a multiple of {KIB_PER_HEAD}")
    geometry = ModelGeometry(
        model_type="benchmark",
        num_layers=1,
        hidden_size=num_heads * HEAD_SIZE,
        vocab_size=1,
        max_position=0,
        attention_layers=(AttentionLayerSpec(0, num_heads, HEAD_SIZE, HEAD_SIZE, "float16"),),
        state_layers=(),
    )
    config = KVCacheConfig(geometry, BLOCK_SIZE, (num_blocks,), num_slots=1, root_key=b"benchmark")
    return KVStorage(config, torch.device(device))


def make_regions(storage: KVStorage) -> list[Region]:
    """The blocks, each 8 bytes in them the same for a block and different from other blocks', and their generations.
    The tag of block i is i."""
    arena = storage.block_arenas[0]
    num_blocks, block_bytes = arena.shape
    arena.view(torch.int64)[:] = torch.arange(num_blocks, device=arena.device)[:, None]
    if arena.device.type == "cuda":
        torch.cuda.synchronize(arena.device)
    table = np.empty((num_blocks, 2), dtype=np.uint64)
    table[:, 0], table[:, 1] = GENERATION, np.arange(num_blocks)
    table[0] = EPOCH, 0
    return [
        Region("blocks", arena.data_ptr(), num_blocks, block_bytes, str(arena.device), null_unit=True, owner=arena),
        Region("block_generations", table.ctypes.data, num_blocks, GENERATION_BYTES, owner=table),
    ]


def run_holder(pipe: Connection, num_blocks: int, block_kib: int, device: str = "cpu") -> None:
    storage = make_storage(num_blocks, block_kib, device)
    backend = NixlBackend(engine_id="holder", epoch=EPOCH, enter_thread=thread_entry(storage.device))
    backend.register(make_regions(storage))
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
        memory, device_id = memory_kind(blocks.device)
        self._memory = getattr(nixl, memory)
        self._device_id = device_id
        registered = [(blocks.address, blocks.num_bytes, device_id, "")]
        self._agent.registerMem(nixl.nixlRegDList(self._memory, registered), [])
        announced = PeerMetadata.from_bytes(metadata).ranks[0]
        self._peer = announced.name
        self._agent.loadRemoteMD(announced.agent_blob())
        remote = next(region for region in announced.regions if region.name == "blocks")
        self._rows = [self._make_rows(blocks, pairs[:, 0]), self._make_rows(remote, pairs[:, 1])]

    def _make_rows(self, region: Region, units: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        rows = np.zeros((len(units), 3), dtype=np.uint64)
        rows[:, 0] = np.uint64(region.address) + units * np.uint64(region.unit_bytes)
        rows[:, 1] = region.unit_bytes
        rows[:, 2] = self._device_id
        return rows

    def read(self) -> float:
        nixl, agent = self._nixl, self._agent
        started_s = time.perf_counter()
        local, remote = (nixl.nixlXferDList(self._memory, rows) for rows in self._rows)
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


class Reader:
    """Everything on this side: each method runs one way once and returns its seconds."""

    def __init__(self, metadata: bytes, storage: KVStorage, pairs: Sequence[tuple[int, int]]) -> None:
        self._storage = storage
        self._pairs = pairs
        regions = make_regions(storage)
        self._backend = NixlBackend(engine_id="reader", epoch=EPOCH, enter_thread=thread_entry(storage.device))
        self._backend.register(regions)
        self._peer: Peer = self._backend.add_peer(metadata)
        self._puller = Puller(self._backend)
        self._bare = BareReader(metadata, regions[0], np.array(pairs, dtype=np.uint64))
        self._generations = [
            ExpectedGeneration("block_generations", remote, GENERATION, tag=remote) for _, remote in pairs
        ]

    def bare_read(self) -> float:
        return self._bare.read()

    def pull(self) -> float:
        return self._pull(self._generations)

    def pull_one_checked(self) -> float:
        return self._pull(self._generations[:1])

    def digests(self) -> float:
        """What a holder and a reader hash, one after the other; here both in this process."""
        num_tokens = len(self._pairs) * BLOCK_SIZE
        table = [local for local, _ in self._pairs]
        started_s = time.perf_counter()
        digests = make_digests(self._storage, [table], num_tokens, 0, VERIFY_ALL)
        message = find_mismatch(self._storage, digests, [list(enumerate(table))], num_tokens, 0)
        seconds = time.perf_counter() - started_s
        if message is not None:
            raise RuntimeError(message)
        return seconds

    def clear(self) -> None:
        arena = self._storage.block_arenas[0]
        arena.zero_()
        if arena.device.type == "cuda":
            torch.cuda.synchronize(arena.device)

    def check(self) -> None:
        """Raises unless every block holds what its holder's held."""
        found = self._storage.block_arenas[0].view(torch.int64)
        locals_, remotes = (torch.tensor(column, device=found.device) for column in zip(*self._pairs, strict=True))
        for part in range(0, len(locals_), 256):
            if not (found[locals_[part : part + 256]] == remotes[part : part + 256, None]).all():
                raise RuntimeError("wrong bytes")

    def close(self) -> None:
        self._puller.close()
        self._backend.close()

    def _pull(self, generations: Sequence[ExpectedGeneration]) -> float:
        done: queue.Queue[PullOutcome] = queue.Queue()
        reads = [Read("blocks", "blocks", self._pairs)]
        started_s = time.perf_counter()
        job = PullJob("benchmark", self._peer, reads, generations, EPOCH, time.monotonic() + DEADLINE_S)
        self._puller.submit(job, done.put)
        outcome = done.get(timeout=DEADLINE_S + 1)
        seconds = time.perf_counter() - started_s
        if outcome.status is not PullStatus.OK:
            raise RuntimeError(f"pull ended {outcome.status.value}: {outcome.message}")
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="payload of one pull")
    parser.add_argument("--block-kib", type=int, default=64, help="bytes of one block")
    parser.add_argument("--repeat", type=int, default=9, help="measured rounds, after one to warm up")
    parser.add_argument("--contiguous", action="store_true", help="neighbouring blocks, which merge in a pull")
    parser.add_argument("--device", choices=("cpu", "cuda:0"), default="cpu", help="whose memory")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    num_read = (args.mib << 10) // args.block_kib
    units = list(range(1, num_read + 1))
    remote_units = units.copy()
    if not args.contiguous:
        random.Random(0).shuffle(remote_units)

    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    holder = context.Process(target=run_holder, args=(there, num_read + 1, args.block_kib, args.device), daemon=True)
    holder.start()
    if not here.poll(120):
        raise TimeoutError("the holder did not start")
    storage = make_storage(num_read + 1, args.block_kib, args.device)
    reader = Reader(here.recv_bytes(), storage, list(zip(units, remote_units, strict=True)))

    ways: dict[str, Callable[[], float]] = {
        "bare_read": reader.bare_read,
        "pull": reader.pull,
        "pull_one_checked": reader.pull_one_checked,
        "digests": reader.digests,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for way in ("bare_read", "pull"):
        reader.clear()
        ways[way]()
        reader.check()
    for number in range(args.repeat):
        # In turns, from another one each time.
        for way in [*ways, *ways][number % len(ways) :][: len(ways)]:
            seconds[way].append(ways[way]())
    reader.check()

    reader.close()
    here.send_bytes(b"stop")
    holder.join(10)

    median_s = {way: statistics.median(values) for way, values in seconds.items()}
    result = {
        "config": {
            "mib": args.mib,
            "block_kib": args.block_kib,
            "blocks": num_read,
            "device": args.device,
            "order": "contiguous" if args.contiguous else "shuffled",
            "repeat": args.repeat,
            "UCX_TLS": os.environ.get("UCX_TLS", ""),
            "cpus": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        },
        "median_ms": {way: round(1e3 * value, 2) for way, value in median_s.items()},
        "range_ms": {
            way: [round(1e3 * min(values), 2), round(1e3 * max(values), 2)] for way, values in seconds.items()
        },
        "mib_per_s": {way: round(args.mib / median_s[way]) for way in ("bare_read", "pull")},
        "pull_speed_of_bare_read": round(median_s["bare_read"] / median_s["pull"], 3),
        "generation_check_share_of_pull": round(1 - median_s["pull_one_checked"] / median_s["pull"], 3),
        "digests_of_both_sides_in_pulls": round(median_s["digests"] / median_s["pull"], 2),
    }
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key}: {value}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    end_process(0)  # a library that NIXL brings along crashes in its own clean-up
