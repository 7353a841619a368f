"""The delta rules' kernels against the torch ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
    segment,
)

from common.ops.triton.delta import delta_varlen  # isort: skip  # after the interpreter

_FULL = pytest.mark.full
LONG_SPANS = Mix((segment(1, 1, 1), segment(150, 2, 3, [(70, 4), (128, 5), (129, 6)]), segment(17, 0, 7)))
rules = pytest.mark.parametrize("per_channel", [False, True], ids=["gated", "kimi"])


def check(
    mix: Mix,
    guard: Guards,
    dtype: torch.dtype,
    *,
    per_channel: bool,
    key_heads: int = 1,
    heads: int = 2,
    key_dim: int = 12,
    value_dim: int = 20,
    strength: float = 0.3,
    step: DeviceStep | None = None,
) -> tuple[Tensor, Tensor]:
    """``value_dim``: a row of fewer values may be off by more than another, as 16-bit rounding errors do not average
    out. ``strength``: of the decays. ``step``: instead of the mix's own. Returns outputs, pool."""
    steps = mix.steps()
    query, key = (mix.rows(key_heads, key_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    value = mix.rows(heads, value_dim, seed=3, dtype=dtype)
    decay = -strength * mix.rows(heads, *([key_dim] if per_channel else []), seed=4).abs()
    beta = mix.rows(heads, seed=5).sigmoid()
    before = 0.3 * mix.slot_pool(heads, key_dim, value_dim)
    expected_pool, pool = before.clone(), guard(before)
    rows = slice(mix.num_tokens)
    ops = TorchOps()
    expected = (ops.kimi_delta if per_channel else ops.gated_delta)(
        *(x[rows].float() for x in (query, key, value, decay, beta)), steps.reference, expected_pool
    )

    def given(x: Tensor) -> Tensor:
        """As a slice of a projection: rows lie apart."""
        return guard(torch.cat([x, x], 1)[:, : x.shape[1]])

    rows_given = (given(x) for x in (query, key, value, decay, beta))
    found = delta_varlen(*rows_given, guard.step(steps.step if step is None else step), pool)
    assert found.dtype == dtype
    assert_close(found[rows], expected, TOLERANCES[dtype])
    assert bool((found[mix.num_tokens :] == 0).all())
    assert_same_pools(pool, expected_pool, before, TOLERANCES[dtype])
    return found, pool


@mixes
@dtypes
@rules
def test_delta_when_mixed_then_equals_torch(mix: Mix, dtype: torch.dtype, per_channel: bool, guard: Guards) -> None:
    check(mix, guard, dtype, per_channel=per_channel)


@dtypes
@pytest.mark.parametrize("per_channel", [False, pytest.param(True, marks=_FULL)], ids=["gated", "kimi"])
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"),
    [
        (1, 1, 20, 40),
        pytest.param(1, 1, 72, 72, marks=_FULL),  # several slices of keys and values in any dtype
        pytest.param(2, 4, 16, 16, marks=_FULL),
        pytest.param(2, 2, 32, 8, marks=_FULL),
    ],
)
def test_delta_when_spans_are_long_then_equals_torch(
    key_heads: int, heads: int, key_dim: int, value_dim: int, per_channel: bool, dtype: torch.dtype, guard: Guards
) -> None:
    shape = {"key_heads": key_heads, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    check(LONG_SPANS, guard, dtype, per_channel=per_channel, **shape)


@_FULL
@rules
@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_delta_when_decays_are_extreme_then_equals_torch(strength: float, per_channel: bool, guard: Guards) -> None:
    """Within a chunk they sum up to a hundred and more: an exponential of the sum alone would be infinite."""
    check(LONG_SPANS, guard, torch.float32, per_channel=per_channel, strength=strength)


@pytest.mark.parametrize("per_channel", [False, pytest.param(True, marks=_FULL)], ids=["gated", "kimi"])
@damages
def test_delta_when_the_step_is_wrong_then_the_comparison_fails(damage: Damage, per_channel: bool) -> None:
    mix = MIXES["spans_and_decode_rows"]
    step = damaged(mix, damage).steps().step
    with pytest.raises(AssertionError, match=r"errors|must not change|is off"):
        check(mix, Guards(), torch.float32, per_channel=per_channel, step=step)


def test_delta_when_rows_are_verified_then_as_decode_rows_to_the_bit(guard: Guards) -> None:
    """A draft is accepted or not by what decode rows would have given."""
    span = Mix((segment(3, 1, 2, [(1, 3), (2, 4)]),))
    outputs, pool = check(span, guard, torch.bfloat16, per_channel=False)
    query, key = (span.rows(1, 12, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    value = span.rows(2, 20, seed=3, dtype=torch.bfloat16)
    decay, beta = -0.3 * span.rows(2, seed=4).abs(), span.rows(2, seed=5).sigmoid()
    own = (0.3 * span.slot_pool(2, 12, 20)).to(pool.device)
    for row, (src, dst) in enumerate([(1, 3), (3, 4), (4, 2)]):
        rows = (x[row : row + 1].to(pool.device) for x in (query, key, value, decay, beta))
        found = delta_varlen(*rows, Mix((segment(1, src, dst),)).steps().step, own)
        assert torch.equal(found, outputs[row : row + 1])
    assert torch.equal(own[1:5], pool[1:5])
