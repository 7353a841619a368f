"""The keeper with a real puller whose reads hang, and pools of which it is told how much waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from common.errors import DeadlineExceededError, TransferError
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.observe.stats import CacheStats
from common.node.pull import quarantine
from common.node.pull.quarantine import QuarantineKeeper
from common.transfer.codes import TransferCode
from common.transfer.generation_check import SCRATCH_SEGMENTS
from common.transfer.jobs import PullStatus
from common.transfer.regions import Peer
from common.transfer.testing.faulty import Fault, FaultyBackend
from tests.support.transfer_memory import EndpointMemory
from tests.support.transfer_rigs import EPOCH, SHORT_S, Rig, Rigs
from tests.support.transfer_sites import PATIENCE_S, Holder, Site, wait_for
from tests.unit.kv_cache.world import make_config


@dataclass
class Scene:
    """``stats``: what the keeper is told; None: the engine does not answer in time."""

    rig: Rig
    faulty: FaultyBackend
    holder: Holder
    peer: Peer
    stats: CacheStats | None
    num_asked: int = 0
    num_recreated: int = 0
    keeper: QuarantineKeeper = field(init=False)

    def __post_init__(self) -> None:
        self.keeper = QuarantineKeeper(self.rig.puller, self.read_stats, self.count)

    async def read_stats(self) -> CacheStats:
        self.num_asked += 1
        if self.stats is None:
            raise DeadlineExceededError("in a long step")
        return self.stats

    def count(self) -> None:
        self.num_recreated += 1

    def hang(self) -> None:
        self.faulty.inject(Fault("hang"))
        self.rig.submit(self.peer, [(2, 2)])
        assert wait_for(lambda: bool(self.rig.backend.events))
        assert self.rig.puller.abandon("pull")
        assert self.rig.outcome().terminal is False

    def quarantine(self, blocks: int = 0, group_blocks: int = 0, slots: int = 0) -> None:
        """Of 100 units each."""

        def states(count: int) -> dict[str, int]:
            return {"free": 60, "cached": 40 - count, "quarantined": count}

        assert self.stats is not None
        groups = {"full_attention": states(blocks), "sliding_window": states(group_blocks)}
        self.stats = replace(self.stats, blocks=states(blocks), group_blocks=groups, slots=states(slots))


@pytest.fixture
def scene(memory: EndpointMemory) -> Iterator[Scene]:
    site, rigs = Site("inprocess"), Rigs()
    holder = site.holder(epoch=EPOCH)
    faulty = FaultyBackend(site.backend(memory))
    rig = rigs(faulty)
    scene = Scene(rig, faulty, holder, rig.backend.add_peer(holder.metadata), KVCacheManager(make_config()).stats())
    scene.quarantine()
    yield scene
    rigs.close()
    site.close()


@pytest.fixture
def memory() -> EndpointMemory:
    return EndpointMemory(epoch=5, seed=1)


@pytest.mark.asyncio
async def test_keeper_when_nothing_hangs_then_the_engine_is_not_even_asked(scene: Scene) -> None:
    scene.quarantine(blocks=40)
    assert not await scene.keeper.check()
    assert (scene.num_asked, scene.num_recreated) == (0, 0)


@pytest.mark.parametrize("pool", ["blocks", "group_blocks", "slots"])
@pytest.mark.asyncio
async def test_keeper_when_more_than_a_twentieth_of_a_pool_waits_then_the_agent_is_new_and_the_read_over(
    scene: Scene, pool: str
) -> None:
    scene.hang()
    scene.quarantine(**{pool: 5})
    assert not await scene.keeper.check()
    scene.quarantine(**{pool: 6})
    assert await scene.keeper.check()
    assert scene.num_recreated == 1
    assert scene.rig.terminals.get(timeout=PATIENCE_S) == "pull"
    assert scene.rig.puller.num_unterminated == 0
    # The cache has not heard of it yet; that is no reason to do it again.
    assert not await scene.keeper.check()
    assert scene.rig.pull(scene.peer, [(3, 3)]).reason == TransferCode.UNKNOWN_PEER


@pytest.mark.asyncio
async def test_keeper_when_a_read_is_too_old_then_the_agent_is_new_however_little_waits(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.hang()
    scene.stats = None  # also while the engine is busy
    assert not await scene.keeper.check()
    monkeypatch.setattr(quarantine, "MAX_AGE_S", 0.05)
    await asyncio.sleep(0.06)
    assert await scene.keeper.check()
    assert scene.num_recreated == 1


@pytest.mark.asyncio
async def test_keeper_when_reads_of_generations_hang_then_their_scratch_memory_comes_back(
    scene: Scene, memory: EndpointMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold no memory of a pool: only their age tells. Once they have all of scratch, nothing can be pulled."""
    scene.faulty.inject(Fault("hang", count=SCRATCH_SEGMENTS, on="generations"))
    for unit in range(1, SCRATCH_SEGMENTS + 1):
        scene.rig.submit(scene.peer, [(unit, unit)], pull_id=f"pull-{unit}", timeout_s=SHORT_S)
    outcomes = [scene.rig.outcome() for _ in range(SCRATCH_SEGMENTS)]
    assert {(each.reason, each.terminal) for each in outcomes} == {("deadline", True)}
    assert scene.rig.pull(scene.peer, [(40, 40)], timeout_s=SHORT_S).message.endswith("waiting_for_scratch")
    assert scene.rig.puller.num_unterminated == 0
    assert not await scene.keeper.check()
    monkeypatch.setattr(quarantine, "MAX_AGE_S", 0.01)
    assert await scene.keeper.check()
    assert scene.rig.puller.oldest_unterminated_s == 0.0
    assert scene.rig.pull(scene.rig.backend.add_peer(scene.holder.metadata), [(40, 40)]).status is PullStatus.OK


@pytest.mark.asyncio
async def test_keeper_when_no_new_agent_starts_then_it_tries_again_until_one_does(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene.hang()
    scene.quarantine(slots=50)

    def refuse() -> None:
        raise TransferError("no agent", code=TransferCode.BACKEND_UNAVAILABLE)

    with monkeypatch.context() as patched:
        patched.setattr(scene.faulty, "recreate", refuse)
        assert not await scene.keeper.check()
        assert "no agent" in caplog.text
    scene.quarantine()
    assert await scene.keeper.check()
    assert scene.num_recreated == 1
    assert not await scene.keeper.check()


@pytest.mark.asyncio
async def test_keeper_when_the_old_agent_lives_on_then_nothing_is_freed_and_it_tries_again_after_a_while(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene.hang()
    scene.quarantine(slots=50)
    tries: list[float] = []

    def refuse() -> None:
        tries.append(time.monotonic())
        raise TransferError("held by a frame", code=TransferCode.AGENT_ALIVE)

    with monkeypatch.context() as patched:
        patched.setattr(scene.faulty, "recreate", refuse)
        assert not await scene.keeper.check()
        assert not await scene.keeper.check()
        assert len(tries) == 1
        patched.setattr(quarantine, "RETRY_S", 0.0)
        scene.keeper._not_before_s = 0.0
        assert not await scene.keeper.check()
        assert not await scene.keeper.check()
        assert len(tries) == 3
    assert "the quarantine stays as it is" in caplog.text
    assert (scene.num_recreated, scene.rig.puller.num_unterminated, scene.rig.terminals.qsize()) == (0, 1, 0)
    assert await scene.keeper.check()
    assert scene.rig.terminals.get(timeout=PATIENCE_S) == "pull"


@pytest.mark.asyncio
async def test_keeper_when_started_then_it_checks_by_itself_until_closed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "INTERVAL_S", 0.01)
    scene.hang()
    scene.keeper.start()
    scene.quarantine(blocks=90)
    async with asyncio.timeout(PATIENCE_S):
        while not scene.num_recreated:
            await asyncio.sleep(0.01)
    await scene.keeper.close()
