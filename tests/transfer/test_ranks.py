"""States and K/V between nodes of different tensor-parallel sizes: a simulated node of ranks, over each transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from common.kv_cache.shards import UnitSlices, unit_slices
from common.transfer.jobs import PullOutcome, PullStatus
from tests.support.ranks import EMPTY, NUM_UNITS, RankNode, RankReader
from tests.support.shards_by_hand import geometry_of, narrow
from tests.support.transfer_sites import Site

BLOCK_SIZE = 4
PAIRS = [(1, 4), (3, 2), (4, 3)]  # of (local, remote); the last two go on from each other
MIXERS = ("granite-4.0-h-tiny", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "jamba-mini-1.6", "lfm2-1.2b")
"""One for each kind of state that is divided in its own way; one group of B and C, two K/V heads, and latents among
them."""

MakeReader = Callable[[RankNode, int, RankNode], RankReader]


@pytest.fixture
def make_reader(site: Site) -> Iterator[MakeReader]:
    readers: list[RankReader] = []

    def make(node: RankNode, rank: int, holder: RankNode) -> RankReader:
        readers.append(RankReader(node, rank, holder))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def plan(name: str, rank: int, reader: RankNode, holder: RankNode) -> UnitSlices:
    return unit_slices(narrow(geometry_of(name)), BLOCK_SIZE, rank, reader.tp, holder.tp)


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
    [(2, 1), (1, 4), (4, 2), *(pytest.param(*pair, marks=pytest.mark.full) for pair in ((1, 2), (4, 1), (2, 4)))],
)
@pytest.mark.parametrize("name", MIXERS)
def test_pull_when_ranks_of_two_sizes_meet_then_each_gets_its_own_share_and_nothing_else_is_written(
    site: Site, make_reader: MakeReader, name: str, holder_tp: int, reader_tp: int
) -> None:
    holder = RankNode(site, "holder", name, BLOCK_SIZE, holder_tp, epoch=77, seed=3)
    reader = RankNode(site, "reader", name, BLOCK_SIZE, reader_tp, epoch=5, seed=0)
    for rank in range(reader_tp):
        outcomes = make_reader(reader, rank, holder).pull(plan(name, rank, reader, holder), PAIRS)
        assert {outcome.status for outcome in outcomes} == {PullStatus.OK}, outcomes
        assert num_wrong_units(reader, rank, seed=3) == 0


def test_control_when_a_rank_reads_by_another_ranks_plan_then_seen(site: Site, make_reader: MakeReader) -> None:
    name = MIXERS[0]
    holder = RankNode(site, "holder", name, BLOCK_SIZE, 1, epoch=77, seed=3)
    reader = RankNode(site, "reader", name, BLOCK_SIZE, 2, epoch=5, seed=0)
    outcomes = make_reader(reader, 0, holder).pull(plan(name, 1, reader, holder), PAIRS)
    assert {outcome.status for outcome in outcomes} == {PullStatus.OK}  # nothing but the bytes can tell
    assert num_wrong_units(reader, 0, seed=3) == len(PAIRS) * 2


def by_rank(outcomes: list[PullOutcome]) -> list[tuple[PullStatus, str]]:
    return [(outcome.status, outcome.reason) for outcome in outcomes]


def test_pull_when_one_rank_is_stale_or_dead_then_that_rank_says_so_and_the_prefix_is_not_proved(
    site: Site, make_reader: MakeReader
) -> None:
    name = MIXERS[0]
    holder = RankNode(site, "holder", name, BLOCK_SIZE, 2, epoch=77, seed=3)
    reader = RankNode(site, "reader", name, BLOCK_SIZE, 1, epoch=5, seed=0)
    pulls = make_reader(reader, 0, holder)
    whole = plan(name, 0, reader, holder)
    assert by_rank(pulls.pull(whole, PAIRS)) == [(PullStatus.OK, "")] * 2
    holder.memories[1].generations["slots"][2 * 2] += 1  # unit 2 of rank 1 alone was written again
    assert by_rank(pulls.pull(whole, PAIRS)) == [(PullStatus.OK, ""), (PullStatus.STALE, "stale_generation")]
    holder.memories[1].generations["slots"][2 * 2] -= 1
    holder.backends[1].close()
    first, second = by_rank(pulls.pull(whole, PAIRS))
    assert first == (PullStatus.OK, "")
    assert second[0] is PullStatus.FAILED
    assert second[1] == "peer_disconnected"
