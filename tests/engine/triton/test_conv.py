"""The convolution's kernels against the torch op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
    full_beside,
    mixes,
    rand,
    segment,
)

from common.ops.step.device_step import DeviceStep  # isort: skip
from common.ops.torch.backend import TorchOps  # isort: skip
from common.ops.triton.conv import conv1d_varlen  # isort: skip


def check(
    mix: Mix,
    guard: Guards,
    dtype: torch.dtype,
    *,
    channels: int = 6,
    kernel: int = 4,
    has_bias: bool = True,
    silu: bool = False,
    is_gated: bool = False,
    is_transposed: bool = False,
    step: DeviceStep | None = None,
) -> None:
    """``step``: instead of the mix's own."""
    steps = mix.steps()
    x, *gates = (mix.rows(channels, seed=seed, dtype=dtype) for seed in ((1, 2, 3) if is_gated else (1,)))
    weight, bias = rand(channels, kernel, seed=4).to(dtype), rand(channels, seed=5).to(dtype)
    before = mix.slot_pool(channels, kernel - 1, dtype=dtype)
    expected_pool, pool = before.float().clone(), guard(before)
    rows = slice(mix.num_tokens)
    pair = (gates[0], gates[1]) if is_gated else None
    expected = TorchOps().conv1d(
        x[rows].float(),
        weight.float(),
        bias.float() if has_bias else None,
        steps.reference,
        expected_pool,
        silu=silu,
        gates=(gates[0][rows].float(), gates[1][rows].float()) if is_gated else None,
    )

    def given(x: Tensor) -> Tensor:
        return guard(x.T.contiguous()).T if is_transposed else guard(torch.cat([x, x], 1)[:, :channels])

    found = conv1d_varlen(
        given(x),
        guard(weight),
        guard(bias) if has_bias else None,
        guard.step(steps.step if step is None else step),
        pool,
        silu=silu,
        gates=(given(pair[0]), given(pair[1])) if pair else None,
    )
    assert found.dtype == dtype
    assert_close(found[rows], expected, TOLERANCES[dtype])
    assert bool((found[mix.num_tokens :] == 0).all())
    assert_same_pools(pool, expected_pool, before, 1e-7 if not is_gated else TOLERANCES[dtype])


@mixes
@dtypes
def test_conv1d_when_mixed_then_equals_torch(mix: Mix, dtype: torch.dtype, guard: Guards) -> None:
    check(mix, guard, dtype, silu=True)


@pytest.mark.parametrize("mix", [MIXES["spans_and_decode_rows"]], ids=["spans_and_decode_rows"])
@pytest.mark.parametrize("kernel", full_beside(3, others=(2, 4)))
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_conv1d_when_of_any_form_then_equals_torch(
    mix: Mix, kernel: int, is_transposed: bool, is_gated: bool, has_bias: bool, guard: Guards
) -> None:
    check(mix, guard, torch.float32, kernel=kernel, is_transposed=is_transposed, is_gated=is_gated, has_bias=has_bias)


@dtypes
def test_conv1d_when_gated_then_equals_torch(dtype: torch.dtype, guard: Guards) -> None:
    check(MIXES["verify_spans"], guard, dtype, is_gated=True)


def test_conv1d_when_of_many_channels_then_equals_torch(guard: Guards) -> None:
    mix = Mix((segment(1, 1, 1), segment(70, 2, 2, [(2, 3)])))
    check(mix, guard, torch.float32, channels=300)


@damages
def test_conv1d_when_the_step_is_wrong_then_the_comparison_fails(damage: Damage) -> None:
    mix = MIXES["spans_and_decode_rows"]
    with pytest.raises(AssertionError, match=r"errors|must not change|is off"):
        check(mix, Guards(), torch.float32, step=damaged(mix, damage).steps().step)
