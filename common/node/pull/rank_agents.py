"""A node's end of all transfers: for each of its ranks an agent with that rank's pools, and who pulls with it.

All agents are in this process, also those of ranks that compute in others: the pools of every rank are in its memory.
So they have one set of generation tables, the cache manager's, and a rank's death is no end of a read: the memory stays
until this process ends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from common.errors import TransferError
from common.kv_cache.spec import ModelGeometry
from common.node.pull.rank_puller import RankPuller
from common.transfer.announcement import join_ranks
from common.transfer.backend import TransferBackend
from common.transfer.joint_puller import JointPuller, PullRunner
from common.transfer.puller import Puller
from common.transfer.regions import Peer

logger = logging.getLogger(__name__)


class RankAgents:
    """``backends``: one a rank, in order, with the rank's memory registered; of an undivided node one. ``geometry``: of
    the undivided model. ``close`` it.

    Attributes:
        pulls: takes jobs of whole units; one counts when every rank has read and proved its share.
        fingerprint: of the node's model and layout.

    Raises:
        TransferError: as ``Puller``.
    """

    def __init__(self, backends: Sequence[TransferBackend], geometry: ModelGeometry, block_size: int) -> None:
        self.backends = tuple(backends)
        self.fingerprint = self.backends[0].fingerprint
        self._pullers = [Puller(backend, name=f"puller-{rank}") for rank, backend in enumerate(self.backends)]
        ranks = [
            RankPuller(puller, geometry, block_size, rank=rank, tensor_parallel_size=len(self._pullers))
            for rank, puller in enumerate(self._pullers)
        ]
        self.pulls: PullRunner = JointPuller(ranks) if len(ranks) > 1 else ranks[0]

    def metadata(self) -> bytes:
        """The node's announcement. Blocks, and raises, as ``TransferBackend.metadata``."""
        announcements = [backend.metadata() for backend in self.backends]
        return join_ranks(announcements) if len(announcements) > 1 else announcements[0]

    def add_peer(self, metadata: bytes) -> Peer:
        """To every rank. Blocks, and raises, as ``TransferBackend.add_peer``; where only some ranks have the peer,
        nothing of it is read before all do."""
        peers = [backend.add_peer(metadata) for backend in self.backends]
        return peers[0]  # all ranks know it by the same name

    @property
    def is_alive(self) -> bool:
        return all(puller.is_alive for puller in self._pullers)

    @property
    def num_in_flight(self) -> int:
        """Pulls whose data a transport may be writing now."""
        return max(puller.num_in_flight for puller in self._pullers)

    @property
    def num_unterminated(self) -> int:
        """Reads that outlived their pulls, of all ranks."""
        return sum(puller.num_unterminated for puller in self._pullers)

    @property
    def oldest_unterminated_s(self) -> float:
        """As ``Puller.oldest_unterminated_s``, of all ranks."""
        return max(puller.oldest_unterminated_s for puller in self._pullers)

    def recreate_backend(self, timeout_s: float) -> None:
        """As ``Puller.recreate_backend``, of every rank in turn, also where one could not; raises the first error."""
        errors: list[TransferError] = []
        for puller in self._pullers:
            try:
                puller.recreate_backend(timeout_s)
            except TransferError as exc:
                errors.append(exc)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """When nothing is pulled any more. Blocks."""
        for puller in self._pullers:
            puller.close()
        for backend in self.backends:
            try:
                backend.close()
            except TransferError as exc:
                # It ends with the process, whose memory nobody uses any more.
                logger.error("a transfer agent was not ended: %s", exc.message)
