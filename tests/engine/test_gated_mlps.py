"""The compiled middle of gated MLPs: which modules it replaces, and its numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import FalconH1Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP

from common.models.cpu.linears import pack_linears
from common.models.fused.activations import fuse_activations
from common.models.fused.gated_mlps import FusedGatedMLP, fuse_gated_mlps
from common.ops.cpu.backend import CppOps
from tests.engine.harness import engine_model
from tests.support.models import FAMILIES, tiered
from tests.support.ops import make_ops

HIDDEN, INTERMEDIATE = 48, 80
DTYPES = [torch.float32, torch.bfloat16]
OTHERS = {"falcon_mamba", "gemma3", "gemma3_vl", "mamba", "mamba2", "minimax", "nemotron_h", "zamba", "zamba2"}
"""Families whose MLPs have no gate or another activation, or that have none."""


@pytest.fixture
def ops() -> CppOps:
    backend = make_ops("cpp")
    assert isinstance(backend, CppOps)
    return backend


class Separate(nn.Module):
    """As llama's, with ``activate`` in its code."""

    def __init__(self, activate: Callable[[Tensor], Tensor], factor: float = 1.0, is_swapped: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, INTERMEDIATE, bias=False), nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.w2 = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.activate, self.factor, self.is_swapped = activate, factor, is_swapped

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x), self.w3(x)
        if self.is_swapped:
            gate, up = up, gate
        return self.w2(self.activate(self.factor * gate) * up)


class Together(nn.Module):
    """As Granite's."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.SiLU()
        self.input_linear = nn.Linear(HIDDEN, 2 * INTERMEDIATE)
        self.output_linear = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.input_linear(x).chunk(2, dim=-1)
        return self.output_linear(self.activation(gate) * up)


def fused(mlp: nn.Module, ops: CppOps, dtype: torch.dtype) -> nn.Module:
    model = nn.Sequential(mlp).to(dtype).requires_grad_(False)
    pack_linears(model, ops.linears)
    fuse_activations(model, ops.elementwise)
    fuse_gated_mlps(model, ops.elementwise)
    return model[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [lambda: Separate(F.silu), Together], ids=["separate", "together"])
def test_fuse_gated_mlps_when_replaced_then_gives_the_numbers_of_the_module(
    ops: CppOps, make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    mlp = make()
    x = 3 * torch.randn(1, 7, HIDDEN).to(dtype)
    replaced = fused(mlp, ops, dtype)
    assert isinstance(replaced, FusedGatedMLP)
    expected, found = mlp(x), replaced(x)
    assert found.dtype == dtype
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=scale * (1e-6 if dtype == torch.float32 else 2**-7))
    assert torch.equal(replaced(x[:, 2:3]), found[:, 2:3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize(
    "change",
    [
        {"activate": F.gelu},
        {"activate": F.mish},
        {"activate": lambda x: F.gelu(x, approximate="tanh")},
        {"activate": torch.sigmoid},
        {"activate": F.silu, "factor": 0.9},
        {"activate": F.silu, "factor": 0.99},
        {"activate": F.silu, "is_swapped": True},
    ],
    ids=["gelu", "mish", "tanh", "sigmoid", "factor", "near", "swapped"],
)
def test_fuse_gated_mlps_when_the_module_computes_something_else_then_leaves_it(
    ops: CppOps, change: dict[str, object], size: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    mlp = Separate(**change)  # type: ignore[arg-type]
    with torch.no_grad():
        for weight in mlp.parameters():  # of another size than the trial's input expects
            weight.mul_(size / weight.square().mean().sqrt())
    assert isinstance(fused(mlp, ops, dtype), Separate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factors", [(1.0, 0.985), (0.985, 1.0), (1.0, 0.999)])
def test_fuse_gated_mlps_when_falcon_h1_has_factors_near_one_then_leaves_the_module(
    ops: CppOps, factors: tuple[float, float], dtype: torch.dtype
) -> None:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    torch.manual_seed(0)
    assert isinstance(fused(FalconH1MLP(FalconH1Config(**sizes)), ops, dtype), FusedGatedMLP)
    mlp = FalconH1MLP(FalconH1Config(**sizes, mlp_multipliers=list(factors)))
    assert isinstance(fused(mlp, ops, dtype), FalconH1MLP)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_when_compared_with_float64_then_is_rounded_once(ops: CppOps, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    both = (8 * torch.randn(5, 2 * 300, generator=generator)).to(dtype)
    gate, up = both[:, 3:300], both[:, 303:]
    truth = F.silu(gate.double()) * up.double()
    error = (ops.elementwise.silu_mul(gate, up).double() - truth).abs()
    assert (error <= truth.abs() * (2**-8 if dtype == torch.bfloat16 else 2**-21) + 1e-35).all()
    wide = ops.elementwise.silu_mul(gate.double(), up.double())  # no kernel for it
    assert torch.equal(wide, truth)


@pytest.mark.parametrize("family", tiered(FAMILIES, ("granitemoehybrid", "qwen3_5", "lfm2", "llama", "gemma3")))
def test_load_model_when_ops_are_compiled_then_every_silu_mlp_is_fused(family: str) -> None:
    make_ops("cpp")
    modules = list(engine_model(family, ops="cpp").model.modules())
    mlps = [m for m in modules if type(m).__name__.endswith("MLP") and "Siglip" not in type(m).__name__]
    num_fused = sum(isinstance(m, FusedGatedMLP) for m in mlps)
    assert num_fused == (0 if family in OTHERS else len(mlps) - num_fused)
    assert num_fused > 0 or family in OTHERS
