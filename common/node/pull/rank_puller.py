"""Pulls for one rank of a node: what is asked for in whole units is read in the pieces that are this rank's, from those
of the peer's ranks that hold them.

Between nodes of one tensor-parallel size a rank reads whole units from the rank of its own number, as between nodes
that are not divided: nothing is planned then. For each other size there is one plan, made when a peer of it is read
first. Its states are contiguous pieces; K/V, whose heads are within each token, are two pieces a token and layer: 8,192
tokens of granite-4.0-h-tiny (17 MiB) are 32,772 descriptors from two ranks and take 180 ms, as whole units 7 ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.kv_cache.shards import Slice, unit_slices
from common.kv_cache.spec import ModelGeometry
from common.node.regions import SLOTS, block_region
from common.transfer.jobs import DoneCallback, PullJob, TerminalCallback
from common.transfer.joint_puller import PullRunner
from common.transfer.reads import Piece

Sources = Sequence[tuple[int, Sequence[Piece]]]
"""(rank of the peer, what of a unit is read from it), for each rank that has something of it."""


class RankPuller:
    """``common.transfer.joint_puller.PullRunner`` of jobs whose reads name whole units and no rank. ``geometry``: of
    the undivided model; ``rank`` of ``tensor_parallel_size``: whose memory ``puller`` reads into."""

    def __init__(
        self,
        puller: PullRunner,
        geometry: ModelGeometry,
        block_size: int,
        *,
        rank: int = 0,
        tensor_parallel_size: int = 1,
    ) -> None:
        self._puller = puller
        self._geometry = geometry
        self._block_size = block_size
        self._rank = rank
        self._tensor_parallel_size = tensor_parallel_size
        self._plans: dict[int, Mapping[str, Sources]] = {}

    def submit(self, job: PullJob, on_done: DoneCallback, on_terminal: TerminalCallback | None = None) -> None:
        """Raises as ``Puller.submit``. The peer's size is one that the handshake found can be mapped to this node's."""
        num_ranks = len(job.peer.ranks)
        if num_ranks != self._tensor_parallel_size:
            sources = self._plan(num_ranks)
            reads = [
                replace(read, pieces=pieces, rank=rank)
                for read in job.reads
                for rank, pieces in sources[read.remote_region]
            ]
            job = replace(job, reads=reads)
        elif self._rank:
            job = replace(job, reads=[replace(read, rank=self._rank) for read in job.reads])
        self._puller.submit(job, on_done, on_terminal)

    def cancel(self, pull_id: str) -> bool:
        return self._puller.cancel(pull_id)

    def abandon(self, pull_id: str) -> bool:
        return self._puller.abandon(pull_id)

    def _plan(self, num_ranks: int) -> Mapping[str, Sources]:
        plan = self._plans.get(num_ranks)
        if plan is None:
            units = unit_slices(self._geometry, self._block_size, self._rank, self._tensor_parallel_size, num_ranks)
            plan = {block_region(group): _by_rank(slices) for group, slices in enumerate(units.blocks)}
            plan[SLOTS] = _by_rank(units.slot)
            self._plans[num_ranks] = plan
        return plan


def _by_rank(slices: Sequence[Slice]) -> Sources:
    pieces: dict[int, list[Piece]] = {}
    for each in slices:
        pieces.setdefault(each.remote_rank, []).append(Piece(each.local_offset, each.remote_offset, each.length))
    return list(pieces.items())
