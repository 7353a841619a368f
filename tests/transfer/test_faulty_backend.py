"""Each fault, seen by a puller: what the outcome says, and that nothing is OK which is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from common.errors import InvalidRequestError
from common.transfer.jobs import PullOutcome, PullStatus
from common.transfer.regions import Peer
from common.transfer.testing.faulty import FAULT_KINDS, Fault, FaultyBackend
from tests.support.transfer_memory import BLOCK_GENERATIONS, BLOCKS, EndpointMemory
from tests.support.transfer_rigs import EPOCH, SHORT_S, Rig, Rigs
from tests.support.transfer_sites import PATIENCE_S, Holder, Site, wait_for


@dataclass
class Scene:
    """A holder, and a puller that reads from it through a backend with faults."""

    holder: Holder
    faulty: FaultyBackend
    rig: Rig
    peer: Peer
    memory: EndpointMemory

    def has_arrived(self, unit: int) -> bool:
        return self.memory.read(BLOCKS, unit) == self.holder.pattern(BLOCKS, unit)

    def is_untouched(self, unit: int) -> bool:
        return self.memory.read(BLOCKS, unit) == self.memory.pattern(1, BLOCKS, unit)

    def pull(self, *units: int, timeout_s: float = PATIENCE_S) -> PullOutcome:
        return self.rig.pull(self.peer, [(unit, unit) for unit in units], timeout_s=timeout_s)

    def submit_late(self, before_it_starts: Callable[[], None]) -> PullOutcome:
        """A pull of block 3 whose data read is held back until ``before_it_starts`` has run."""
        self.rig.submit(self.peer, [(3, 3)])
        assert wait_for(lambda: len(self.rig.backend.events) == 1)
        before_it_starts()
        self.faulty.clear()
        return self.rig.outcome()


@pytest.fixture(params=["inprocess", pytest.param("nixl", marks=pytest.mark.full)])
def scene(request: pytest.FixtureRequest, memory: EndpointMemory) -> Iterator[Scene]:
    site, rigs = Site(request.param), Rigs()
    holder = site.holder(epoch=EPOCH)
    faulty = FaultyBackend(site.backend(memory))
    rig = rigs(faulty)
    yield Scene(holder, faulty, rig, rig.backend.add_peer(holder.metadata), memory)
    rigs.close()
    site.close()


def test_post_error_when_injected_then_failed_and_untouched_and_the_next_pull_is_ok(scene: Scene) -> None:
    scene.faulty.inject(Fault("post_error"))
    outcome = scene.pull(3, 4)
    assert (outcome.status, outcome.terminal, outcome.reason) == (PullStatus.FAILED, True, "transfer_failed")
    assert scene.is_untouched(3)
    assert scene.pull(3, 4).status is PullStatus.OK


def test_poll_error_when_injected_then_failed_although_everything_arrived(scene: Scene) -> None:
    scene.faulty.inject(Fault("poll_error"))
    outcome = scene.pull(3)
    assert (outcome.status, outcome.terminal, outcome.reason) == (PullStatus.FAILED, True, "transfer_failed")
    assert "injected: poll_error" in outcome.message
    assert scene.has_arrived(3)


def test_partial_when_injected_then_failed_with_half_of_the_units(scene: Scene) -> None:
    scene.faulty.inject(Fault("partial"))
    outcome = scene.pull(3, 5, 7)
    assert (outcome.status, outcome.terminal) == (PullStatus.FAILED, True)
    assert [scene.has_arrived(unit) for unit in (3, 5, 7)] == [True, False, False]
    assert scene.is_untouched(5)


def test_stale_when_it_strikes_data_then_ok_with_other_bytes(scene: Scene) -> None:
    # Generations cannot tell: the holder's memory never changed. Digests can (tests/unit/node/test_digests.py).
    scene.faulty.inject(Fault("stale"))
    assert scene.pull(3).status is PullStatus.OK
    assert scene.memory.read(BLOCKS, 3) == bytes(255 - value for value in scene.holder.pattern(BLOCKS, 3))
    assert scene.pull(3).status is PullStatus.OK
    assert scene.has_arrived(3)


def test_stale_when_it_strikes_generations_then_stale(scene: Scene) -> None:
    scene.faulty.inject(Fault("stale", on="generations"))
    assert scene.pull(3).status is PullStatus.STALE
    assert scene.has_arrived(3)


@pytest.mark.parametrize("kind", ["post_error", "poll_error", "partial"])
def test_error_when_it_strikes_generations_then_failed_although_the_data_is_right(scene: Scene, kind: str) -> None:
    scene.faulty.inject(Fault(kind, on="generations"))
    outcome = scene.pull(3)
    assert (outcome.status, outcome.terminal) == (PullStatus.FAILED, True)
    assert scene.has_arrived(3)


def test_delay_when_the_block_is_reused_meanwhile_then_stale(scene: Scene) -> None:
    scene.faulty.inject(Fault("delay", seconds=PATIENCE_S / 2))
    outcome = scene.submit_late(lambda: scene.holder.set_generation(BLOCK_GENERATIONS, 3, 5, tag=9))
    assert (outcome.status, outcome.reason) == (PullStatus.STALE, "stale_generation")


def test_delay_when_nothing_happens_meanwhile_then_ok(scene: Scene) -> None:
    scene.faulty.inject(Fault("delay", seconds=0.05, on="both", count=2))
    outcome = scene.pull(3)
    assert outcome.status is PullStatus.OK
    assert outcome.seconds >= 0.1
    assert scene.has_arrived(3)


def test_delay_when_the_holder_dies_meanwhile_then_failed(scene: Scene) -> None:
    scene.faulty.inject(Fault("delay", seconds=PATIENCE_S / 2))
    outcome = scene.submit_late(scene.holder.kill)
    assert (outcome.status, outcome.terminal) == (PullStatus.FAILED, True)
    assert scene.is_untouched(3)


def test_hang_when_the_deadline_passes_then_not_terminal_until_cleared_and_late_bytes_arrive(scene: Scene) -> None:
    scene.faulty.inject(Fault("hang"))
    outcome = scene.pull(3, timeout_s=SHORT_S)
    assert (outcome.status, outcome.terminal, outcome.reason) == (PullStatus.TIMED_OUT, False, "deadline")
    assert scene.is_untouched(3)
    scene.faulty.clear()
    assert scene.rig.terminals.get(timeout=PATIENCE_S) == "pull"
    assert scene.has_arrived(3)


def test_hang_when_the_agent_is_recreated_then_terminal_and_never_written(scene: Scene) -> None:
    scene.faulty.inject(Fault("hang"))
    assert scene.pull(3, timeout_s=SHORT_S).terminal is False
    scene.rig.puller.recreate_backend(timeout_s=SHORT_S)
    assert scene.rig.terminals.get(timeout=PATIENCE_S) == "pull"
    scene.faulty.clear()
    scene.peer = scene.rig.backend.add_peer(scene.holder.metadata)
    assert scene.pull(4).status is PullStatus.OK
    assert scene.is_untouched(3)


def test_hang_when_it_strikes_generations_then_timed_out_but_terminal(scene: Scene) -> None:
    scene.faulty.inject(Fault("hang", on="generations"))
    outcome = scene.pull(3, timeout_s=SHORT_S)
    assert (outcome.status, outcome.terminal) == (PullStatus.TIMED_OUT, True)


def test_faults_when_several_are_queued_then_each_strikes_its_share_in_order(scene: Scene) -> None:
    scene.faulty.inject(Fault("post_error", count=2))
    scene.faulty.inject(Fault("stale", on="generations"))
    scene.faulty.inject(Fault("poll_error"))
    statuses = [scene.pull(3).status for _ in range(5)]
    failed, stale, ok = PullStatus.FAILED, PullStatus.STALE, PullStatus.OK
    # The third pull meets two: of the data, its generations are not read any more.
    assert statuses == [failed, failed, failed, stale, ok]


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "flood"), ("on", "weekends"), ("count", 0), ("count", True), ("seconds", -1.0), ("seconds", "2")],
)
def test_fault_when_a_field_is_wrong_then_refused_by_name(field: str, value: object) -> None:
    options: dict[str, object] = {"kind": FAULT_KINDS[0], field: value}
    with pytest.raises(InvalidRequestError, match=str(value)) as caught:
        Fault(**options)  # type: ignore[arg-type]
    assert caught.value.param == field
