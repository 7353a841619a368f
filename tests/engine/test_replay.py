"""Recorded decode steps: the same bits as the forward, and never a step that must not be repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.model_runner import ModelRunner
from common.models.adapter.forward_context import get_forward_context
from common.models.adapter.pool_views import PoolViews
from common.models.cpu.arena import Arena
from common.models.cpu.program import Program
from common.models.cpu.recorder import Recorder
from common.models.cpu.replay import Replay
from common.ops.cpu.backend import CppOps
from common.ops.cpu.elementwise import Elementwise
from common.ops.cpu.launch import launch
from tests.engine.harness import Harness, Work, random_tokens
from tests.support.models import tiered
from tests.support.ops import make_ops

NUM_STEPS = 5
REPLAYED = ("granitemoehybrid", "qwen3_5", "lfm2", "falcon_h1", "zamba2", "zamba", "mamba2", "llama", "gemma3")


@pytest.fixture
def ops() -> CppOps:
    backend = make_ops("cpp")
    assert isinstance(backend, CppOps)
    return backend


def decode(family: str, dtype: str, *, is_replayed: bool) -> tuple[list[Tensor], ModelRunner]:
    """Logits of decode steps: two sequences of different lengths, one of them alone, both again; with a state saved on
    the way, and one sequence resumed from it."""
    harness = Harness(family, "cpp", dtype=dtype)
    harness.model = dataclasses.replace(harness.model, is_replayed=is_replayed and harness.model.is_replayed)
    harness.runner = ModelRunner(harness.model, harness.storage, harness.runner._config)
    for slot, (name, length) in enumerate((("a", 37), ("b", 21)), start=1):
        harness.add(name, slot, 96)
        harness.prefill(name, random_tokens(length, slot))
    found = []
    for step in range(3 * NUM_STEPS):
        names = ("a", "b") if step // NUM_STEPS != 1 else ("b",)
        saves = {harness.sequences["b"].num_computed + 1: 5} if step == NUM_STEPS else {}
        work = [Work(n, random_tokens(1, 10 * step + i), saves if n == "b" else {}) for i, n in enumerate(names)]
        found += harness.logits(*work)
    if harness.has_state:
        harness.sequences["b"].src_slot = 5
        found += harness.logits(Work("b", [7]))
    return found, harness.runner


@pytest.mark.parametrize("dtype", tiered(("float32", "bfloat16"), ("bfloat16",)))
@pytest.mark.parametrize("family", tiered(REPLAYED, ("granitemoehybrid", "qwen3_5")))
def test_decode_steps_when_replayed_then_have_the_bits_of_the_forward(family: str, dtype: str) -> None:
    expected, _ = decode(family, dtype, is_replayed=False)
    found, runner = decode(family, dtype, is_replayed=True)
    assert runner._steps is not None
    programs = runner._steps._programs
    assert {(name, rows): program is not None for (name, rows, _), program in programs.items()} == {
        ("forward", 1): True,
        ("forward", 2): True,
        ("head", 1): True,  # the harness asks for the logits of each segment by itself
    }
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def run_spans(family: str, dtype: str, *, has_prompts: bool, is_replayed: bool) -> tuple[list[Tensor], ModelRunner]:
    """Hidden rows and states of steps of 8 rows that are cut in many ways; with prompts, one begins in every step."""
    harness = Harness(family, "cpp", dtype=dtype)
    harness.model = dataclasses.replace(harness.model, is_replayed=is_replayed and harness.model.is_replayed)
    harness.runner = ModelRunner(harness.model, harness.storage, harness.runner._config)
    for slot, (name, length) in enumerate((("a", 37), ("b", 71)), start=1):
        harness.add(name, slot, 128)
        harness.prefill(name, random_tokens(length, slot), 70)  # the rest of b is a step of one row
    harness.only_decodes = not has_prompts
    found = []
    for step, (a, b) in enumerate(((4, 4), (1, 7), (8, 0), (7, 1), (3, 5))):
        sequence = harness.sequences["a"]
        if has_prompts:
            b = max(b, 2)
            a = 8 - b
            harness.add("b", 2, 16)
        work = [Work("a", random_tokens(a, step), {sequence.num_computed + 1: 5})]
        if b:
            work.append(Work("b", random_tokens(b, 50 + step), {harness.sequences["b"].num_computed + b: 6}))
        found += harness.hidden(*work)
        if harness.has_state:  # the state after the first token, as after a wrong draft
            sequence.src_slot, sequence.num_computed = 5, sequence.num_computed - a + 1
            found += [harness.storage.slot_arena[1:7].clone()]
    return found, harness.runner


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_prompts", [False, True], ids=["drafts", "prompts"])
@pytest.mark.parametrize("family", tiered(REPLAYED, ("granitemoehybrid",)))
def test_steps_of_spans_when_cut_in_any_way_then_one_program_has_the_bits_of_each_forward(
    family: str, has_prompts: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.models.cpu.replay._SPANS_BEFORE_RECORDING", 1)
    expected, _ = run_spans(family, dtype, has_prompts=has_prompts, is_replayed=False)
    found, runner = run_spans(family, dtype, has_prompts=has_prompts, is_replayed=True)
    assert runner._steps is not None
    programs = runner._steps._programs
    recorded = [(key[1], program is not None) for key, program in programs.items() if key[0] == "forward"]
    assert recorded == [(8, True)]
    assert len(expected) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_decode_steps_when_rows_choose_experts_then_are_not_replayed() -> None:
    found, runner = decode("qwen3_next", "float32", is_replayed=True)
    expected, _ = decode("qwen3_next", "float32", is_replayed=False)
    assert runner._steps is not None
    programs = runner._steps._programs
    assert [programs[key] for key in programs if key[0] == "forward"] == [None, None]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_decode_steps_when_an_operation_reads_the_steps_tensors_then_are_not_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are others in each step, and nobody would fill them in."""
    expected, _ = decode("granitemoehybrid", "float32", is_replayed=False)
    run = ModelRunner._run

    def run_and_look(self: ModelRunner, token_ids: Tensor, positions: Tensor) -> Tensor:
        context = get_forward_context()
        assert context is not None
        return run(self, token_ids, positions) + 0.0 * context.metadata.positions[:, None]

    monkeypatch.setattr(ModelRunner, "_run", run_and_look)
    found, runner = decode("granitemoehybrid", "float32", is_replayed=True)
    assert runner._steps is not None
    programs = runner._steps._programs
    assert [programs[key] for key in programs if key[0] == "forward"] == [None, None]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def record(
    ops: CppOps, call: Callable[[Tensor], Tensor], x: Tensor, pool: Tensor | None = None
) -> tuple[Recorder, Program | None, Tensor]:
    recorder = Recorder(ops, Arena(1 << 20), (x,), () if pool is None else (pool,), (), {})
    with torch.inference_mode(), recorder.recording():
        output = call(*recorder.inputs)
    result = output.clone()
    return recorder, recorder.finish(output), result


WEIGHT = torch.randn(8, generator=torch.Generator().manual_seed(1))


def _split_and_join(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    c = torch.cat([b.neg(), a * 2.0], -1).transpose(0, 1).contiguous()
    c += 1.0
    c.mul_(x.transpose(0, 1))
    return c.view(-1)[4:] - x.reshape(-1)[:-4]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + x * WEIGHT.exp(),
        lambda x: torch.softmax(x @ x.T, -1),
        lambda x: (x.double() * 3).to(x.dtype),
        lambda x: x.sort(-1).values.cumsum(0),
        lambda x: torch.var_mean(x, -1)[1],
        lambda x: torch.cat([x.new_empty(0), x, x]),
        lambda x: torch.cat([x, x[:, :0].cumsum(1)], 1) + x,
        _split_and_join,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_program_when_run_on_another_input_then_gives_what_the_call_gives(
    ops: CppOps, call: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    first, second = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    recorder, program, result = record(ops, call, first)
    assert program is not None, recorder.reason
    assert torch.equal(result, call(first))
    for x in (second, first):
        program.inputs[0].copy_(x)
        program.run(())
        assert torch.equal(program.output, call(x))


def test_program_when_a_pool_has_changed_then_reads_it_again(ops: CppOps) -> None:
    pool = torch.zeros(4)
    x = torch.ones(4)
    _, program, _ = record(ops, lambda x: x + pool * 2, x, pool)
    assert program is not None
    pool += 5
    program.inputs[0].copy_(x)
    program.run(())
    assert program.output.tolist() == [11.0] * 4


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x * float(x.sum().item()),
        lambda x: x[x > 0],
        lambda x: x + torch.rand_like(x),
        lambda x: x + torch.rand(8),
        lambda x: x + torch.empty(8).uniform_(),
        lambda x: x * sum(x.tolist()),
        lambda x: x * float(x.numpy()[0]),
        lambda x: x * float(np.asarray(x)[0]),
        lambda x: x if bool((x > 0).any()) else -x,
        lambda x: WEIGHT.clone().add_(x),
        lambda x: torch.ones(8),
    ],
    ids=[
        "item",
        "mask",
        "random",
        "random from nothing",
        "random in place",
        "list",
        "numpy",
        "array",
        "branch",
        "write to a constant",
        "constant",
    ],
)
def test_recorder_when_a_forward_cannot_be_repeated_then_there_is_no_program(
    ops: CppOps, call: Callable[[Tensor], Tensor]
) -> None:
    recorder, program, result = record(ops, call, torch.full((8,), 2.0))
    assert program is None
    assert recorder.reason
    assert result.isfinite().all()


def test_replay_when_a_recording_raises_then_later_steps_of_as_many_rows_run(
    ops: CppOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(self: Recorder, output: Tensor) -> None:
        raise RuntimeError("a bug of the recorder's")

    monkeypatch.setattr(Recorder, "finish", finish)
    replay, rows = Replay(ops, PoolViews({}, {}, (), ())), torch.ones(2, 8)
    assert torch.equal(replay.head(torch.exp, rows), rows.exp())
    with pytest.raises(RuntimeError, match="a bug"):
        replay.head(torch.exp, rows)
    assert torch.equal(replay.head(torch.exp, rows), rows.exp())


def test_recorder_when_a_weight_was_used_before_then_computes_nothing_twice_and_shares_no_copy(ops: CppOps) -> None:
    def call(x: Tensor) -> Tensor:
        seen.append((WEIGHT.exp(), WEIGHT.exp()))
        return x * seen[-1][0]

    seen: list[tuple[Tensor, Tensor]] = []
    constants: dict[object, object] = {}
    for _ in range(2):
        recorder = Recorder(ops, Arena(4096), (torch.ones(8),), (), (), constants)
        with torch.inference_mode(), recorder.recording():
            output = call(*recorder.inputs)
        assert recorder.finish(output) is not None
    assert seen[0][0].data_ptr() == seen[1][0].data_ptr()
    assert seen[0][0].data_ptr() != seen[0][1].data_ptr()


def test_arena_when_a_tensor_is_gone_then_its_place_is_given_again() -> None:
    arena = Arena(4096)
    a, b = (arena.empty((256,), (1,), torch.float32) for _ in range(2))
    assert a is not None
    assert b is not None
    place = a.data_ptr()
    part = a[128:]
    del a
    assert arena.empty((600,), (1,), torch.float32) is None  # part still holds the first kilobyte
    del part
    again = arena.empty((16, 16), (1, 16), torch.float32)
    assert again is not None
    assert again.data_ptr() == place
    assert again.stride() == (1, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_when_strided_and_broadcast_then_has_torchs_bits(ops: CppOps, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(3, 5, 70, generator=generator).to(dtype)
    b = torch.randn(5, 1, generator=generator)
    for x in (a, a[:, ::2, 1:], a.transpose(0, 2), a[1:2, :, 3:4]):
        y = b[: x.shape[1]] if x.shape[1] <= 5 else b[:1]
        for kind, expected in (
            (Elementwise.ADD, x + y),
            (Elementwise.SUB, x - y),
            (Elementwise.MUL, x * y),
            (Elementwise.NEG, -x),
            (Elementwise.COPY, x),
        ):
            out = torch.full_like(expected, float("nan"))
            call = ops.elementwise.words(kind, out, x, y)
            assert call is not None
            launch(ops.elementwise.function, call[0])
            assert torch.equal(out, expected), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_when_compared_with_float64_then_is_rounded_once(ops: CppOps, dtype: torch.dtype) -> None:
    x = torch.linspace(-100, 90, 997).to(dtype).view(1, -1)[:, 3:]
    truth = torch.nn.functional.silu(x.double())
    error = (ops.elementwise.activation("silu", x).double() - truth).abs()
    assert (error <= truth.abs() * (2**-8 if dtype == torch.bfloat16 else 2**-21) + 1e-35).all()
    assert torch.equal(ops.elementwise.activation("silu", x.double()), truth)
