"""Reads that do not end: of a frozen holder, behind a deadline, cancelled or abandoned, and what a new agent does about
them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import TransferError
from common.transfer.codes import TransferCode
from common.transfer.jobs import PullStatus
from common.transfer.regions import Peer
from common.transfer.testing.faulty import Fault, FaultyBackend
from tests.support.transfer_memory import BLOCKS, EndpointMemory
from tests.support.transfer_rigs import EPOCH, LONG_S, SHORT_S, Rig, Rigs
from tests.support.transfer_sites import PATIENCE_S, Holder, Site, wait_for


def test_pull_when_the_holder_is_frozen_then_timed_out_and_terminal_only_once_it_woke(
    frozen: tuple[Holder, Rig, Peer], memory: EndpointMemory
) -> None:
    holder, rig, peer = frozen

    outcome = rig.pull(peer, [(2, 2)], timeout_s=SHORT_S)

    assert (outcome.status, outcome.terminal, outcome.reason) == (PullStatus.TIMED_OUT, False, "deadline")
    assert (rig.puller.num_active, rig.puller.num_unterminated, rig.puller.num_in_flight) == (0, 1, 1)
    assert not rig.puller.cancel("pull")
    assert rig.terminals.empty()

    holder.thaw()
    assert rig.terminals.get(timeout=PATIENCE_S) == "pull"
    assert (rig.puller.num_unterminated, rig.puller.num_in_flight) == (0, 0)
    # This is why the destination had to stay untouched: the late bytes did arrive.
    assert memory.read(BLOCKS, 2) == holder.pattern(BLOCKS, 2)
    assert rig.pull(peer, [(3, 3)]).status is PullStatus.OK


def test_cancel_when_the_holder_wakes_before_the_deadline_then_cancelled_and_terminal(
    frozen: tuple[Holder, Rig, Peer],
) -> None:
    holder, rig, peer = frozen
    assert rig.puller.num_in_flight == 0
    rig.submit(peer, [(2, 2)])
    assert wait_for(lambda: len(rig.backend.events) == 5)
    assert rig.puller.num_in_flight == 1
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


@pytest.mark.full  # an old agent that is held: test_backend_contract.py
def test_recreate_when_the_old_agent_lives_on_then_no_read_has_ended_until_a_later_try(
    frozen: tuple[Holder, Rig, Peer], freezable_site: Site, memory: EndpointMemory
) -> None:
    holder, rig, peer = frozen
    assert rig.pull(peer, [(2, 2)], pull_id="late", timeout_s=SHORT_S).terminal is False
    keeper = [freezable_site.agent(json.loads(rig.backend.metadata())["name"])]
    with pytest.raises(TransferError) as caught:
        rig.puller.recreate_backend(timeout_s=0.05)
    assert caught.value.code == TransferCode.AGENT_ALIVE
    assert (rig.puller.num_unterminated, rig.terminals.qsize()) == (1, 0)
    # Others are served as before: nothing has to be added again.
    other = freezable_site.holder(engine_id="other", epoch=EPOCH, seed=6)
    again = rig.backend.add_peer(other.metadata)
    assert rig.pull(again, [(5, 5)]).status is PullStatus.OK
    keeper.clear()
    rig.puller.recreate_backend(timeout_s=0.05)
    assert rig.terminals.get(timeout=PATIENCE_S) == "late"
    assert rig.puller.num_unterminated == 0
    memory.write(BLOCKS, 2, b"new" + bytes(4093))
    holder.thaw()
    assert rig.pull(rig.backend.add_peer(other.metadata), [(6, 6)]).status is PullStatus.OK
    assert memory.read(BLOCKS, 2) == b"new" + bytes(4093)


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
