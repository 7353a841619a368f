"""Prefixes between nodes of different tensor-parallel sizes: what one computes, the other goes on from as stock does.

Each mixer whose state is divided in its own way, K/V of fewer heads than ranks, and latents; controls, in which a
rank's bytes are taken for another's; and one rank of the holder that is dead, frozen, stale or late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from common.errors import TransferError
from common.transfer.testing.inprocess import InProcessBackend
from tests.support.divided_pair import DividedPair
from tests.support.pair import Pair
from tests.support.reference import Mismatch, random_tokens, reference

FAMILIES = ("granitemoehybrid", "qwen3_next", "jamba", "lfm2", "kimi_linear", "minimax")
"""Mamba-2 with one group of B and C, gated delta, Mamba-1, short convolutions, Kimi's delta with latents, lightning
attention; the first four have two K/V heads, fewer than four ranks."""
SIZES = ((2, 1), (4, 1), (1, 2), (1, 4), (2, 4))
NUM_TOKENS = 8
LENGTH = 61  # three full blocks and a tail
SHORT_S = 0.5

MakePair = Callable[..., DividedPair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    made: list[DividedPair] = []

    def make(*args: object, **options: object) -> DividedPair:
        made.append(DividedPair(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def tiered_cases(*in_short: tuple[str, int, int]) -> list[object]:
    cases = [(family, *size) for family in FAMILIES for size in SIZES]
    return [pytest.param(*case, marks=() if case in in_short else pytest.mark.full) for case in cases]


def mismatch(pair: Pair, family: str, prompt: list[int], *, at_once: bool = False) -> Mismatch | None:
    name = f"{len(prompt)}-{prompt[0]}-{at_once}"
    answer = pair.ask_at_once(name, prompt, NUM_TOKENS) if at_once else pair.ask({name: prompt}, NUM_TOKENS)[name]
    assert answer.pull.num_blocks + answer.pull.num_states > 0
    assert answer.pull.num_bytes > 0
    stock = reference(family)
    return stock.greedy(prompt, NUM_TOKENS).mismatch(answer.token_ids, answer.logprobs, stock.tolerance)


def check_answers(pair: DividedPair, family: str) -> None:
    first, second = random_tokens(LENGTH, seed=1), random_tokens(150, seed=2)
    assert mismatch(pair, family, first) is None
    assert mismatch(pair, family, first + random_tokens(40, seed=3)) is None  # of whose beginning much is here
    assert mismatch(pair, family, second, at_once=True) is None  # in parts, as it is computed
    assert pair.prefill.held() == pair.decode.held() == (0, 0, 0)


@pytest.mark.parametrize(
    ("family", "holder_tp", "local_tp"),
    tiered_cases(("granitemoehybrid", 2, 1), ("qwen3_next", 1, 2)),
)
def test_answers_when_the_nodes_have_other_numbers_of_ranks_then_equal_stock(
    make_pair: MakePair, family: str, holder_tp: int, local_tp: int
) -> None:
    check_answers(make_pair(family, holder_tp, local_tp, max_num_batched_tokens=48), family)


@pytest.mark.parametrize(
    ("family", "holder_tp", "local_tp"),
    [
        ("kimi_linear", 1, 2),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("granitemoehybrid", 2, 1),
                ("qwen3_next", 1, 4),
                ("jamba", 2, 4),
                ("lfm2", 4, 1),
                ("minimax", 2, 1),
            )
        ),
    ],
)
@pytest.mark.parametrize("is_tcp", [False, pytest.param(True, marks=pytest.mark.full)], ids=["shm", "tcp"])
def test_answers_when_the_bytes_go_over_a_real_transport_then_equal_stock(
    make_pair: MakePair, family: str, holder_tp: int, local_tp: int, is_tcp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)  # shared memory is what UCX takes within a machine
    if is_tcp:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    check_answers(make_pair(family, holder_tp, local_tp, over_nixl=True, max_num_batched_tokens=48), family)


# --- controls: the same comparison, with bytes of the wrong rank


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.full) for each in FAMILIES[1:])]
)
def test_control_when_the_holders_ranks_are_swapped_then_the_answer_is_another(
    make_pair: MakePair, family: str
) -> None:
    pair = make_pair(family, 2, 1)
    pair.holder.order.reverse()
    assert mismatch(pair, family, random_tokens(LENGTH, seed=1)) is not None


def test_control_when_a_local_rank_reads_anothers_share_then_the_answer_is_another(make_pair: MakePair) -> None:
    pair = make_pair("granitemoehybrid", 1, 2, planned=[1, 0])
    assert mismatch(pair, "granitemoehybrid", random_tokens(LENGTH, seed=1)) is not None


def test_control_when_one_ranks_slice_is_cleared_then_the_answer_is_another(make_pair: MakePair) -> None:
    pair = make_pair("granitemoehybrid", 4, 1)

    def clear() -> None:
        pair.holder.memories[3].pools["slots"][:] = 0

    pair.on_connect = clear
    assert mismatch(pair, "granitemoehybrid", random_tokens(LENGTH, seed=1)) is not None


# --- one rank of the holder fails: the prompt is computed, nothing stays held


def kill(pair: DividedPair) -> None:
    pair.holder.backends[1].close()


def write_again(pair: DividedPair) -> None:
    for table in pair.holder.memories[1].generations.values():
        for unit in range(1, len(table) // 2):
            table[2 * unit] += 1


def restart(pair: DividedPair) -> None:
    for table in pair.holder.memories[1].generations.values():
        table[0] += 1


def take_for_other_content(pair: DividedPair) -> None:
    for table in pair.holder.memories[1].generations.values():
        for unit in range(1, len(table) // 2):
            table[2 * unit + 1] += 1


def recomputed(pair: DividedPair, prompt: list[int], reason: str) -> None:
    """The pull fails; the answer is stock's all the same, and the holder has its prompt back."""
    answer = pair.take_in(pair.hand_out({"lost": prompt}), NUM_TOKENS, refused=reason)["lost"]
    # A pull may fail sooner than the lease is taken over, which then ends by itself.
    pair.prefill.model.manager.release_lease("lost")
    assert pair.prefill.held() == (0, 0, 0)
    assert answer.transferred == (0, 0, 0)
    stock = reference("granitemoehybrid")
    assert stock.greedy(prompt, NUM_TOKENS).mismatch(answer.token_ids, answer.logprobs, stock.tolerance) is None


FAULTS = [
    (kill, "transfer_failed"),  # of the second handshake: an agent of the node is gone
    (write_again, "stale_generation"),
    (restart, "stale_epoch"),
    (take_for_other_content, "wrong_content"),
]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(*each, id=each[1], marks=() if each[1] == "stale_generation" else pytest.mark.full)
        for each in FAULTS
    ],
)
def test_pull_when_one_rank_of_the_holder_fails_then_nothing_of_any_rank_is_used(
    make_pair: MakePair, fault: Callable[[DividedPair], None], reason: str
) -> None:
    pair = make_pair("granitemoehybrid", 2, 1)
    pair.on_connect = lambda: fault(pair)
    recomputed(pair, random_tokens(LENGTH, seed=4), reason)
    assert pair.decode.held() == (0, 0, 0)


def test_pull_when_one_rank_of_the_holder_fails_and_nothing_is_computed_here_then_a_typed_error(
    make_pair: MakePair,
) -> None:
    pair = make_pair("granitemoehybrid", 2, 1, kv_load_failure_policy="fail")
    pair.on_connect = lambda: write_again(pair)
    error = pair.failure("lost", random_tokens(LENGTH, seed=8), "stale_generation")
    assert isinstance(error, TransferError)
    assert error.message == f"the prefix of {LENGTH} tokens could not be pulled: stale_generation"
    pair.prefill.model.manager.release_lease("lost")
    assert pair.prefill.held() == pair.decode.held() == (0, 0, 0)


@pytest.mark.parametrize(("holder_tp", "local_tp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_pull_when_one_rank_is_frozen_then_computed_and_its_late_bytes_land_in_quarantine(
    make_pair: MakePair, holder_tp: int, local_tp: int
) -> None:
    pair = make_pair("granitemoehybrid", holder_tp, local_tp, timeout_s=SHORT_S)
    frozen = holder_tp - 1
    pair.on_connect = lambda: pair.hub.freeze(pair.agent_name(frozen))
    recomputed(pair, random_tokens(LENGTH, seed=5), "deadline")
    num_quarantined, _, _ = pair.decode.held()
    assert num_quarantined > 0
    pair.on_connect = None
    pair.hub.thaw(pair.agent_name(frozen))
    pair.until_terminal(1)
    assert pair.decode.held() == (0, 0, 0)
    assert mismatch(pair, "granitemoehybrid", random_tokens(LENGTH, seed=6)) is None
    assert pair.num_terminal == 1


def test_pull_when_a_local_rank_cannot_read_then_nothing_of_any_rank_is_used(make_pair: MakePair) -> None:
    pair = make_pair("granitemoehybrid", 1, 2)
    second = pair.local.backends[1]
    assert isinstance(second, InProcessBackend)
    pair.on_connect = second.recreate  # knows no peer any more
    recomputed(pair, random_tokens(LENGTH, seed=7), "unknown_peer")
    assert pair.decode.held() == (0, 0, 0)
