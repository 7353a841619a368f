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
from common.kv_cache.spec import DTYPE_BYTES, ModelGeometry
from common.node.pull.rank_puller import RankPuller
from common.node.regions import SLOT_GENERATIONS, SLOTS, block_generations_region, block_region
from common.transfer.announcement import join_ranks
from common.transfer.backend import TransferBackend
from common.transfer.jobs import ExpectedGeneration, PullJob, PullOutcome
from common.transfer.puller import Puller
from common.transfer.reads import Read
from common.transfer.regions import Peer, Region
from tests.support.shards_by_hand import geometry_of, narrow, unit_by_hand, units_of
from tests.support.transfer_sites import PATIENCE_S, Site

NUM_UNITS = 6
"""Of each pool, the null entry included."""
EMPTY = 0xEE
"""What memory holds before anything was written to it, also between tensors."""
ENTRY_BYTES = 16


class RankMemory:
    """The arenas and the generation tables of one rank, empty. ``num_units``: by pool."""

    enter_thread: Callable[[], None] | None = None

    def __init__(
        self, geometry: ModelGeometry, block_size: int, rank: int, tp: int, *, epoch: int, num_units: dict[str, int]
    ) -> None:
        self.epoch = epoch
        groups = range(len(geometry.attention_groups))
        self.tables = {
            **{block_region(group): block_generations_region(group) for group in groups},
            SLOTS: SLOT_GENERATIONS,
        }
        self.units = dict(zip(self.tables, units_of(geometry, block_size), strict=True))
        self.share = {name: unit_by_hand(tensors, rank, tp) for name, tensors in self.units.items()}
        self.share = {name: share for name, share in self.share.items() if share.size}
        self.pools = {
            name: np.full((num_units[name], share.size), EMPTY, np.uint8) for name, share in self.share.items()
        }
        self.generations = {name: (ctypes.c_uint64 * (2 * len(pool)))(epoch) for name, pool in self.pools.items()}
        self.regions = {
            region.name: region
            for name, pool in self.pools.items()
            for region in (
                Region(name, pool.ctypes.data, len(pool), pool.shape[1], null_unit=True, owner=pool),
                Region(
                    self.tables[name],
                    ctypes.addressof(self.generations[name]),
                    len(pool),
                    ENTRY_BYTES,
                    owner=self.generations[name],
                ),
            )
        }

    def fill(self, seed: int) -> None:
        """With this rank's share of what ``seed`` gives the whole model, and its first generations."""
        for name, pool in self.pools.items():
            for unit in range(1, len(pool)):
                pool[unit] = self.content(name, unit, seed)
                expected = self.expected(name, unit)
                self.generations[name][2 * unit : 2 * unit + 2] = [expected.value, expected.tag]

    def content(self, name: str, unit: int, seed: int) -> NDArray[np.uint8]:
        """What a unit holds that is this rank's share of the whole one."""
        num_bytes = sum(math.prod(each.shape) * DTYPE_BYTES[each.dtype] for each in self.units[name])
        whole = np.random.default_rng([seed, unit, len(name)]).integers(0, EMPTY, num_bytes, dtype=np.uint8)
        share = self.share[name]
        return np.where(share >= 0, whole[share], np.uint8(EMPTY))

    def expected(self, name: str, unit: int) -> ExpectedGeneration:
        """As it was at first."""
        return ExpectedGeneration(self.tables[name], unit, 1000 + 2 * unit, 1001 + 2 * unit)


class RankNode:
    """``backends``: one a rank, of which ``announcement`` is one node's. ``seed`` 0: holds nothing."""

    def __init__(self, site: Site, name: str, model: str, block_size: int, tp: int, *, epoch: int, seed: int) -> None:
        self.geometry = narrow(geometry_of(model))
        self.block_size = block_size
        self.tp = tp
        self.epoch = epoch
        layout = NodeLayout(self.geometry, block_size, tp)
        pools = [*(group.pool_name for group in self.geometry.attention_groups), SLOTS]
        num_units = dict.fromkeys(pools, NUM_UNITS)
        self.memories = [
            RankMemory(self.geometry, block_size, rank, tp, epoch=epoch, num_units=num_units) for rank in range(tp)
        ]
        if seed:
            for memory in self.memories:
                memory.fill(seed)
        self.backends: list[TransferBackend] = [
            site.backend(memory, engine_id=name, layout=layout) for memory in self.memories
        ]

    @property
    def announcement(self) -> bytes:
        return join_ranks([backend.metadata() for backend in self.backends])


class RankReader:
    """Pulls for one rank of a node from another node, by the plan of that rank or of ``planned_rank``. ``close`` it
    before the site."""

    def __init__(self, node: RankNode, rank: int, holder: RankNode, planned_rank: int | None = None) -> None:
        self._holder = holder
        self._backend = node.backends[rank]
        self.puller = Puller(self._backend, name=f"puller-{rank}")
        self.pulls = RankPuller(
            self.puller,
            node.geometry,
            node.block_size,
            rank=rank if planned_rank is None else planned_rank,
            tensor_parallel_size=node.tp,
        )
        self._outcomes: queue.Queue[PullOutcome] = queue.Queue()
        self.peer: Peer = self._backend.add_peer(holder.announcement)

    def job(self, pairs: Sequence[tuple[int, int]], timeout_s: float = PATIENCE_S) -> PullJob:
        """``pairs`` of (local, remote) of every pool."""
        memory = self._holder.memories[0]
        reads = [Read(name, name, pairs) for name in memory.pools]
        generations = [memory.expected(name, remote) for name in memory.pools for _, remote in pairs]
        return PullJob("pull", self.peer, reads, generations, self._holder.epoch, time.monotonic() + timeout_s)

    def pull(self, pairs: Sequence[tuple[int, int]]) -> PullOutcome:
        self.pulls.submit(self.job(pairs), self._outcomes.put)
        return self._outcomes.get(timeout=2 * PATIENCE_S)

    def close(self) -> None:
        assert self.puller.close()
