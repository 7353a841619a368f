"""The agents of a node of ranks as one: what they announce, whom they know, and a read of one rank that never ends."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import numpy as np
import pytest

from common.errors import TransferError
from common.node.pull.rank_agents import RankAgents
from common.transfer.announcement import PeerMetadata
from common.transfer.codes import TransferCode
from common.transfer.jobs import PullJob, PullOutcome, PullReason, PullStatus
from common.transfer.reads import Read
from common.transfer.regions import Peer
from common.transfer.testing.faulty import Fault, FaultyBackend
from tests.support.ranks import RankNode
from tests.support.transfer_sites import PATIENCE_S, Site, wait_for

MODEL, BLOCK_SIZE = "granite-4.0-h-tiny", 4
PAIRS = [(1, 4), (3, 2)]
SEED = 3


class Scene:
    """A reader of two ranks, and a holder of one."""

    def __init__(self) -> None:
        self.site = Site("faulty")
        self.holder = RankNode(self.site, "holder", MODEL, BLOCK_SIZE, 1, epoch=77, seed=SEED)
        self.reader = RankNode(self.site, "reader", MODEL, BLOCK_SIZE, 2, epoch=5, seed=0)
        self.agents = RankAgents(self.reader.backends, self.reader.geometry, BLOCK_SIZE)
        self.outcomes: queue.Queue[PullOutcome] = queue.Queue()
        self.terminals: queue.Queue[str] = queue.Queue()

    @property
    def names(self) -> list[str]:
        """Of the agents that are announced."""
        return [rank.name for rank in PeerMetadata.from_bytes(self.agents.metadata()).ranks]

    def submit(self, peer: Peer) -> None:
        memory = self.holder.memories[0]
        generations = [memory.expected(name, remote) for name in memory.pools for _, remote in PAIRS]
        reads = [Read(name, name, PAIRS) for name in memory.pools]
        job = PullJob("pull", peer, reads, generations, self.holder.epoch, time.monotonic() + PATIENCE_S)
        self.agents.pulls.submit(job, self.outcomes.put, self.terminals.put)

    def outcome(self) -> PullOutcome:
        return self.outcomes.get(timeout=PATIENCE_S)

    def check_arrived(self) -> None:
        for memory in self.reader.memories:
            for name, pool in memory.pools.items():
                for local, remote in PAIRS:
                    assert np.array_equal(pool[local], memory.content(name, remote, SEED))


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.agents.close()
    scene.site.close()


def test_pull_when_every_rank_has_its_share_then_ok_and_one_node_is_announced(scene: Scene) -> None:
    peer = scene.agents.add_peer(scene.holder.announcement)
    scene.submit(peer)
    assert scene.outcome().status is PullStatus.OK
    scene.check_arrived()
    assert scene.agents.metadata() == scene.reader.announcement
    assert len(scene.holder.backends[0].add_peer(scene.agents.metadata()).ranks) == 2


def test_read_when_that_of_one_rank_does_not_end_then_new_agents_of_all_end_it(scene: Scene) -> None:
    peer = scene.agents.add_peer(scene.holder.announcement)
    before = scene.names
    hanging = scene.reader.backends[1]
    assert isinstance(hanging, FaultyBackend)
    hanging.inject(Fault("hang"))
    scene.submit(peer)
    assert wait_for(lambda: hanging.num_held_back == 1)
    assert scene.agents.pulls.abandon("pull")
    outcome = scene.outcome()
    assert (outcome.status, outcome.reason, outcome.terminal) == (PullStatus.TIMED_OUT, PullReason.PEER_LOST, False)
    assert scene.agents.num_unterminated == 1
    assert scene.agents.oldest_unterminated_s > 0
    scene.agents.recreate_backend(0.05)
    assert scene.terminals.get(timeout=PATIENCE_S) == "pull"
    assert scene.agents.num_unterminated == scene.agents.num_in_flight == 0
    assert not set(scene.names) & set(before)
    scene.submit(peer)
    outcome = scene.outcome()
    assert (outcome.reason, outcome.terminal) == (TransferCode.UNKNOWN_PEER, True)
    scene.submit(scene.agents.add_peer(scene.holder.announcement))
    assert scene.outcome().status is PullStatus.OK
    scene.check_arrived()


def test_agents_when_one_cannot_be_made_again_then_the_others_are_and_it_is_said(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = scene.names

    def refuse() -> None:
        raise TransferError("held", code=TransferCode.AGENT_ALIVE)

    monkeypatch.setattr(scene.reader.backends[0], "recreate", refuse)
    with pytest.raises(TransferError, match="held"):
        scene.agents.recreate_backend(0.05)
    assert [name == old for name, old in zip(scene.names, before, strict=True)] == [True, False]
