"""The Mamba-1 scan's kernels against the torch op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.ops.interface import FINAL_STEP_SIZE, StepSize
from common.ops.step.device_step import DeviceStep
from common.ops.torch.backend import TorchOps
from tests.engine.triton.guards import Guards
from tests.engine.triton.support import (
    MIXES,
    TOLERANCES,
    Damage,
    Mix,
    assert_close,
    assert_same_pools,
    damaged,
    damages,
    dtypes,
    mixes,
    rand,
    segment,
)

from common.ops.triton import mamba1  # isort: skip  # after the interpreter

_FULL = pytest.mark.full
LONG_SPANS = Mix((segment(1, 1, 1), segment(150, 2, 3, [(70, 4), (128, 5), (129, 6)]), segment(65, 0, 7)))


def inputs(mix: Mix, dtype: torch.dtype, channels: int, size: int, is_raw: bool) -> tuple[Tensor, ...]:
    """x, dt, b, c."""
    x, b, c = (mix.rows(n, seed=seed, dtype=dtype) for n, seed in ((channels, 1), (size, 3), (size, 4)))
    dt = mix.rows(channels, seed=2) * 3
    return x, (dt if is_raw else dt.abs() * 0.2).to(dtype), b, c


def check(
    mix: Mix,
    guard: Guards,
    dtype: torch.dtype,
    *,
    channels: int = 6,
    size: int = 5,
    is_raw: bool = True,
    has_skip: bool = True,
    step: DeviceStep | None = None,
) -> tuple[Tensor, Tensor]:
    """``is_raw``: dt is still to become the step size. ``step``: instead of the mix's own. Returns outputs, pool."""
    steps = mix.steps()
    x, dt, b, c = inputs(mix, dtype, channels, size, is_raw)
    a, d = -rand(channels, size, seed=5).exp() * 0.3, rand(channels, seed=6) if has_skip else None
    bias = rand(channels, seed=7)
    before = mix.slot_pool(channels, size)
    expected_pool, pool = before.clone(), guard(before)
    rows = slice(mix.num_tokens)
    expected = TorchOps().mamba1(
        *(given[rows].float() for given in (x, dt)),
        a,
        *(given[rows].float() for given in (b, c)),
        d,
        steps.reference,
        expected_pool,
        step_size=StepSize(bias, True, 0.01, 2.5) if is_raw else FINAL_STEP_SIZE,
    )

    def sliced(x: Tensor) -> Tensor:
        """As a slice of a projection: rows lie apart."""
        return guard(torch.cat([x, x], 1)[:, : x.shape[1]])

    found = mamba1.mamba1_varlen(
        sliced(x),
        guard(dt.T.contiguous()).T,  # as it comes from a projection with the weights on its left
        guard(a),
        sliced(b),
        sliced(c),
        None if d is None else guard(d),
        guard.step(steps.step if step is None else step),
        pool,
        StepSize(guard(bias), True, 0.01, 2.5) if is_raw else FINAL_STEP_SIZE,
    )
    assert found.dtype == torch.float32
    assert_close(found[rows], expected, TOLERANCES[dtype])
    assert bool((found[mix.num_tokens :] == 0).all())
    assert_same_pools(pool, expected_pool, before, TOLERANCES[dtype])
    return found, pool


@mixes
@dtypes
def test_mamba1_when_mixed_then_equals_torch(mix: Mix, dtype: torch.dtype, guard: Guards) -> None:
    check(mix, guard, dtype)


@dtypes
@pytest.mark.parametrize(
    ("channels", "size", "is_raw"),
    [pytest.param(*shape, marks=_FULL) for shape in [(6, 5, False), (70, 16, True), (130, 16, False)]],
)
def test_mamba1_when_spans_are_long_then_equals_torch(
    channels: int, size: int, is_raw: bool, dtype: torch.dtype, guard: Guards
) -> None:
    check(LONG_SPANS, guard, dtype, channels=channels, size=size, is_raw=is_raw, has_skip=not is_raw)


@damages
@pytest.mark.parametrize("is_long", [pytest.param(False, marks=_FULL), True])
def test_mamba1_when_the_step_is_wrong_then_the_comparison_fails(
    damage: Damage, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_long:
        monkeypatch.setattr(mamba1, "SHORT", range(1, 2))
        monkeypatch.setattr(mamba1, "LONG", range(2, mamba1.WHOLE_RUN))
        monkeypatch.setattr(mamba1, "CHUNK", 8)
    mix = MIXES["spans_and_decode_rows"]
    check(mix, Guards(), torch.float32)
    with pytest.raises(AssertionError, match=r"errors|must not change|is off"):
        check(mix, Guards(), torch.float32, step=damaged(mix, damage).steps().step)


def test_mamba1_when_rows_are_verified_then_as_decode_rows_to_the_bit(guard: Guards) -> None:
    """A draft is accepted or not by what decode rows would have given."""
    span = Mix((segment(3, 1, 2, [(1, 3), (2, 4)]),))
    outputs, pool = check(span, guard, torch.bfloat16)
    x, dt, b, c = inputs(span, torch.bfloat16, 6, 5, True)
    a, d, size = -rand(6, 5, seed=5).exp() * 0.3, rand(6, seed=6), StepSize(rand(6, seed=7), True, 0.01, 2.5)
    own = span.slot_pool(6, 5)
    for row, (src, dst) in enumerate([(1, 3), (3, 4), (4, 2)]):
        at = slice(row, row + 1)
        step = Mix((segment(1, src, dst),)).steps().step
        found = mamba1.mamba1_varlen(x[at], dt[at], a, b[at], c[at], d, step, own, size)
        assert torch.equal(found, outputs[at].cpu())
    assert torch.equal(own[1:5], pool[1:5].cpu())
