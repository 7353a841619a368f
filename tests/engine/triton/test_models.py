"""Whole models of every family on the Triton ops and recorded steps, against the torch ops.

Without a GPU kernels run in Triton's interpreter, and what stands for a CUDA graph runs the recorded call again: it
reads what the graph would read, where the graph would read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.triton_interpreter import TRITON_DEVICE  # first: it decides how kernels are made

# isort: split
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from common.engine.model_runner import Forward
from common.engine.plan import DrawnIds, Segment, StepPlan
from common.models.backends.cuda import CudaBackend
from common.models.backends.graphs import GraphedSteps
from common.models.fused.mamba2 import FusedMamba2
from common.models.loading import loader
from common.models.loading.quiet import quiet_transformers
from common.models.synthetic import give_long_memory
from common.ops.select import create_ops
from common.ops.step.device_step import GroupTables, StepBuffer
from tests.engine import harness
from tests.engine.harness import Harness, Work, random_tokens
from tests.support.models import FAMILIES, checkpoint

REPLAY_CHECKED = ("bamba", "qwen3_5_text")
"""Model types that pass the loader's check of recorded steps here too. It takes longer than the test below, which
compares recorded steps of all families."""
NUM_STEPS = 3
TOLERANCE = 2e-4
"""Of the logits' largest value: every family's sums in another order, over a dozen layers at most."""


class RunAgain:
    """In place of CUDA's graphs. A recorded call has no effect when it is recorded, and reads the step's words where
    they were then, whatever its context has been given since."""

    def capture(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        place: list[Tensor] = []
        known = inspect.getclosurevars(call).nonlocals
        groups = known["context"].group_metadata if "context" in known else ()
        steps = [metadata.on_device for metadata in groups]

        def replay() -> Tensor:
            for metadata, step in zip(groups, steps, strict=True):
                metadata.on_device = step
            result = call()
            if not place:
                place.append(result.clone())
            return place[0].copy_(result)

        return replay


class InterpretedBackend(CudaBackend):
    """On a CPU nothing is late."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, graphs=RunAgain())

    def record_event(self) -> None:
        return None

    def synchronize(self) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[None]:
    """Models of the tests here, and no others, are loaded as on a GPU."""
    if TRITON_DEVICE == "cuda":
        yield
        return
    check_replay = loader.check_replay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loader,
            "check_replay",
            lambda model, cache, backend, geometry, tokens: (
                geometry.model_type not in REPLAY_CHECKED or check_replay(model, cache, backend, geometry, tokens)
            ),
        )
        patch.setattr(
            loader,
            "create_backend",
            lambda name, *, dtype, device, **kwargs: InterpretedBackend(
                create_ops(name, dtype=dtype, device=device, **kwargs), device
            ),
        )
        harness.engine_model.cache_clear()
        yield
        harness.engine_model.cache_clear()


def run(family: str, ops: str) -> tuple[list[Tensor], Harness]:
    """Logits of prompts in chunks, one of them beside another's answer, of decode steps of one, three and two rows, a
    state saved on the way, and a sequence that is resumed from it."""
    each = Harness(family, ops, device=TRITON_DEVICE)
    for slot, name in enumerate("abc", start=1):
        each.add(name, slot, 64)
    found = each.logits(Work("a", random_tokens(19, 1)))
    found += each.logits(Work("b", random_tokens(13, 2), {5: 7}), Work("a", random_tokens(1, 3)))
    found += each.logits(Work("b", random_tokens(9, 4)), Work("c", random_tokens(2, 5)), Work("a", random_tokens(1, 6)))
    for names in ("a", "abc", "bc"):
        for step in range(NUM_STEPS):
            saves = {each.sequences["b"].num_computed + 1: 6} if names == "abc" and step == 1 else {}
            work = [Work(n, random_tokens(1, 10 * step + i), saves if n == "b" else {}) for i, n in enumerate(names)]
            found += each.logits(*work)
    if each.has_state:
        each.sequences["b"].src_slot = 6
        found += each.logits(Work("b", [7]))
    return [rows.cpu() for rows in found], each


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    scale = max(float(rows.abs().max()) for rows in expected)
    # As "not a number" counts what is not finite.
    return max(float((a - b).abs().max()) / scale for a, b in zip(found, expected, strict=True))


@pytest.mark.full  # most of a minute each
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_when_a_model_runs_on_triton_then_equal_those_of_the_torch_ops(family: str) -> None:
    expected, _ = run(family, "torch")
    found, each = run(family, "triton")
    assert each.model.ops.name == "triton"
    assert largest_difference(found, expected) < TOLERANCE
    # Each number of rows was recorded at its second step, three rows as four.
    steps = each.runner._steps
    assert isinstance(steps, GraphedSteps)
    recorded = {key: each is not None for key, each in steps._recorded.items()}
    assert recorded == {("forward", 1): True, ("forward", 2): True, ("forward", 4): True, ("head", 1): True}


@pytest.mark.full
def test_logits_when_recorded_steps_read_the_words_of_an_older_step_then_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: a recorded step is told apart from the one before by its words alone."""
    expected, _ = run("granitemoehybrid", "torch")
    write = StepBuffer.write

    def write_elsewhere(self: StepBuffer, *args: Any, **kwargs: Any) -> Any:
        return write(StepBuffer(torch.device(TRITON_DEVICE)), *args, **kwargs)

    monkeypatch.setattr(StepBuffer, "write", write_elsewhere)
    found, _ = run("granitemoehybrid", "triton")
    assert not largest_difference(found, expected) < 100 * TOLERANCE


@pytest.mark.full
def test_steps_when_recorded_ahead_then_leave_the_pools_alone_and_serve_the_first_step() -> None:
    each, reference = (Harness("granitemoehybrid", ops, device=TRITON_DEVICE) for ops in ("triton", "torch"))
    for arena in (*each.storage.block_arenas, each.storage.slot_arena):
        arena.view(torch.bfloat16).fill_(float("nan"))
        arena[0] = 0  # the null block, the zero state
    before = [arena.clone() for arena in (*each.storage.block_arenas, each.storage.slot_arena)]
    each.runner.record_ahead(3)
    assert all(map(torch.equal, before, (*each.storage.block_arenas, each.storage.slot_arena)))
    steps = each.runner._steps
    assert isinstance(steps, GraphedSteps)
    assert {key for key, run in steps._recorded.items() if run} == {
        (n, r) for n in ("forward", "head") for r in (1, 2, 4)
    }
    for one in (each, reference):
        one.add("a", 1, 64)
        one.add("b", 2, 64)
    work = Work("a", [5]), Work("b", [6])
    assert largest_difference(each.logits(*work), reference.logits(*work)) < TOLERANCE


@pytest.mark.full
def test_steps_when_their_words_have_moved_then_are_recorded_again() -> None:
    """A recorded step reads from the old place."""
    each = Harness("granitemoehybrid", "triton", device=TRITON_DEVICE)
    buffer = StepBuffer(torch.device(TRITON_DEVICE), 64)
    each.runner._steps = GraphedSteps(buffer, RunAgain())
    reference = Harness("granitemoehybrid", "torch", device=TRITON_DEVICE)
    for one in (each, reference):
        one.add("a", 1, 512)
        one.hidden(Work("a", random_tokens(8, 1)))
    versions = []
    for step in range(4):
        if step == 3:
            for one in (each, reference):
                one.hidden(Work("a", random_tokens(400, 9)))
            buffer._grow(2 * buffer.num_words)
        work = Work("a", random_tokens(1, step))
        (found,), (expected,) = each.logits(work), reference.logits(work)
        assert largest_difference([found.cpu()], [expected.cpu()]) < TOLERANCE
        versions.append(buffer.version)
    assert versions[3] > versions[2]


@pytest.mark.full
def test_logits_when_input_ids_are_taken_on_the_device_then_equal_those_of_ids_from_the_host() -> None:
    each, reference = (Harness("granitemoehybrid", ops, device=TRITON_DEVICE) for ops in ("triton", "torch"))
    for one in (each, reference):
        one.add("a", 1, 64)
        one.add("b", 2, 64)
        one.hidden(Work("a", random_tokens(3, 1)), Work("b", random_tokens(2, 2)))
    launch = each.runner.launch

    def taken(plan: StepPlan) -> Forward:
        known = [segment.token_ids[0] for segment in plan.segments]
        # Of four rows that were drawn some go on.
        drawn = torch.tensor([7, *known, 8], device=TRITON_DEVICE)
        plan.segments = [replace(segment, token_ids=(0,)) for segment in plan.segments]
        plan.ids_from = DrawnIds(drawn, list(range(1, 1 + len(known))))
        return launch(plan)

    each.runner.launch = taken  # type: ignore[method-assign]
    for step in range(NUM_STEPS):  # runs, is recorded, runs again
        work = [Work(name, random_tokens(1, 10 * step + place)) for place, name in enumerate("ab")]
        found, expected = each.logits(*work), reference.logits(*work)
        assert largest_difference([rows.cpu() for rows in found], [rows.cpu() for rows in expected]) < TOLERANCE


def test_load_model_when_a_projection_has_a_bias_behind_a_factor_then_the_fused_mixer_gives_stock_numbers(
    tmp_path: Path,
) -> None:
    changed = {"num_hidden_layers": 1, "mamba_proj_bias": True, "ssm_in_multiplier": 0.25}
    config = AutoConfig.from_pretrained(checkpoint("falcon_h1"), **changed)
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    give_long_memory(stock, seed=1)
    with torch.no_grad():
        stock.model.layers[0].mamba.in_proj.bias.normal_()
    with quiet_transformers():
        stock.save_pretrained(tmp_path)
    # The probe compares it with stock.
    model = loader.load_model(str(tmp_path), ops_backend="triton", device=TRITON_DEVICE).model
    assert isinstance(model.model.layers[0].mamba.forward, FusedMamba2)


def test_step_when_its_input_ids_are_on_the_device_then_has_them_before_its_padding() -> None:
    device = torch.device(TRITON_DEVICE)
    rows = [Segment(name, (0,), 5, (), 0, 0) for name in "ab"]
    group = GroupTables(rows, (), np.zeros(0, np.int32), (0,), 8, 0)
    buffer = StepBuffer(device, 64)
    for drawn in ([7, 300_000], [8, 9]):
        (step,) = buffer.write([group], token_ids=torch.tensor(drawn, device=device), num_rows=4)
        assert step.token_ids.tolist() == [*drawn, 0, 0]
        assert step.decode_len.tolist() == [6, 6, 0, 0]
