"""Holders that are frozen, killed, restarted, or make themselves a new agent, each in the middle of a large read, over
the transports that UCX chooses by itself and over TCP. Of the two, the ordinary tier has for each fault the one over
which more can go wrong; the whole matrix has both.

What must hold whatever happens: an OK pull has the holder's bytes, and memory that was given back is never written
again.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from common.transfer.codes import TransferCode
from common.transfer.jobs import PullOutcome, PullStatus
from common.transfer.regions import Peer
from tests.support.transfer_memory import BLOCKS, EndpointMemory
from tests.support.transfer_rigs import EPOCH, LONG_S, Rig, Rigs
from tests.support.transfer_sites import PATIENCE_S, ProcessHolder, Site, wait_for

# 96 MiB in blocks that do not merge: tens of milliseconds over shared memory, more over TCP.
SIZES: dict[str, Any] = {"num_blocks": 98, "block_bytes": 1 << 20, "num_slots": 2, "slot_bytes": 64}
UNITS = list(range(1, 97))
PAIRS = [(unit, 97 - unit) for unit in UNITS]
DEADLINE_S = 2.0


@dataclass
class Scene:
    transport: str
    site: Site
    rig: Rig
    memory: EndpointMemory

    def holder(self, **options: Any) -> ProcessHolder:
        holder = self.site.holder(**{"epoch": EPOCH, **SIZES, **options})
        assert isinstance(holder, ProcessHolder)
        return holder

    def connect(self, holder: ProcessHolder) -> Peer:
        """With the connection made: the first read of a peer sets it up."""
        peer = self.rig.backend.add_peer(holder.metadata)
        assert self.rig.pull(peer, [(97, 1)], epoch=holder.epoch).status is PullStatus.OK
        return peer

    def start_reading(self, holder: ProcessHolder, peer: Peer, timeout_s: float = LONG_S) -> None:
        """Returns once the first bytes of the read have arrived."""
        marks = [holder.pattern(BLOCKS, remote)[:8] for _, remote in PAIRS]
        self.rig.submit(peer, PAIRS, pull_id="read", timeout_s=timeout_s, epoch=holder.epoch)
        assert wait_for(
            lambda: any(
                self.memory.peek(BLOCKS, local, 8) == mark for (local, _), mark in zip(PAIRS, marks, strict=True)
            )
        )

    def check(self, outcome: PullOutcome, holder: ProcessHolder) -> None:
        """OK means: the holder's bytes."""
        if outcome.status is PullStatus.OK:
            assert all(self.memory.read(BLOCKS, local) == holder.pattern(BLOCKS, remote) for local, remote in PAIRS)

    def digests(self) -> list[bytes]:
        return [hashlib.sha256(self.memory.read(BLOCKS, unit)).digest() for unit in UNITS]

    def refill(self, source: ProcessHolder) -> None:
        """Other requests' data in the same memory, by a pull of its own."""
        again = self.rig.backend.add_peer(source.metadata)
        outcome = self.rig.pull(again, PAIRS, epoch=source.epoch)
        assert outcome.status is PullStatus.OK, outcome
        self.check(outcome, source)


def over(first: str, second: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("transport", [first, pytest.param(second, marks=pytest.mark.full)])


@pytest.fixture
def scene(transport: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    if transport == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    else:
        monkeypatch.delenv("UCX_TLS", raising=False)
    site, rigs = Site("nixl"), Rigs()
    memory = EndpointMemory(epoch=5, seed=1, **SIZES)
    yield Scene(transport, site, rigs(site.backend(memory)), memory)
    rigs.close()
    site.close()


@over("tcp", "default")
def test_holder_when_frozen_in_mid_read_then_not_one_byte_of_reused_memory_is_touched_when_it_wakes(
    scene: Scene,
) -> None:
    holder, other = scene.holder(seed=2), scene.holder(engine_id="other", seed=3)
    peer = scene.connect(holder)
    scene.start_reading(holder, peer, timeout_s=DEADLINE_S)
    holder.freeze()

    outcome = scene.rig.outcome()
    scene.check(outcome, holder)
    if scene.transport == "tcp":
        # Nothing can be said about the destination: it stays in quarantine, until the agent that reads is gone.
        assert (outcome.status, outcome.terminal) == (PullStatus.TIMED_OUT, False)
        assert scene.rig.puller.num_unterminated == 1
        assert scene.rig.terminals.empty()
        scene.rig.puller.recreate_backend(timeout_s=0.1)
        assert scene.rig.terminals.get(timeout=PATIENCE_S) == "read"
    assert outcome.terminal or scene.transport == "tcp"
    assert scene.rig.puller.num_unterminated == 0

    scene.refill(other)
    filled = scene.digests()
    holder.thaw()
    code = holder.exit_code_after_waking(settle_s=0.5)
    # UCX ends a process that wakes up to find that the reader has gone (over TCP, with answers half sent).
    assert code is None or (code == -signal.SIGABRT and scene.transport == "tcp")
    assert scene.digests() == filled
    if code is None:
        again = scene.rig.backend.add_peer(holder.metadata)
        outcome = scene.rig.pull(again, PAIRS)
        assert outcome.status is PullStatus.OK
        scene.check(outcome, holder)


@pytest.mark.full  # the next one kills it too
@over("tcp", "default")
def test_holder_when_killed_in_mid_read_then_terminal_and_reused_memory_stays(scene: Scene) -> None:
    holder, other = scene.holder(seed=2), scene.holder(engine_id="other", seed=3)
    peer = scene.connect(holder)
    scene.start_reading(holder, peer)
    holder.kill()
    outcome = scene.rig.outcome()
    assert outcome.terminal
    scene.check(outcome, holder)
    if scene.transport == "tcp":
        assert (outcome.status, outcome.reason) == (PullStatus.FAILED, TransferCode.PEER_DISCONNECTED)
    scene.refill(other)
    filled = scene.digests()
    assert scene.rig.pull(peer, [(97, 1)]).reason == TransferCode.PEER_DISCONNECTED
    time.sleep(0.2)
    assert scene.digests() == filled


@over("default", "tcp")
def test_holder_when_restarted_in_mid_read_then_its_old_promises_are_stale_and_its_new_ones_hold(scene: Scene) -> None:
    holder = scene.holder(seed=2)
    peer = scene.connect(holder)
    scene.start_reading(holder, peer)
    holder.kill()
    restarted = scene.holder(seed=4, epoch=EPOCH + 1)
    again = scene.rig.backend.add_peer(restarted.metadata)
    outcome = scene.rig.outcome()
    assert outcome.terminal
    scene.check(outcome, holder)
    assert scene.rig.pull(peer, PAIRS).reason == TransferCode.UNKNOWN_PEER
    outcome = scene.rig.pull(again, PAIRS, epoch=EPOCH)
    assert (outcome.status, outcome.reason) == (PullStatus.STALE, "stale_epoch")
    outcome = scene.rig.pull(again, PAIRS, epoch=EPOCH + 1)
    assert outcome.status is PullStatus.OK
    scene.check(outcome, restarted)


@over("default", "tcp")
def test_holder_when_it_makes_a_new_agent_in_mid_read_then_ok_or_disconnected_and_served_when_added_again(
    scene: Scene,
) -> None:
    holder = scene.holder(seed=2)
    peer = scene.connect(holder)
    scene.start_reading(holder, peer)
    holder.recreate()
    outcome = scene.rig.outcome()
    assert outcome.terminal
    assert outcome.status is PullStatus.OK or outcome.reason == TransferCode.PEER_DISCONNECTED
    scene.check(outcome, holder)
    again = scene.rig.backend.add_peer(holder.metadata)
    outcome = scene.rig.pull(again, PAIRS)
    assert outcome.status is PullStatus.OK
    scene.check(outcome, holder)
