"""Ranks of a node, each a process, give one process's numbers: whole prompts, chunks, batches, saved states; and each
of these checks can fail: a rank with another rank's weights is found at load."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from common.engine.plan import StepPlan
from common.errors import ConfigError, EngineDeadError, StepMemoryError
from common.geometry.parts import with_mtp
from common.kv_cache.shards import shard_geometry
from common.kv_cache.spec import ShardPart
from common.models.loading.loader import LoadedModel, load_model
from common.models.parallel import slicing
from common.models.parallel.group import RankGroup
from common.models.parallel.shard_model import check_rules
from common.node.ranks.ranks import Ranks
from tests.engine.harness import (
    BLOCK_SIZE,
    Harness,
    Running,
    Work,
    engine_model,
    random_tokens,
    stock_greedy,
    stock_logits,
    tolerance,
)
from tests.engine.test_identity import A, B, run_mixed_steps
from tests.engine.test_row_independence import FAMILIES as EXACT
from tests.support.models import FAMILIES, checkpoint, tiered
from tests.support.shards_by_hand import unit_by_hand, units_of

TIMEOUT_S = 120.0
STILL_S = 0.5
"""A step of one process takes a hundredth of it."""
NUM_GREEDY = 16
QUICK = (("qwen3_5", 2), ("zamba2", 2), ("kimi_linear", 2), ("granitemoehybrid", 4))
"""A delta rule, adapters, latents; fewer groups of a mixer than ranks."""
DIVIDED = ("granitemoehybrid", "qwen3_5", "jamba", "zamba2", "kimi_linear", "gemma3")
"""Parts of every kind (a delta rule's, Mamba's, latents), norms over ranks, gates, adapters."""


class Together:
    """Ranks as threads of this process: nothing but their weights and what they add up. In float32: while it loads
    another dtype, transformers makes that torch's default for all threads. ``slice_as``: rank -> whose slices it takes.
    """

    def __init__(self, folder: Path, size: int, slice_as: Callable[[int], int] = lambda rank: rank) -> None:
        self._path = str(folder / "ranks")
        self._size = size
        self._slice_as = slice_as

    def load(self, family: str) -> list[LoadedModel | Exception]:
        found: list[LoadedModel | Exception] = [EngineDeadError("no answer")] * self._size

        def load_one(rank: int) -> None:
            group = RankGroup(self._path, rank, self._size, TIMEOUT_S)
            group.rank = self._slice_as(rank)
            try:
                found[rank] = load_model(str(checkpoint(family)), dtype="float32", ops_backend="torch", group=group)
            except Exception as exc:  # noqa: BLE001  # handed to the test, whatever it is
                found[rank] = exc

        threads = [threading.Thread(target=load_one, args=(rank,), daemon=True) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        return found


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    try:
        yield started
    finally:
        started.close()


def num_parameters(model: LoadedModel) -> int:
    return sum(p.numel() for p in model.model.parameters())


# --- weights: the load probe compares with transformers' own forward


@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param(family, size, marks=() if is_quick else pytest.mark.full)
        for family, size in itertools.product(FAMILIES, (2, 4))
        for is_quick in [(family, size) in QUICK]
        if (family, size) != ("zamba", 4)  # two heads of its mixer
    ],
)
def test_model_when_divided_then_its_ranks_give_its_numbers_together(tmp_path: Path, family: str, size: int) -> None:
    whole = engine_model(family, ops="torch")
    for found in Together(tmp_path, size).load(family):
        assert isinstance(found, LoadedModel), found
        assert found.undivided == whole.geometry
        assert found.geometry == shard_geometry(whole.geometry, size)
        assert num_parameters(found) < num_parameters(whole)


@pytest.mark.parametrize("family", tiered(FAMILIES, ("granitemoehybrid",)))
def test_control_when_a_rank_has_the_weights_of_another_then_the_model_is_refused(tmp_path: Path, family: str) -> None:
    for found in Together(tmp_path, 2, slice_as=lambda rank: 0).load(family):
        assert isinstance(found, ConfigError), found
        assert "failed the numeric probe" in found.message


def test_control_when_heads_repeat_by_the_rest_and_not_by_division_then_the_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_the_rest(part: ShardPart, rank: int, size: int) -> range:
        if part.num_heads >= size:
            return range(rank * part.num_heads // size, (rank + 1) * part.num_heads // size)
        return range(rank % part.num_heads, rank % part.num_heads + 1)

    monkeypatch.setattr(slicing, "held", by_the_rest)
    for found in Together(tmp_path, 4).load("llama"):
        assert isinstance(found, ConfigError), found
        assert "failed the numeric probe" in found.message


@pytest.mark.parametrize(
    ("family", "size", "what"), [("llama", 3, "kv_heads"), ("zamba", 4, "'x'"), ("mamba", 3, "128")]
)
def test_model_when_its_heads_cannot_be_dealt_out_then_is_refused_by_name(family: str, size: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as refusal:
        check_rules(engine_model(family, ops="torch").geometry, size)
    assert refusal.value.param == "--tensor-parallel-size"
    assert f"--tensor-parallel-size {size}" in refusal.value.message


def test_mixer_without_a_rule_when_divided_then_is_refused_by_name() -> None:
    geometry = with_mtp(engine_model("nemotron_h", ops="torch").geometry)
    with pytest.raises(ConfigError, match=r"no rule to divide the mixers of nemotron_h \(mtp\)"):
        check_rules(geometry, 2)


# --- processes: the same steps on all ranks


@pytest.mark.parametrize("family", tiered(FAMILIES, ()))  # in the short tier: tests/e2e/test_ranks.py
def test_steps_when_run_by_two_ranks_then_give_the_numbers_of_the_model(ranks: Ranks, family: str) -> None:
    harness = Harness(family, "auto", ranks=ranks)

    def check(rows: torch.Tensor, expected: torch.Tensor) -> None:
        assert float((rows - expected).abs().max()) < tolerance(family)

    # In odd chunks, two in a step; then both token by token.
    first: list[int] = []
    for rows, prompt in zip(run_mixed_steps(harness), (A, B), strict=True):
        check(rows, stock_logits(family, prompt))
        first.append(int(rows[-1].argmax()))
    for prompt, tokens, rows in zip((A, B), *harness.greedy(["A", "B"], first, NUM_GREEDY), strict=True):
        expected, expected_rows = stock_greedy(family, prompt, NUM_GREEDY)
        assert tokens == expected
        check(rows, expected_rows[1:])
    # From the state saved after 48 tokens, in another slot, with two blocks shared and the third one copied.
    again = harness.add("C", 7, 128)
    origin = harness.sequences["A"].block_ids
    again.block_ids[:2] = origin[:2]
    again.num_computed = again.write_from = 48
    again.src_slot = 5 if harness.has_state else 0
    copies = [(origin[2], again.block_ids[2])] if harness.has_attention else []
    tail = random_tokens(21, 3)
    [rows] = harness.hidden(Work("C", tail), block_copies=copies)
    check(harness.runner.logits(rows), stock_logits(family, A[:48] + tail)[48:])
    # The whole prompt at once. What is in a step beside a row does not change its bits, where they are exact.
    for name, slot in (("V", 8), ("W", 9)):
        harness.add(name, slot, 128)
        last = harness.prefill(name, A)
        check(last, stock_logits(family, A)[-1])
    token = [int(last.argmax())]
    [alone] = harness.logits(Work("V", token))
    beside, _ = harness.logits(Work("W", token), Work("B", B[:9]))
    assert torch.equal(alone, beside) or family not in EXACT


def carry(family: str, holder: Harness, reader: Harness, order: tuple[int, int] = (0, 1)) -> None:
    """All units of one process to the shares of two ranks, or back, by hand. ``order``: whose share each storage is."""
    to_ranks = hasattr(reader, "other_storages")
    whole, divided = (holder, reader) if to_ranks else (reader, holder)
    shares = [divided.storage, *divided.other_storages]
    for index, tensors in enumerate(units_of(engine_model(family, "float32", "torch").geometry, BLOCK_SIZE)):
        arena, *parts = ([*each.block_arenas, each.slot_arena][index].numpy() for each in (whole.storage, *shares))
        places = np.flatnonzero(unit_by_hand(tensors, 0, 1) >= 0)
        for rank, part in zip(order, parts, strict=True):
            share = unit_by_hand(tensors, rank, 2)
            mine = np.flatnonzero(share >= 0)
            there = places[share[mine]]
            if to_ranks:
                part[:, mine] = arena[:, there]
            else:
                arena[:, there] = part[:, mine]


def go_on(family: str, holder: Harness, reader: Harness, seed: int, order: tuple[int, int] = (0, 1)) -> float:
    """How far the reader's logits are from stock's, of the rest of a prompt whose beginning the holder computed, and of
    tokens behind it."""
    beginning, rest = random_tokens(48, seed), random_tokens(21, seed + 1)
    held = holder.add("handed on", 3, 128)
    holder.prefill("handed on", beginning, chunk=19)
    carry(family, holder, reader, order)
    reader.sequences["handed on"] = Running(held.block_ids, held.slot, held.slot, len(beginning), len(beginning))
    [rows] = reader.logits(Work("handed on", rest))
    first = int(rows[-1].argmax())
    expected, expected_rows = stock_greedy(family, beginning + rest, NUM_GREEDY)
    [tokens], [later] = reader.greedy(["handed on"], [first], NUM_GREEDY)
    if tokens != expected:
        return float("inf")
    rows, later = rows - stock_logits(family, beginning + rest)[len(beginning) :], later - expected_rows[1:]
    return float(torch.cat([rows, later]).abs().max())


@pytest.mark.parametrize("family", tiered(FAMILIES, ()))
def test_states_when_handed_between_two_ranks_and_one_process_then_either_goes_on_from_them(
    ranks: Ranks, family: str
) -> None:
    divided = Harness(family, "auto", ranks=ranks)
    assert go_on(family, divided, Harness(family, "auto"), 21) < tolerance(family)
    assert go_on(family, Harness(family, "auto"), divided, 31) < tolerance(family)


@pytest.mark.full
@pytest.mark.parametrize("family", DIVIDED)
def test_control_when_the_shares_of_two_ranks_are_swapped_then_the_logits_are_others(ranks: Ranks, family: str) -> None:
    divided = Harness(family, "auto", ranks=ranks)
    assert go_on(family, divided, Harness(family, "auto"), 21, order=(1, 0)) > tolerance(family)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[tuple[Harness, Ranks]]:
    """A dense model on two ranks, for tests that run after each other: a rank takes seconds to start."""
    started = Ranks(2)
    try:
        yield Harness("llama", "torch", ranks=started), started
    finally:
        started.close()


@pytest.mark.full
def test_step_when_a_rank_has_not_ended_it_then_neither_has_it(two_ranks: tuple[Harness, Ranks]) -> None:
    """One without a sum, so that nothing else keeps this process waiting for the other."""
    harness, ranks = two_ranks
    [theirs] = harness.other_storages
    for storage in (harness.storage, theirs):
        storage.block_arenas[0][1] = 7
    [process] = ranks._processes
    process.send_signal(signal.SIGSTOP)
    try:
        step = threading.Thread(target=harness.runner.forward, args=(StepPlan(block_copies={0: [(1, 2)]}),))
        step.start()
        step.join(STILL_S)
        assert (harness.storage.block_arenas[0][2] == 7).all()  # rank 0 is through
        assert not theirs.block_arenas[0][2].any()
        assert step.is_alive()
    finally:
        process.send_signal(signal.SIGCONT)
    step.join(TIMEOUT_S)
    assert not step.is_alive()
    assert (theirs.block_arenas[0][2] == 7).all()  # and what others read is what the rank has written


@pytest.mark.full  # in the short tier: tests/e2e/test_ranks.py
def test_step_when_a_rank_was_killed_then_the_engine_is_told_that_it_cannot_go_on(
    two_ranks: tuple[Harness, Ranks],
) -> None:
    """The last one that has these ranks."""
    harness, ranks = two_ranks
    harness.add("A", 1, 128)
    harness.prefill("A", A[:BLOCK_SIZE])
    [process] = ranks._processes
    process.kill()
    process.wait(TIMEOUT_S)
    with pytest.raises(EngineDeadError, match="rank 1 of 2 was killed by signal 9"):
        harness.prefill("A", A[BLOCK_SIZE:])
    with pytest.raises(EngineDeadError):
        harness.runner.synchronize()


@pytest.mark.full
def test_step_when_it_raised_then_no_further_one_runs(ranks: Ranks) -> None:
    harness = Harness("granitemoehybrid", "torch", ranks=ranks)
    harness.add("A", 999, 128)
    with pytest.raises(StepMemoryError, match="999"):
        harness.prefill("A", A)
    with pytest.raises(EngineDeadError, match="rank"):
        harness.runner.forward(StepPlan())


def test_ranks_when_one_refuses_to_start_then_the_others_hear_of_it_and_none_is_left(ranks: Ranks) -> None:
    ranks._processes[0].kill()
    with pytest.raises(EngineDeadError, match="rank 1 of 2"):
        Harness("llama", "torch", ranks=ranks)
