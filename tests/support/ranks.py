"""A node of several ranks, as far as its peers can tell: pools of whole units, cut by hand into an arena a rank, each
behind a transfer backend of its own. Nothing here asks the planner how."""

from __future__ import annotations

import ctypes
import math
import queue
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.kv_cache.layout_document import NodeLayout
from common.kv_cache.shards import UnitSlices
from common.kv_cache.spec import DTYPE_BYTES, ModelGeometry
from common.transfer.backend import TransferBackend
from common.transfer.jobs import ExpectedGeneration, PullJob, PullOutcome
from common.transfer.puller import Puller
from common.transfer.reads import Piece, Read
from common.transfer.regions import Peer, Region
from tests.support.shards_by_hand import geometry_of, narrow, unit_by_hand, units_of
from tests.support.transfer_sites import PATIENCE_S, Site

NUM_UNITS = 6
"""Of each pool, the null entry included."""
EMPTY = 0xEE
"""What memory holds before anything was written to it, also between tensors."""
ENTRY_BYTES = 16


class RankMemory:
    """The arena and the generations of one rank, filled with its share of what ``seed`` gives the whole model; ``seed``
    0: with nothing."""

    enter_thread: Callable[[], None] | None = None

    def __init__(self, geometry: ModelGeometry, block_size: int, rank: int, tp: int, *, epoch: int, seed: int) -> None:
        self.epoch = epoch
        names = [*(group.pool_name for group in geometry.attention_groups), "slots"]
        self._units = dict(zip(names, units_of(geometry, block_size), strict=True))
        self._share = {name: unit_by_hand(tensors, rank, tp) for name, tensors in self._units.items()}
        self.pools = {name: np.full((NUM_UNITS, share.size), EMPTY, np.uint8) for name, share in self._share.items()}
        self.pools = {name: pool for name, pool in self.pools.items() if pool.size}
        if seed:
            for name, pool in self.pools.items():
                for unit in range(1, NUM_UNITS):
                    pool[unit] = self.content(name, unit, seed)
        self.generations = {
            name: (ctypes.c_uint64 * (2 * NUM_UNITS))(epoch, 0, *(1000 + word for word in range(2, 2 * NUM_UNITS)))
            for name in self.pools
        }
        self.regions = {
            region.name: region
            for name, pool in self.pools.items()
            for region in (
                Region(name, pool.ctypes.data, NUM_UNITS, pool.shape[1], null_unit=True, owner=pool),
                Region(
                    f"{name}_generations",
                    ctypes.addressof(self.generations[name]),
                    NUM_UNITS,
                    ENTRY_BYTES,
                    owner=self.generations[name],
                ),
            )
        }

    def content(self, name: str, unit: int, seed: int) -> NDArray[np.uint8]:
        """What a unit holds that is this rank's share of the whole one."""
        num_bytes = sum(math.prod(each.shape) * DTYPE_BYTES[each.dtype] for each in self._units[name])
        whole = np.random.default_rng([seed, unit, len(name)]).integers(0, EMPTY, num_bytes, dtype=np.uint8)
        share = self._share[name]
        return np.where(share >= 0, whole[share], np.uint8(EMPTY))

    @staticmethod
    def expected(name: str, unit: int) -> ExpectedGeneration:
        """As it was at first."""
        return ExpectedGeneration(f"{name}_generations", unit, 1000 + 2 * unit, 1001 + 2 * unit)


class RankNode:
    """``backends``: one a rank. ``layout`` is what each announces."""

    def __init__(self, site: Site, name: str, model: str, block_size: int, tp: int, *, epoch: int, seed: int) -> None:
        geometry = narrow(geometry_of(model))
        self.tp = tp
        self.epoch = epoch
        self.layout = NodeLayout(geometry, block_size, tp)
        self.memories = [RankMemory(geometry, block_size, rank, tp, epoch=epoch, seed=seed) for rank in range(tp)]
        self.backends: list[TransferBackend] = [
            site.backend(memory, engine_id=f"{name}-{rank}", layout=self.layout)  # type: ignore[arg-type]
            for rank, memory in enumerate(self.memories)
        ]


class RankReader:
    """Reads for one rank of a node, from all ranks of another that have something of it, one pull each: what was read
    counts when every one of them is OK. ``close`` it before the site."""

    def __init__(self, node: RankNode, rank: int, holder: RankNode) -> None:
        self._holder = holder
        self._backend = node.backends[rank]
        self._puller = Puller(self._backend, name=f"puller-{rank}")
        self._outcomes: queue.Queue[PullOutcome] = queue.Queue()
        self.peers: list[Peer] = [self._backend.add_peer(each.metadata()) for each in holder.backends]

    def pull(self, planned: UnitSlices, pairs: Sequence[tuple[int, int]]) -> list[PullOutcome]:
        """``pairs`` of (local, remote) of every pool; the outcomes by rank, of those that have something of it."""
        pools = list(self._holder.memories[0].pools)
        slices = [*planned.blocks, *([planned.slot] if planned.slot else [])]
        num_pulls = 0
        for rank, (peer, memory) in enumerate(zip(self.peers, self._holder.memories, strict=True)):
            reads = [
                Read(name, name, pairs, pieces)
                for name, each in zip(pools, slices, strict=True)
                if (pieces := [Piece(s.local_offset, s.remote_offset, s.length) for s in each if s.remote_rank == rank])
            ]
            generations = [memory.expected(read.remote_region, remote) for read in reads for _, remote in pairs]
            if reads:
                deadline_s = time.monotonic() + PATIENCE_S
                job = PullJob(f"rank-{rank}", peer, reads, generations, self._holder.epoch, deadline_s)
                self._puller.submit(job, self._outcomes.put)
                num_pulls += 1
        outcomes = [self._outcomes.get(timeout=2 * PATIENCE_S) for _ in range(num_pulls)]
        return sorted(outcomes, key=lambda outcome: outcome.pull_id)

    def close(self) -> None:
        assert self._puller.close()
