"""A peer of two ranks, each a process of its own, of which one is killed or frozen: what a pull from both ends as, and
when its destinations are safe."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field

import pytest

from common.transfer.announcement import join_ranks
from common.transfer.codes import TransferCode
from common.transfer.jobs import PullJob, PullOutcome, PullStatus
from common.transfer.reads import Read
from common.transfer.regions import Peer
from tests.support.transfer_memory import BLOCK_GENERATIONS, BLOCKS, EndpointMemory
from tests.support.transfer_rigs import EPOCH, LONG_S, SHORT_S, Rig, Rigs, expected
from tests.support.transfer_sites import PATIENCE_S, Holder, Site


@dataclass
class Scene:
    """``holders``: the ranks, which hold different bytes. Unit N of rank R is read into unit 10 * R + N."""

    site: Site
    rig: Rig
    memory: EndpointMemory
    holders: list[Holder] = field(default_factory=list)
    terminals: queue.Queue[str] = field(default_factory=queue.Queue)

    def start(self, epoch: int = EPOCH) -> Peer:
        self.holders = [self.site.holder(epoch=epoch, seed=seed) for seed in (2, 3)]
        return self.add()

    def add(self) -> Peer:
        return self.rig.backend.add_peer(join_ranks([holder.metadata for holder in self.holders]))

    def pull(self, peer: Peer, unit: int, timeout_s: float = LONG_S) -> PullOutcome:
        reads = [Read(BLOCKS, BLOCKS, [(10 * rank + unit, unit)], rank=rank) for rank in range(2)]
        generations = expected(BLOCK_GENERATIONS, [unit])
        job = PullJob("pull", peer, reads, generations, peer.epoch, time.monotonic() + timeout_s)
        self.rig.puller.submit(job, self.rig.outcomes.put, self.terminals.put)
        return self.rig.outcome()

    def arrived(self, unit: int) -> list[bool]:
        """Of each rank, whether its bytes are here."""
        return [
            self.memory.read(BLOCKS, 10 * rank + unit) == holder.pattern(BLOCKS, unit)
            for rank, holder in enumerate(self.holders)
        ]


@pytest.fixture
def scene(freezable_site: Site, freezable_rigs: Rigs, memory: EndpointMemory) -> Scene:
    return Scene(freezable_site, freezable_rigs(freezable_site.backend(memory)), memory)


@pytest.mark.parametrize("frozen", [pytest.param(0, marks=pytest.mark.full), 1])
def test_pull_when_one_rank_is_frozen_then_not_terminal_until_it_woke(scene: Scene, frozen: int) -> None:
    peer = scene.start()
    assert scene.pull(peer, 1).status is PullStatus.OK
    assert scene.arrived(1) == [True, True]
    scene.holders[frozen].freeze()
    outcome = scene.pull(peer, 2, SHORT_S)
    assert (outcome.status, outcome.terminal, outcome.reason) == (PullStatus.TIMED_OUT, False, "deadline")
    assert scene.rig.puller.num_unterminated == 1
    assert scene.terminals.empty()
    scene.holders[frozen].thaw()
    assert scene.terminals.get(timeout=PATIENCE_S) == "pull"
    assert scene.rig.puller.num_unterminated == 0
    assert scene.arrived(2) == [True, True]  # the late bytes did arrive
    assert scene.pull(peer, 3).status is PullStatus.OK


@pytest.mark.full
def test_pull_when_one_rank_is_frozen_and_the_next_dead_then_not_terminal_until_the_frozen_one_woke(
    scene: Scene,
) -> None:
    """The failure of one rank's read is not the end of another's that was posted before."""
    peer = scene.start()
    assert scene.pull(peer, 1).status is PullStatus.OK
    frozen, dead = scene.holders
    frozen.freeze()
    dead.kill()
    outcome = scene.pull(peer, 2, SHORT_S)
    assert (outcome.status, outcome.terminal) == (PullStatus.TIMED_OUT, False)
    frozen.thaw()
    assert scene.terminals.get(timeout=PATIENCE_S) == "pull"
    assert scene.arrived(2) == [True, False]
    assert scene.pull(peer, 3).reason == TransferCode.PEER_DISCONNECTED


def test_pull_when_one_rank_was_killed_then_failed_until_the_nodes_new_life_is_added(scene: Scene) -> None:
    peer = scene.start()
    assert scene.pull(peer, 1).status is PullStatus.OK
    scene.holders[1].kill()
    for unit in (2, 3):
        outcome = scene.pull(peer, unit)
        assert (outcome.status, outcome.terminal) == (PullStatus.FAILED, True)
        assert outcome.reason == TransferCode.PEER_DISCONNECTED
    new = scene.start(epoch=EPOCH + 1)
    assert (new.engine_id, new.epoch) == (peer.engine_id, EPOCH + 1)
    assert scene.pull(new, 4).status is PullStatus.OK
    assert scene.arrived(4) == [True, True]
    assert scene.pull(peer, 5).reason == TransferCode.UNKNOWN_PEER


def test_recreate_when_one_rank_stays_frozen_then_its_late_read_ends_and_nothing_comes(scene: Scene) -> None:
    peer = scene.start()
    assert scene.pull(peer, 1).status is PullStatus.OK
    scene.holders[1].freeze()
    assert scene.pull(peer, 2, SHORT_S).terminal is False
    scene.rig.puller.recreate_backend(timeout_s=0.05)
    assert scene.terminals.get(timeout=PATIENCE_S) == "pull"
    assert scene.pull(peer, 3).reason == TransferCode.UNKNOWN_PEER
    scene.memory.write(BLOCKS, 12, b"new" + bytes(4093))
    scene.holders[1].thaw()
    assert scene.pull(scene.add(), 4).status is PullStatus.OK
    assert scene.memory.read(BLOCKS, 12) == b"new" + bytes(4093)
