"""The Mamba-2 scan's kernels against the torch op."""

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

from common.ops.triton.mamba2 import mamba2_varlen  # isort: skip  # after the interpreter

_FULL = pytest.mark.full
LONG_SPANS = Mix((segment(1, 1, 1), segment(150, 2, 3, [(70, 4), (128, 5), (129, 6)]), segment(17, 0, 7)))


def check(
    mix: Mix,
    guard: Guards,
    dtype: torch.dtype,
    *,
    heads: int = 2,
    groups: int = 1,
    head_dim: int = 6,
    size: int = 5,
    is_raw: bool = True,
    has_skip: bool = True,
    step: DeviceStep | None = None,
) -> tuple[Tensor, Tensor]:
    """``is_raw``: dt is still to become the step size. ``step``: instead of the mix's own. Returns outputs, pool."""
    steps = mix.steps()
    x = mix.rows(heads, head_dim, seed=1, dtype=dtype)
    dt = mix.rows(heads, seed=2) * 3
    dt = (dt if is_raw else dt.abs() * 0.2).to(dtype)
    b, c = (mix.rows(groups, size, seed=seed, dtype=dtype) for seed in (3, 4))
    a, d = -rand(heads, seed=5).exp() * 0.3, rand(heads, seed=6) if has_skip else None
    bias = rand(heads, seed=7)
    before = mix.slot_pool(heads, head_dim, size)
    expected_pool, pool = before.clone(), guard(before)
    rows = slice(mix.num_tokens)
    expected = TorchOps().mamba2(
        x[rows].float(),
        dt[rows].float(),
        a,
        b[rows].float(),
        c[rows].float(),
        d,
        steps.reference,
        expected_pool,
        step_size=StepSize(bias, True, 0.01, 2.5) if is_raw else FINAL_STEP_SIZE,
    )

    def given(x: Tensor) -> Tensor:
        """As a slice of a projection: rows lie apart."""
        return guard(torch.cat([x, x], 1)[:, : x.shape[1]])

    found = mamba2_varlen(
        given(x),
        given(dt),
        guard(a),
        given(b),
        given(c),
        None if d is None else guard(d),
        guard.step(steps.step if step is None else step),
        pool,
        StepSize(guard(bias), True, 0.01, 2.5) if is_raw else FINAL_STEP_SIZE,
    )
    assert found.dtype == dtype
    assert_close(found[rows], expected, TOLERANCES[dtype])
    assert bool((found[mix.num_tokens :] == 0).all())
    assert_same_pools(pool, expected_pool, before, TOLERANCES[dtype])
    return found, pool


@mixes
@dtypes
def test_mamba2_when_mixed_then_equals_torch(mix: Mix, dtype: torch.dtype, guard: Guards) -> None:
    check(mix, guard, dtype)


@_FULL
@dtypes
@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "size"), [(4, 2, 20, 16), (2, 2, 16, 16), (2, 1, 40, 8), (1, 1, 6, 40)]
)
def test_mamba2_when_spans_are_long_then_equals_torch(
    heads: int, groups: int, head_dim: int, size: int, is_raw: bool, dtype: torch.dtype, guard: Guards
) -> None:
    check(
        LONG_SPANS,
        guard,
        dtype,
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        size=size,
        is_raw=is_raw,
        has_skip=not is_raw,
    )


@damages
def test_mamba2_when_the_step_is_wrong_then_the_comparison_fails(damage: Damage) -> None:
    mix = MIXES["spans_and_decode_rows"]
    with pytest.raises(AssertionError, match=r"errors|must not change|is off"):
        check(mix, Guards(), torch.float32, step=damaged(mix, damage).steps().step)


def test_mamba2_when_rows_are_verified_then_as_decode_rows_to_the_bit(guard: Guards) -> None:
    """A draft is accepted or not by what decode rows would have given."""
    span = Mix((segment(3, 1, 2, [(1, 3), (2, 4)]),))
    outputs, pool = check(span, guard, torch.bfloat16)
    x, dt, b, c = (span.rows(*shape, seed=seed) for shape, seed in (((2, 6), 1), ((2,), 2), ((1, 5), 3), ((1, 5), 4)))
    x, dt, b, c = (given.bfloat16() for given in (x, dt * 3, b, c))
    a, d, size = -rand(2, seed=5).exp() * 0.3, rand(2, seed=6), StepSize(rand(2, seed=7), True, 0.01, 2.5)
    own = span.slot_pool(2, 6, 5)
    for row, (src, dst) in enumerate([(1, 3), (3, 4), (4, 2)]):
        at = slice(row, row + 1)
        step = Mix((segment(1, src, dst),)).steps().step
        found = mamba2_varlen(x[at], dt[at], a, b[at], c[at], d, step, own, size)
        assert torch.equal(found, outputs[at].cpu())
    assert torch.equal(own[1:5], pool[1:5].cpu())
