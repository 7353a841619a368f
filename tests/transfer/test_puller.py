"""Pulls: read, then verify, then report; over both transports."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from common.errors import TransferError
from common.transfer import puller
from common.transfer.codes import TransferCode
from common.transfer.generation_check import SCRATCH_SEGMENTS, SEGMENT_ENTRIES
from common.transfer.jobs import PullJob, PullOutcome, PullReason, PullStatus
from common.transfer.puller import Puller
from common.transfer.reads import Handle, ReadStatus
from common.transfer.testing.faulty import Fault, FaultyBackend
from tests.support.transfer_memory import BLOCK_GENERATIONS, BLOCKS, SLOT_GENERATIONS, SLOTS, EndpointMemory
from tests.support.transfer_recording import RecordingBackend
from tests.support.transfer_rigs import EPOCH, LONG_S, SHORT_S, Rig, Rigs, expected
from tests.support.transfer_sites import PATIENCE_S, Holder, Site, wait_for

# What a puller does is the same on every backend, and each backend keeps its own promises (test_backend_contract.py).
pytestmark = pytest.mark.parametrize(
    "site", ["inprocess", "faulty", pytest.param("nixl", marks=pytest.mark.full)], indirect=True
)


def test_pull_when_everything_holds_then_ok_and_the_bytes_are_the_holders(
    holder: Holder, rig: Rig, memory: EndpointMemory
) -> None:
    peer = rig.backend.add_peer(holder.metadata)

    outcome = rig.pull(peer, [(1, 20), (2, 21), (3, 40)], [(4, 3)])

    assert (outcome.status, outcome.terminal, outcome.reason) == (PullStatus.OK, True, "")
    assert (outcome.num_bytes, outcome.num_descriptors) == (3 * 4096 + 16384, 3)
    assert [memory.read(BLOCKS, unit) for unit in (1, 2, 3)] == [holder.pattern(BLOCKS, unit) for unit in (20, 21, 40)]
    assert memory.read(SLOTS, 4) == holder.pattern(SLOTS, 3)
    # The generations are asked for only after the data has reported done.
    data, tables = (BLOCKS, SLOTS), (BLOCK_GENERATIONS, SLOT_GENERATIONS)
    assert rig.backend.events == [("post", data), ("done", data), ("post", tables), ("done", tables)]
    assert rig.puller.num_active == rig.puller.num_unterminated == 0


def test_pull_when_a_generation_had_changed_before_then_stale(holder: Holder, rig: Rig) -> None:
    holder.set_generation(SLOT_GENERATIONS, 3, 5)
    outcome = rig.pull(rig.backend.add_peer(holder.metadata), [(1, 20)], [(4, 3)])
    assert (outcome.status, outcome.terminal) == (PullStatus.STALE, True)
    assert outcome.reason == "stale_generation"
    assert "slot_generations[3] is 5, promised was 1003" in outcome.message


def test_pull_when_the_content_is_another_ones_then_stale_although_the_generation_holds(
    holder: Holder, rig: Rig
) -> None:
    # Two blocks of a manifest changed places, generations and all: only the reader's own tokens can tell.
    peer = rig.backend.add_peer(holder.metadata)
    first, second = expected(BLOCK_GENERATIONS, [20, 21])
    swapped = [replace(first, tag=second.tag), replace(second, tag=first.tag)]
    outcome = rig.pull(peer, [(1, 20), (2, 21)], generations=swapped)
    assert (outcome.status, outcome.terminal, outcome.reason) == (PullStatus.STALE, True, "wrong_content")
    tags = f"block_generations[20] has tag {first.tag:#018x}, this prompt's is {second.tag:#018x}"
    assert tags in outcome.message
    assert rig.pull(peer, [(1, 20), (2, 21)]).status is PullStatus.OK


def test_pull_when_a_number_is_no_u64_then_stale_not_an_error(holder: Holder, rig: Rig) -> None:
    peer = rig.backend.add_peer(holder.metadata)
    (good,) = expected(BLOCK_GENERATIONS, [20])
    for wrong in (replace(good, value=1 << 70), replace(good, value=-1), replace(good, tag=-5)):
        assert rig.pull(peer, [(1, 20)], generations=[wrong]).status is PullStatus.STALE


def test_pull_when_a_block_is_reused_while_it_is_read_then_stale(
    holder: Holder, rig: Rig, memory: EndpointMemory
) -> None:
    peer = rig.backend.add_peer(holder.metadata)

    def reuse() -> None:
        holder.set_generation(BLOCK_GENERATIONS, 21, 9)
        holder.write(BLOCKS, 21, bytes(4096))

    rig.backend.on_first_done = reuse
    outcome = rig.pull(peer, [(1, 20), (2, 21)])

    assert (outcome.status, outcome.reason) == (PullStatus.STALE, "stale_generation")
    # The bytes happened to arrive before the change: nothing but the late look at the generations could tell.
    assert memory.read(BLOCKS, 2) == holder.pattern(BLOCKS, 21)


def test_pull_when_the_holder_is_in_another_life_then_stale(holder: Holder, rig: Rig) -> None:
    outcome = rig.pull(rig.backend.add_peer(holder.metadata), [(1, 20)], epoch=EPOCH + 1)
    assert (outcome.status, outcome.reason) == (PullStatus.STALE, "stale_epoch")


def test_pull_when_there_is_nothing_to_read_then_only_the_generations_decide(holder: Holder, rig: Rig) -> None:
    peer = rig.backend.add_peer(holder.metadata)
    good = rig.pull(peer, generations=expected(BLOCK_GENERATIONS, [7]))
    assert (good.status, good.num_bytes, good.num_descriptors) == (PullStatus.OK, 0, 0)
    holder.set_generation(BLOCK_GENERATIONS, 7, 1)
    assert rig.pull(peer, generations=expected(BLOCK_GENERATIONS, [7])).status is PullStatus.STALE


def test_pull_when_there_is_nothing_at_all_then_ok_without_a_read(holder: Holder, rig: Rig) -> None:
    outcome = rig.pull(rig.backend.add_peer(holder.metadata))
    assert outcome.status is PullStatus.OK
    assert rig.backend.events == []


def test_submit_when_data_comes_without_generations_then_refused(holder: Holder, rig: Rig) -> None:
    peer = rig.backend.add_peer(holder.metadata)
    with pytest.raises(TransferError) as caught:
        rig.submit(peer, [(1, 1)], generations=[])
    assert caught.value.code == TransferCode.UNVERIFIED_PULL
    assert rig.puller.num_active == 0


def test_pull_when_generations_exceed_the_scratch_of_one_read_then_all_are_checked(
    site: Site, rigs: Rigs, memory: EndpointMemory
) -> None:
    num_blocks = 2 * SEGMENT_ENTRIES + 10
    sizes: dict[str, Any] = {"num_blocks": num_blocks, "block_bytes": 256}
    holder = site.holder(epoch=EPOCH, **sizes)
    large = EndpointMemory(epoch=5, seed=1, **sizes)
    rig = rigs(site.backend(large))
    peer = rig.backend.add_peer(holder.metadata)
    pairs = [(unit, unit) for unit in range(1, num_blocks)]

    outcome = rig.pull(peer, pairs)
    assert (outcome.status, outcome.num_descriptors) == (PullStatus.OK, 1)
    assert [name for name, _ in rig.backend.events].count("post") == 1 + 3

    holder.set_generation(BLOCK_GENERATIONS, num_blocks - 1, 1)
    assert rig.pull(peer, pairs).status is PullStatus.STALE


def test_pull_when_more_run_at_once_than_scratch_segments_then_each_gets_its_own_answer(
    holder: Holder, rig: Rig, memory: EndpointMemory
) -> None:
    peer = rig.backend.add_peer(holder.metadata)
    holder.set_generation(BLOCK_GENERATIONS, 50, 1)
    count = SCRATCH_SEGMENTS + 20
    for unit in range(1, count + 1):
        rig.submit(peer, [(unit, unit)], pull_id=f"pull-{unit}")
    outcomes = {outcome.pull_id: outcome.status for outcome in (rig.outcome() for _ in range(count))}
    stale = {pull_id for pull_id, status in outcomes.items() if status is not PullStatus.OK}
    assert stale == {"pull-50"}
    assert all(memory.read(BLOCKS, unit) == holder.pattern(BLOCKS, unit) for unit in range(1, count + 1))


def test_pull_when_an_id_is_out_of_range_then_failed_and_nothing_read(
    holder: Holder, rig: Rig, memory: EndpointMemory
) -> None:
    peer = rig.backend.add_peer(holder.metadata)
    outcome = rig.pull(peer, [(1, 1), (2, 999)])
    assert (outcome.status, outcome.terminal) == (PullStatus.FAILED, True)
    assert outcome.reason == TransferCode.UNIT_OUT_OF_RANGE
    outcome = rig.pull(peer, [(1, 1)], generations=expected(BLOCK_GENERATIONS, [999]))
    assert outcome.reason == TransferCode.UNIT_OUT_OF_RANGE
    assert memory.read(BLOCKS, 2) == memory.pattern(1, BLOCKS, 2)


def test_pull_when_the_holder_was_killed_then_failed_and_a_restarted_one_serves(
    site: Site, holder: Holder, rig: Rig, memory: EndpointMemory
) -> None:
    peer = rig.backend.add_peer(holder.metadata)
    assert rig.pull(peer, [(1, 1)]).status is PullStatus.OK
    holder.kill()
    for _ in range(2):
        outcome = rig.pull(peer, [(2, 2)])
        assert (outcome.status, outcome.terminal) == (PullStatus.FAILED, True)
        assert outcome.reason == TransferCode.PEER_DISCONNECTED
    restarted = site.holder(epoch=EPOCH + 1, seed=9)
    again = rig.backend.add_peer(restarted.metadata)
    assert rig.pull(again, [(2, 2)], epoch=EPOCH + 1).status is PullStatus.OK
    assert memory.read(BLOCKS, 2) == restarted.pattern(BLOCKS, 2)


def test_pull_when_the_holder_dies_between_data_and_generations_then_failed(holder: Holder, rig: Rig) -> None:
    peer = rig.backend.add_peer(holder.metadata)
    rig.backend.on_first_done = holder.kill
    outcome = rig.pull(peer, [(1, 1)])
    assert (outcome.status, outcome.terminal) == (PullStatus.FAILED, True)
    assert outcome.reason == TransferCode.PEER_DISCONNECTED


def test_pull_when_a_callback_raises_then_the_next_one_is_served(
    holder: Holder, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    peer = rig.backend.add_peer(holder.metadata)

    def bad(_: PullOutcome) -> None:
        raise RuntimeError("callback trouble")

    rig.puller.submit(PullJob("bad", peer, [], expected(BLOCK_GENERATIONS, [1]), EPOCH, time.monotonic() + LONG_S), bad)
    assert rig.pull(peer, [(1, 1)]).status is PullStatus.OK
    assert "on_done raised pull_id=bad" in caplog.text


def test_callbacks_when_they_run_then_on_the_poll_thread_and_may_submit(holder: Holder, rig: Rig) -> None:
    peer = rig.backend.add_peer(holder.metadata)
    threads: list[int] = []

    def on_done(_: PullOutcome) -> None:
        threads.append(threading.get_ident())
        rig.submit(peer, [(2, 2)], pull_id="second")

    job = PullJob("first", peer, [], expected(BLOCK_GENERATIONS, [1]), EPOCH, time.monotonic() + LONG_S)
    rig.puller.submit(job, on_done)
    assert rig.outcome().pull_id == "second"
    assert threads != [threading.get_ident()]


def test_puller_when_idle_then_it_polls_nothing(holder: Holder, rig: Rig) -> None:
    peer = rig.backend.add_peer(holder.metadata)
    assert rig.pull(peer, [(1, 1)]).status is PullStatus.OK
    polled = rig.backend.num_polls
    time.sleep(0.2)
    assert rig.backend.num_polls == polled


def test_puller_when_closed_then_further_submits_are_refused(holder: Holder, rig: Rig) -> None:
    peer = rig.backend.add_peer(holder.metadata)
    assert rig.puller.close()
    assert rig.puller.close()
    with pytest.raises(TransferError) as caught:
        rig.submit(peer, [(1, 1)])
    assert caught.value.code == TransferCode.CLOSED


def test_puller_when_its_thread_dies_then_every_pull_has_an_outcome_and_new_ones_are_refused(
    holder: Holder, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of our own on the poll thread: nobody waits for it for ever."""
    peer = rig.backend.add_peer(holder.metadata)
    assert rig.puller.is_alive

    def break_down() -> None:
        raise RuntimeError("our own mistake")

    monkeypatch.setattr(rig.backend, "recreate", break_down)
    with pytest.raises(TransferError) as caught:
        rig.puller.recreate_backend(0.0)
    assert caught.value.code == TransferCode.CLOSED
    assert wait_for(lambda: not rig.puller.is_alive)
    with pytest.raises(TransferError) as refused:
        rig.submit(peer, [(1, 20)])
    assert refused.value.code == TransferCode.CLOSED
    assert rig.puller.num_active == 0


def test_pull_in_flight_when_the_pullers_thread_dies_then_fails_and_keeps_its_destination(
    holder: Holder, site: Site, rigs: Rigs, memory: EndpointMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = FaultyBackend(site.backend(memory))
    rig = rigs(faulty)
    faulty.inject(Fault("hang"))
    rig.submit(rig.backend.add_peer(holder.metadata), [(1, 20)])
    assert wait_for(lambda: len(rig.backend.events) == 1)
    monkeypatch.setattr(rig.backend, "recreate", lambda: 1 / 0)
    with pytest.raises(TransferError):
        rig.puller.recreate_backend(0.0)
    outcome = rig.outcome()
    assert (outcome.status, outcome.reason, outcome.terminal) == (PullStatus.FAILED, TransferCode.CLOSED, False)


def test_pull_in_flight_when_the_transport_no_longer_knows_then_waited_for_and_not_given_back(
    holder: Holder, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = rig.backend.add_peer(holder.metadata)

    def forget(_: Handle) -> ReadStatus:
        raise TransferError("no such read", code=TransferCode.BACKEND_UNAVAILABLE)

    monkeypatch.setattr(rig.backend, "poll", forget)
    outcome = rig.pull(peer, [(1, 1)], timeout_s=SHORT_S)
    assert (outcome.status, outcome.reason, outcome.terminal) == (PullStatus.TIMED_OUT, PullReason.DEADLINE, False)
    assert rig.puller.num_unterminated == 1
    monkeypatch.undo()
    assert rig.terminals.get(timeout=PATIENCE_S) == "pull"


def test_pull_when_its_post_breaks_down_then_its_destination_is_kept_until_the_agent_is_another_one(
    holder: Holder, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by an error of the contract, which would say that nothing moves."""
    peer = rig.backend.add_peer(holder.metadata)
    monkeypatch.setattr(rig.backend, "post_read", lambda *_: 1 / 0)
    outcome = rig.pull(peer, [(1, 1)])
    assert (outcome.status, outcome.reason, outcome.terminal) == (
        PullStatus.FAILED,
        TransferCode.TRANSFER_FAILED,
        False,
    )
    outcome = rig.pull(peer)  # generations alone: there is no destination
    monkeypatch.undo()
    assert rig.pull(peer, [(2, 2)]).status is PullStatus.OK
    assert (rig.puller.num_unterminated, rig.terminals.empty()) == (1, True)
    rig.puller.recreate_backend(0.0)
    assert rig.terminals.get(timeout=PATIENCE_S) == "pull"
    assert rig.puller.num_unterminated == 0


def test_pull_when_its_data_has_arrived_then_a_fence_before_its_generations_are_read(
    holder: Holder, site: Site, memory: EndpointMemory
) -> None:
    backend = RecordingBackend(site.backend(memory))
    rig = Rig(backend, Puller(backend, fence=lambda: backend.events.append(("fence", ()))))
    try:
        assert rig.pull(backend.add_peer(holder.metadata), [(1, 1)]).status is PullStatus.OK
    finally:
        assert rig.puller.close()
    assert [kind for kind, _ in backend.events] == ["post", "done", "fence", "post", "done"]
    assert backend.events[3] == ("post", (BLOCK_GENERATIONS,))


def test_recreate_when_it_does_not_return_then_the_caller_does(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller, "RECREATE_S", 0.0)
    monkeypatch.setattr(puller, "THREAD_CHECK_S", 0.01)
    stands, over = rig.backend.recreate, threading.Event()
    monkeypatch.setattr(rig.backend, "recreate", lambda: over.wait(PATIENCE_S))
    with pytest.raises(TransferError, match="no new transfer agent") as caught:
        rig.puller.recreate_backend(0.0)
    assert caught.value.code == TransferCode.BACKEND_UNAVAILABLE
    over.set()
    monkeypatch.setattr(rig.backend, "recreate", stands)
    monkeypatch.setattr(puller, "RECREATE_S", PATIENCE_S)
    rig.puller.recreate_backend(0.0)
