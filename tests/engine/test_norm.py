"""The compiled norm: which modules it replaces, its numbers, and rows that do not depend on each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from common.models.fused.norms import FusedNorm, fuse_norms
from common.ops.cpu.backend import CppOps
from common.ops.cpu.norm import NormOps
from common.ops.row_ops import Gate
from tests.engine.harness import engine_model
from tests.support.models import FAMILIES, tiered
from tests.support.ops import make_ops


@pytest.fixture
def ops() -> NormOps:
    backend = make_ops("cpp")
    assert isinstance(backend, CppOps)
    return backend.norms


KINDS = {
    "falcon_mamba": {FusedNorm.__name__, "FalconMambaWeightlessRMSNorm"},
}
"""Norms of families that have others than root mean square norms with a weight."""


class OddRMSNorm(nn.Module):
    """Subtracts the mean: no variant of the compiled norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kind", list(Gate))
@pytest.mark.parametrize(("size", "group"), [(64, 64), (64, 16), (39, 13), (7, 7), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_when_compared_with_float64_then_is_rounded_once(
    ops: NormOps, dtype: torch.dtype, size: int, group: int, kind: Gate
) -> None:
    x, weight = rand(5, 2 * size, seed=1, dtype=dtype)[:, :size], rand(size, seed=2, dtype=dtype)
    gate = None if kind == Gate.NONE else rand(5, size, seed=3, dtype=dtype)
    found = ops.rms_norm(x, weight, gate, epsilon=1e-5, offset=1.0, group=group, kind=kind)
    y, g = x.double(), torch.zeros(5, size).double() if gate is None else gate.double()
    y = y * g * g.sigmoid() if kind == Gate.SILU_BEFORE else y
    grouped = y.view(5, size // group, group)
    y = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + 1e-5)).view(5, size) * (weight.double() + 1.0)
    y = y * g * g.sigmoid() if kind == Gate.SILU_AFTER else y * g.sigmoid() if kind == Gate.SIGMOID_AFTER else y
    rtol = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), y, rtol=rtol, atol=1e-6)
    alone = [
        ops.rms_norm(x[i], weight, None if gate is None else gate[i], epsilon=1e-5, offset=1.0, group=group, kind=kind)
        for i in range(5)
    ]
    assert torch.equal(torch.stack(alone), found)


def test_rms_norm_when_the_shapes_do_not_fit_then_says_so(ops: NormOps) -> None:
    with pytest.raises(RuntimeError, match=r"\(3, 9\) rows for a weight of 8 in groups of 8"):
        ops.rms_norm(torch.zeros(3, 9), torch.zeros(8), None, epsilon=1e-5)
    with pytest.raises(RuntimeError, match="in groups of 3"):
        ops.rms_norm(torch.zeros(3, 8), torch.zeros(8), None, epsilon=1e-5, group=3)
    assert ops.rms_norm(torch.zeros(0, 8), torch.zeros(8), None, epsilon=1e-5).shape == (0, 8)


@pytest.mark.parametrize("family", tiered(FAMILIES, ("granitemoehybrid", "qwen3_5", "gemma3", "kimi_linear")))
def test_load_model_when_ops_are_compiled_then_every_norm_with_a_weight_is_fused(family: str) -> None:
    make_ops("cpp")
    kinds = {type(m).__name__ for m in engine_model(family, ops="cpp").model.modules() if "Norm" in type(m).__name__}
    assert kinds == KINDS.get(family, {FusedNorm.__name__})


def test_fuse_norms_when_no_variant_fits_then_leaves_the_module(ops: NormOps) -> None:
    model = nn.Sequential(OddRMSNorm()).requires_grad_(False)
    fuse_norms(model, ops)
    assert type(model[0]) is OddRMSNorm


def resident_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def test_scratch_when_it_has_to_grow_then_the_smaller_one_is_gone_before(ops: NormOps) -> None:
    """The norm's is as wide as four rows; each thread has its own."""
    small, large = torch.ones(4 << 20), torch.ones(5 << 20)

    def grow() -> int:
        ops.rms_norm(small[None], small, None, epsilon=1e-6)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        out = ops.rms_norm(large[None], large, None, epsilon=1e-6)
        assert out.shape == (1, 5 << 20)
        return resident_bytes("VmHWM") - resident_bytes("VmRSS")

    with ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(grow).result() < small.nbytes
