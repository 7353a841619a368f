"""The tests' own instruments see what they are there to see."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

from tests.support.triton_interpreter import TRITON_DEVICE  # first: it decides how kernels are made

# isort: split
import pytest
import torch
import triton
import triton.language as tl

from tests.engine.triton.guards import Guards
from tests.engine.triton.support import MIXES, assert_close, assert_same_pools, rand


@pytest.mark.skipif(TRITON_DEVICE != "cpu", reason="plain memory on a GPU")
@pytest.mark.parametrize(("offset", "dies"), [(0, False), (5 * 4 - 1, False), (5 * 4, True), (-4096, True)])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_guards_when_read_beside_then_the_process_dies(offset: int, dies: bool) -> None:
    guard = Guards()
    address = guard(torch.zeros(5)).data_ptr() + offset
    child = os.fork()
    if not child:
        faulthandler.disable()
        ctypes.string_at(address, 1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == (signal.SIGSEGV if dies else 0)


def test_guards_when_written_into_a_gap_then_seen() -> None:
    guard = Guards()
    x = guard(rand(4, 6, seed=1)[:, :3])
    assert torch.equal(x.cpu(), rand(4, 6, seed=1)[:, :3])
    guard.check()
    x.as_strided((3, 4), (6, 1))[1, 3] = 0
    with pytest.raises(AssertionError, match="beside"):
        guard.check()


def test_comparisons_when_one_row_or_slot_is_off_then_raise() -> None:
    mix = MIXES["padded_decode_rows"]
    before = mix.slot_pool(2, 3)
    expected = before.float().clone()
    expected[4] = 1
    found = expected.clone()
    assert_same_pools(found, expected, before, 1e-5)
    for slot, value in ((4, 1.001), (1, 2.0), (20, 0.0)):
        damaged = found.clone()
        damaged[slot, 0, 0] = value
        with pytest.raises(AssertionError, match=str(slot)):
            assert_same_pools(damaged, expected, before, 1e-5)
    rows = rand(5, 2, 3, seed=3)
    assert_close(rows, rows, 1e-5)
    for value in (rows[3, 1, 2] + 1e-3, float("nan")):
        damaged = rows.clone()
        damaged[3, 1, 2] = value
        with pytest.raises(AssertionError, match="errors"):
            assert_close(damaged, rows, 1e-5)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_guarded_step_when_cut_then_equals_the_step(mix, guard: Guards) -> None:  # type: ignore[no-untyped-def]
    step = mix.steps().step
    guarded = guard.step(step)
    assert torch.equal(guarded.decode_dst, step.decode_dst)
    assert torch.equal(guarded.chunks(16).store_slot, step.chunks(16).store_slot)
    assert (guarded.num_rows, guarded.num_spans) == (mix.num_rows or mix.num_tokens, step.num_spans)


@triton.jit
def _apply_kernel(x, y, SUBTRACT: tl.constexpr, MULTIPLY: tl.constexpr):
    left, right = tl.load(x), tl.load(y)
    tl.store(x, left - right if SUBTRACT else left * right if MULTIPLY else left + right)


@pytest.mark.skipif(TRITON_DEVICE != "cpu", reason="compiled code wraps around")
@pytest.mark.parametrize(
    ("operation", "x", "y", "last"),
    [("add", 2**31 - 5, 4, 5), ("subtract", -(2**31) + 4, 4, 5), ("multiply", 2**16, 2**15 - 1, 2**15)],
)
def test_interpreter_when_an_integer_overflows_then_raises(operation: str, x: int, y: int, last: int) -> None:
    apply = _apply_kernel[(1,)]
    kind = operation == "subtract", operation == "multiply"
    value = torch.tensor([x], dtype=torch.int32)
    apply(value, torch.tensor([y], dtype=torch.int32), *kind)
    assert value.item() == {"add": x + y, "subtract": x - y, "multiply": x * y}[operation]
    value = torch.tensor([x], dtype=torch.int32)
    with pytest.raises(Exception, match="overflow of int32"):
        apply(value, torch.tensor([last], dtype=torch.int32), *kind)
