"""States and K/V between nodes of different tensor-parallel sizes: a simulated node of ranks, over each transport."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from common.errors import TransferError
from common.transfer.announcement import join_ranks
from common.transfer.codes import TransferCode
from common.transfer.jobs import PullOutcome, PullStatus
from common.transfer.joint_puller import JointPuller
from common.transfer.reads import Read
from common.transfer.testing.faulty import Fault, FaultyBackend
from tests.support.ranks import EMPTY, NUM_UNITS, RankNode, RankReader
from tests.support.transfer_rigs import SHORT_S
from tests.support.transfer_sites import PATIENCE_S, Site, wait_for

BLOCK_SIZE = 4
PAIRS = [(1, 4), (3, 2), (4, 3)]  # of (local, remote); the last two go on from each other
MIXERS = ("granite-4.0-h-tiny", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "jamba-mini-1.6", "lfm2-1.2b")
"""One for each kind of state that is divided in its own way; one group of B and C, two K/V heads, and latents among
them."""

MakeReader = Callable[..., RankReader]


@pytest.fixture
def make_reader(site: Site) -> Iterator[MakeReader]:
    readers: list[RankReader] = []

    def make(node: RankNode, rank: int, holder: RankNode, planned_rank: int | None = None) -> RankReader:
        readers.append(RankReader(node, rank, holder, planned_rank))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def holder_and_reader(site: Site, name: str, holder_tp: int, reader_tp: int) -> tuple[RankNode, RankNode]:
    holder = RankNode(site, "holder", name, BLOCK_SIZE, holder_tp, epoch=77, seed=3)
    return holder, RankNode(site, "reader", name, BLOCK_SIZE, reader_tp, epoch=5, seed=0)


def num_wrong_units(reader: RankNode, rank: int, seed: int) -> int:
    """Units of the rank that are not what they should be: its own share of what the holder has, or untouched."""
    memory, sources = reader.memories[rank], dict(PAIRS)
    num_wrong = 0
    for name, pool in memory.pools.items():
        for unit in range(NUM_UNITS):
            is_read = unit in sources
            expected = memory.content(name, sources[unit], seed) if is_read else np.full(pool.shape[1], EMPTY, np.uint8)
            num_wrong += not np.array_equal(pool[unit], expected)
    return num_wrong


@pytest.mark.parametrize(
    ("holder_tp", "reader_tp"),
    [
        *((4, 2), (1, 4)),
        *(pytest.param(*pair, marks=pytest.mark.full) for pair in ((2, 1), (2, 2), (1, 2), (4, 1), (2, 4))),
    ],
)
@pytest.mark.parametrize("name", [*MIXERS[:2], *(pytest.param(each, marks=pytest.mark.full) for each in MIXERS[2:])])
def test_pull_when_ranks_of_two_sizes_meet_then_each_gets_its_own_share_and_nothing_else_is_written(
    site: Site, make_reader: MakeReader, name: str, holder_tp: int, reader_tp: int
) -> None:
    holder, reader = holder_and_reader(site, name, holder_tp, reader_tp)
    for rank in range(reader_tp):
        outcome = make_reader(reader, rank, holder).pull(PAIRS)
        assert outcome.status is PullStatus.OK, outcome
        assert num_wrong_units(reader, rank, seed=3) == 0


def test_control_when_a_rank_reads_by_another_ranks_plan_then_seen(site: Site, make_reader: MakeReader) -> None:
    holder, reader = holder_and_reader(site, MIXERS[0], 1, 2)
    outcome = make_reader(reader, 0, holder, planned_rank=1).pull(PAIRS)
    assert outcome.status is PullStatus.OK  # nothing but the bytes can tell
    assert num_wrong_units(reader, 0, seed=3) == len(PAIRS) * 2


def test_pull_when_one_rank_is_stale_or_dead_then_nothing_is_proved(site: Site, make_reader: MakeReader) -> None:
    holder, reader = holder_and_reader(site, MIXERS[0], 2, 1)
    pulls = make_reader(reader, 0, holder)
    assert pulls.pull(PAIRS).status is PullStatus.OK
    holder.memories[1].generations["slots"][2 * 2] += 1  # unit 2 of rank 1 alone was written again
    outcome = pulls.pull(PAIRS)
    assert (outcome.status, outcome.reason) == (PullStatus.STALE, "stale_generation")
    assert outcome.message == "generation of slot_generations[2] of rank 1 is 1005, promised was 1004"
    holder.memories[1].generations["slots"][2 * 2] -= 1
    holder.memories[1].generations["blocks"][2 * 3 + 1] += 1
    assert pulls.pull(PAIRS).reason == "wrong_content"
    holder.memories[1].generations["blocks"][2 * 3 + 1] -= 1
    holder.memories[1].generations["blocks"][0] += 1
    assert pulls.pull(PAIRS).reason == "stale_epoch"
    holder.memories[1].generations["blocks"][0] -= 1
    assert pulls.pull(PAIRS).status is PullStatus.OK
    holder.backends[1].close()
    for _ in range(2):  # of its own, then because the node is known to be gone
        outcome = pulls.pull(PAIRS)
        assert (outcome.status, outcome.reason, outcome.terminal) == (PullStatus.FAILED, "peer_disconnected", True)


def test_pull_when_one_ranks_agent_is_a_new_one_then_failed_until_the_node_is_added_again(
    site: Site, make_reader: MakeReader
) -> None:
    holder, reader = holder_and_reader(site, MIXERS[0], 2, 1)
    pulls = make_reader(reader, 0, holder)
    for rank in (1, 0):
        assert pulls.pull(PAIRS).status is PullStatus.OK
        holder.backends[rank].recreate()
        assert pulls.pull(PAIRS).reason == "peer_disconnected"
        old, pulls.peer = pulls.peer, reader.backends[0].add_peer(holder.announcement)
        assert (old.engine_id, old.epoch) == (pulls.peer.engine_id, pulls.peer.epoch)
        assert [each.name for each in old.ranks][1 - rank] == pulls.peer.ranks[1 - rank].name
    assert pulls.pull(PAIRS).status is PullStatus.OK


def test_post_when_the_peer_has_no_such_rank_then_refused_by_name(site: Site, make_reader: MakeReader) -> None:
    holder, reader = holder_and_reader(site, MIXERS[0], 2, 1)
    peer = make_reader(reader, 0, holder).peer
    for rank in (2, -1):
        with pytest.raises(TransferError, match=rf"rank {rank} of 2.* region 'blocks'") as caught:
            reader.backends[0].post_read(peer, [Read("blocks", "blocks", [(1, 1)], rank=rank)])
        assert caught.value.code == TransferCode.UNKNOWN_REGION


# --- a node of ranks reads: all of them, or none


def test_joint_pull_when_all_ranks_read_then_one_outcome_and_each_has_its_share(
    site: Site, make_reader: MakeReader
) -> None:
    holder, reader = holder_and_reader(site, MIXERS[0], 1, 2)
    readers = [make_reader(reader, rank, holder) for rank in range(2)]
    joint = JointPuller([each.pulls for each in readers])
    outcomes: queue.Queue[PullOutcome] = queue.Queue()
    joint.submit(readers[0].job(PAIRS), outcomes.put)
    outcome = outcomes.get(timeout=PATIENCE_S)
    assert (outcome.status, outcome.terminal) == (PullStatus.OK, True)
    single = RankNode(site, "single", MIXERS[0], BLOCK_SIZE, 1, epoch=6, seed=0)
    assert outcome.num_bytes > make_reader(single, 0, holder).pull(PAIRS).num_bytes / 2
    assert [num_wrong_units(reader, rank, seed=3) for rank in range(2)] == [0, 0]
    assert not joint.cancel("pull")
    assert not joint.abandon("pull")


def test_joint_pull_when_one_rank_cannot_read_then_failed_for_all(site: Site, make_reader: MakeReader) -> None:
    holder, reader = holder_and_reader(site, MIXERS[0], 1, 2)
    readers = [make_reader(reader, rank, holder) for rank in range(2)]
    joint = JointPuller([each.pulls for each in readers])
    outcomes: queue.Queue[PullOutcome] = queue.Queue()
    reader.backends[1].remove_peer(readers[1].peer)
    joint.submit(readers[0].job(PAIRS), outcomes.put)
    outcome = outcomes.get(timeout=PATIENCE_S)
    assert (outcome.status, outcome.reason, outcome.terminal) == (PullStatus.FAILED, "unknown_peer", True)
    readers[1].close()
    joint.submit(readers[0].job(PAIRS), outcomes.put)
    outcome = outcomes.get(timeout=PATIENCE_S)
    assert (outcome.status, outcome.reason, outcome.terminal) == (PullStatus.FAILED, "closed", True)
    readers[0].close()
    with pytest.raises(TransferError) as caught:
        joint.submit(readers[0].job(PAIRS), outcomes.put)
    assert caught.value.code == TransferCode.CLOSED
    assert outcomes.empty()


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_joint_pull_when_one_ranks_read_is_late_then_not_terminal_until_it_has_ended(
    site: Site, make_reader: MakeReader, is_abandoned: bool
) -> None:
    holder, reader = holder_and_reader(site, MIXERS[0], 1, 2)
    late = reader.backends[1] = FaultyBackend(reader.backends[1])
    readers = [make_reader(reader, rank, holder) for rank in range(2)]
    joint = JointPuller([each.pulls for each in readers])
    outcomes: queue.Queue[PullOutcome] = queue.Queue()
    terminals: queue.Queue[str] = queue.Queue()
    late.inject(Fault("hang"))
    joint.submit(readers[0].job(PAIRS, PATIENCE_S if is_abandoned else SHORT_S), outcomes.put, terminals.put)
    assert wait_for(lambda: readers[0].puller.num_active == 0)
    if is_abandoned:
        assert wait_for(lambda: readers[1].puller.num_in_flight == 1)
        assert joint.abandon("pull")
    outcome = outcomes.get(timeout=PATIENCE_S)
    assert (outcome.status, outcome.terminal) == (PullStatus.TIMED_OUT, False)
    assert outcome.reason == ("peer_lost" if is_abandoned else "deadline")
    assert terminals.empty()
    late.clear()
    assert terminals.get(timeout=PATIENCE_S) == "pull"
    joint.submit(readers[0].job(PAIRS), outcomes.put, terminals.put)
    assert outcomes.get(timeout=PATIENCE_S).status is PullStatus.OK
    assert terminals.empty()


# --- announcements


def test_announcement_when_a_node_has_ranks_then_another_version_and_of_one_rank_the_same_as_ever(site: Site) -> None:
    """A rolling upgrade: who reads only undivided nodes (version 2) refuses the first and reads the second."""
    divided, single = (RankNode(site, "holder", MIXERS[0], BLOCK_SIZE, tp, epoch=77, seed=3) for tp in (2, 1))
    document = json.loads(divided.announcement)
    assert document["version"] == 3
    assert [set(rank) for rank in document["ranks"]] == [{"name", "agent", "regions"}] * 2
    assert not {"name", "agent", "regions"} & set(document)
    document = json.loads(single.announcement)
    assert document["version"] == 2
    assert set(document) == {
        *("version", "backend", "name", "engine_id", "epoch", "fingerprint", "agent", "regions", "layout"),
    }


def test_add_peer_when_its_ranks_do_not_add_up_then_refused(site: Site) -> None:
    holder, reader = holder_and_reader(site, MIXERS[0], 2, 1)
    good = json.loads(holder.announcement)

    def refusal(document: object) -> tuple[str, str]:
        with pytest.raises(TransferError) as caught:
            reader.backends[0].add_peer(json.dumps(document).encode())
        return caught.value.code, caught.value.message

    first, second = good["ranks"]
    short = {**second, "regions": [{**second["regions"][0], "unit_bytes": 1, "num_bytes": NUM_UNITS}]}
    assert refusal({**good, "ranks": [first, short]})[0] == TransferCode.REGION_MISMATCH
    assert refusal({**good, "ranks": [first, first]})[0] == TransferCode.BAD_METADATA
    assert refusal({**good, "ranks": []})[0] == TransferCode.BAD_METADATA
    assert refusal({**good, "ranks": [first, 7]})[0] == TransferCode.BAD_METADATA
    assert refusal({**good, "ranks": first})[0] == TransferCode.BAD_METADATA
    code, message = refusal({**good, "ranks": [first]})
    assert (code, "announces 1 ranks, its layout has 2" in message) == (TransferCode.LAYOUT_MISMATCH, True)
    # As rank 1 would announce itself, had nobody joined it with its node.
    assert refusal(json.loads(holder.backends[1].metadata()))[0] == TransferCode.LAYOUT_MISMATCH
    assert len(reader.backends[0].add_peer(holder.announcement).ranks) == 2


def test_join_when_ranks_are_of_two_nodes_or_lives_then_refused_by_field(site: Site) -> None:
    holder = RankNode(site, "holder", MIXERS[0], BLOCK_SIZE, 2, epoch=77, seed=3)
    first, second = (json.loads(backend.metadata()) for backend in holder.backends)
    for name, value in (("engine_id", "another"), ("epoch", 78), ("fingerprint", "f"), ("layout", {})):
        with pytest.raises(TransferError, match=f"{name} of rank 1 is ") as caught:
            join_ranks([json.dumps(each).encode() for each in (first, {**second, name: value})])
        assert caught.value.code == TransferCode.BAD_METADATA
    with pytest.raises(TransferError, match="no two alike"):
        join_ranks([json.dumps(first).encode()] * 2)
