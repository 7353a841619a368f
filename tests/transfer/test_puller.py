"""Pulls: read, then verify, then report; over both transports."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from common.errors import TransferError
from common.transfer.codes import TransferCode
from common.transfer.generation_check import SCRATCH_SEGMENTS, SEGMENT_ENTRIES
from common.transfer.jobs import PullJob, PullOutcome, PullStatus
from common.transfer.regions import Peer
from common.transfer.testing.faulty import Fault, FaultyBackend
from tests.support.transfer_memory import BLOCK_GENERATIONS, BLOCKS, SLOT_GENERATIONS, SLOTS, EndpointMemory
from tests.support.transfer_rigs import EPOCH, LONG_S, SHORT_S, Rig, Rigs, expected
from tests.support.transfer_sites import PATIENCE_S, Holder, Site, wait_for


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


# A frozen holder: its reads stay in flight.


def test_pull_when_the_holder_is_frozen_then_timed_out_and_terminal_only_once_it_woke(
    frozen: tuple[Holder, Rig, Peer], memory: EndpointMemory
) -> None:
    holder, rig, peer = frozen

    outcome = rig.pull(peer, [(2, 2)], timeout_s=SHORT_S)

    assert (outcome.status, outcome.terminal, outcome.reason) == (PullStatus.TIMED_OUT, False, "deadline")
    assert (rig.puller.num_active, rig.puller.num_unterminated) == (0, 1)
    assert not rig.puller.cancel("pull")
    assert rig.terminals.empty()

    holder.thaw()
    assert rig.terminals.get(timeout=PATIENCE_S) == "pull"
    assert rig.puller.num_unterminated == 0
    # This is why the destination had to stay untouched: the late bytes did arrive.
    assert memory.read(BLOCKS, 2) == holder.pattern(BLOCKS, 2)
    assert rig.pull(peer, [(3, 3)]).status is PullStatus.OK


def test_cancel_when_the_holder_wakes_before_the_deadline_then_cancelled_and_terminal(
    frozen: tuple[Holder, Rig, Peer],
) -> None:
    holder, rig, peer = frozen
    rig.submit(peer, [(2, 2)])
    assert wait_for(lambda: len(rig.backend.events) == 5)
    assert rig.puller.cancel("pull")
    assert rig.outcomes.empty()
    holder.thaw()
    outcome = rig.outcome()
    assert (outcome.status, outcome.terminal, outcome.reason) == (PullStatus.CANCELLED, True, "cancelled")
    assert rig.terminals.empty()
    assert not rig.puller.cancel("pull")
    assert not rig.puller.cancel("nobody")


def test_cancel_when_the_holder_stays_frozen_then_cancelled_at_the_deadline_not_terminal(
    frozen: tuple[Holder, Rig, Peer],
) -> None:
    holder, rig, peer = frozen
    rig.submit(peer, [(2, 2)], timeout_s=SHORT_S)
    assert rig.puller.cancel("pull")
    outcome = rig.outcome()
    if outcome.terminal:  # cancelled before it was posted
        assert rig.puller.num_unterminated == 0
    else:
        assert rig.puller.num_unterminated == 1
        holder.thaw()
        assert rig.terminals.get(timeout=PATIENCE_S) == "pull"
    assert outcome.status is PullStatus.CANCELLED


def test_pull_when_the_holder_freezes_before_the_generations_then_timed_out_but_terminal(
    frozen: tuple[Holder, Rig, Peer], memory: EndpointMemory
) -> None:
    holder, rig, peer = frozen
    holder.thaw()
    rig.backend.on_first_done = holder.freeze
    outcome = rig.pull(peer, [(2, 2)], timeout_s=2.0)
    # What is still in flight writes the puller's scratch, not the destination.
    assert (outcome.status, outcome.terminal) == (PullStatus.TIMED_OUT, True)
    assert rig.puller.num_unterminated == 0
    holder.thaw()
    assert rig.pull(peer, [(3, 3)]).status is PullStatus.OK
    assert rig.terminals.empty()


def test_pull_when_submitted_behind_its_deadline_then_timed_out_and_nothing_posted(
    frozen: tuple[Holder, Rig, Peer],
) -> None:
    _, rig, peer = frozen
    num_events = len(rig.backend.events)
    outcome = rig.pull(peer, [(2, 2)], timeout_s=-1.0)
    assert (outcome.status, outcome.terminal) == (PullStatus.TIMED_OUT, True)
    assert len(rig.backend.events) == num_events


def test_abandon_when_the_holder_is_frozen_then_peer_lost_at_once_and_terminal_only_once_it_woke(
    frozen: tuple[Holder, Rig, Peer],
) -> None:
    holder, rig, peer = frozen
    rig.submit(peer, [(2, 2)])
    assert wait_for(lambda: len(rig.backend.events) == 5)
    assert rig.puller.abandon("pull")
    outcome = rig.outcome()
    assert (outcome.status, outcome.terminal, outcome.reason) == (PullStatus.TIMED_OUT, False, "peer_lost")
    assert not rig.puller.abandon("pull")
    assert not rig.puller.abandon("nobody")
    assert (rig.puller.num_active, rig.puller.num_unterminated) == (0, 1)
    assert 0 < rig.puller.oldest_unterminated_s < PATIENCE_S
    holder.thaw()
    assert rig.terminals.get(timeout=PATIENCE_S) == "pull"
    assert (rig.puller.num_unterminated, rig.puller.oldest_unterminated_s) == (0, 0.0)


def test_abandon_when_it_was_cancelled_before_then_cancelled_without_waiting_for_the_deadline(
    frozen: tuple[Holder, Rig, Peer],
) -> None:
    _, rig, peer = frozen
    rig.submit(peer, [(2, 2)])
    assert wait_for(lambda: len(rig.backend.events) == 5)
    assert rig.puller.cancel("pull")
    assert rig.puller.abandon("pull")
    outcome = rig.outcome()
    assert (outcome.status, outcome.terminal, outcome.reason) == (PullStatus.CANCELLED, False, "cancelled")


def test_recreate_when_reads_of_a_frozen_holder_are_in_flight_then_all_end_and_other_peers_serve(
    frozen: tuple[Holder, Rig, Peer], freezable_site: Site, memory: EndpointMemory
) -> None:
    holder, rig, peer = frozen
    assert rig.pull(peer, [(2, 2)], pull_id="late", timeout_s=SHORT_S).terminal is False
    rig.submit(peer, [(3, 3)], pull_id="running")
    assert wait_for(lambda: len(rig.backend.events) == 6)

    rig.puller.recreate_backend(timeout_s=0.05)

    assert rig.terminals.get(timeout=PATIENCE_S) == "late"
    outcome = rig.outcome()
    assert (outcome.pull_id, outcome.status, outcome.terminal) == ("running", PullStatus.FAILED, True)
    assert outcome.reason == TransferCode.AGENT_RECREATED
    assert (rig.puller.num_active, rig.puller.num_unterminated) == (0, 0)
    assert rig.pull(peer, [(4, 4)]).reason == TransferCode.UNKNOWN_PEER

    other = freezable_site.holder(engine_id="other", epoch=EPOCH, seed=6)
    again = rig.backend.add_peer(other.metadata)
    for unit in (2, 3):
        memory.write(BLOCKS, unit, b"new" + bytes(4093))
    holder.thaw()
    assert rig.pull(again, [(5, 5)]).status is PullStatus.OK
    assert memory.read(BLOCKS, 5) == other.pattern(BLOCKS, 5)
    assert all(memory.read(BLOCKS, unit) == b"new" + bytes(4093) for unit in (2, 3))
    assert rig.outcomes.empty()
    assert rig.terminals.empty()


def test_recreate_when_nothing_is_in_flight_then_at_once_and_reads_need_the_peer_again(
    holder: Holder, rig: Rig
) -> None:
    peer = rig.backend.add_peer(holder.metadata)
    assert rig.pull(peer, [(1, 1)]).status is PullStatus.OK
    rig.puller.recreate_backend(timeout_s=LONG_S)
    assert rig.pull(peer, [(1, 1)]).reason == TransferCode.UNKNOWN_PEER
    assert rig.pull(rig.backend.add_peer(holder.metadata), [(1, 1)]).status is PullStatus.OK


def test_recreate_when_another_pull_is_still_reading_then_it_may_finish_and_a_new_one_waits(
    holder: Holder, site: Site, rigs: Rigs, memory: EndpointMemory
) -> None:
    faulty = FaultyBackend(site.backend(memory))
    rig = rigs(faulty)
    peer = rig.backend.add_peer(holder.metadata)
    faulty.inject(Fault("hang"))
    rig.submit(peer, [(1, 1)], pull_id="first")
    assert wait_for(lambda: len(rig.backend.events) == 1)
    with ThreadPoolExecutor(1) as pool:
        recreated = pool.submit(rig.puller.recreate_backend, LONG_S)
        assert wait_for(lambda: rig.puller.is_draining)
        rig.submit(peer, [(2, 2)], pull_id="second")
        faulty.clear()
        recreated.result(PATIENCE_S)
    first, second = rig.outcome(), rig.outcome()
    assert (first.pull_id, first.status) == ("first", PullStatus.OK)
    assert (second.pull_id, second.reason) == ("second", TransferCode.UNKNOWN_PEER)


def test_recreate_when_the_puller_is_closed_then_refused(rig: Rig) -> None:
    assert rig.puller.close()
    with pytest.raises(TransferError) as caught:
        rig.puller.recreate_backend(timeout_s=LONG_S)
    assert caught.value.code == TransferCode.CLOSED


def test_close_when_a_read_is_in_flight_then_its_pull_failed_and_is_not_terminal(
    frozen: tuple[Holder, Rig, Peer],
) -> None:
    _, rig, peer = frozen
    rig.submit(peer, [(2, 2)])
    assert wait_for(lambda: len(rig.backend.events) == 5)
    assert rig.puller.close()
    outcome = rig.outcome()
    assert (outcome.status, outcome.terminal, outcome.reason) == (PullStatus.FAILED, False, "closed")
    assert rig.outcomes.empty()


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
