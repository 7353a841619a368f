"""What a row becomes does not depend on how many rows are in its step, nor on where among them it is: states of a
prompt that is computed at once are those of the same prompt computed token by token, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.cpu.backend import CppOps
from common.ops.interface import ACTIVATIONS
from tests.engine.harness import Harness, Work, engine_model, random_tokens
from tests.engine.test_ops_cpp import SCANS, make_scan
from tests.support.models import tiered
from tests.support.ops import OPS_BACKENDS, make_ops

NUM_ROWS = 33
HEADS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 31, 32, 48, 129)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# One of each kind of state, with layers whose other parts are exact on every processor. Not Mamba-1's, whose step size
# is torch's matrix product: it depends on the rows on some.
FAMILIES = ("qwen3_5", "olmo_hybrid", "granitemoehybrid", "mamba2", "lfm2", "falcon_h1", "bamba")
FIRST_LAYERS = ("qwen3_next", "kimi_linear", "bailing_hybrid", "minimax", "nemotron_h")
"""Families with routers, which torch multiplies: states before the first one are compared."""


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (4 * torch.randn(*shape, generator=torch.Generator().manual_seed(7))).to(dtype)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@DTYPES
@pytest.mark.parametrize("heads", tiered(HEADS, (1, 3, 8, 31, 129)))
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("backend", OPS_BACKENDS)
def test_activation_when_rows_come_together_or_alone_then_each_keeps_its_bits(
    backend: str, name: str, heads: int, dtype: torch.dtype
) -> None:
    ops, x = make_ops(backend), values(NUM_ROWS, heads, dtype=dtype)
    alone = torch.cat([ops.activation(name, row[None]) for row in x])
    for count in range(1, NUM_ROWS + 1):
        assert torch.equal(ops.activation(name, x[:count]), alone[:count])
        assert torch.equal(ops.activation(name, x[-count:]), alone[-count:])
    wide = values(NUM_ROWS, 3 * heads, dtype=dtype)
    wide[:, heads : 2 * heads] = x  # columns of a projection for several
    assert torch.equal(ops.activation(name, wide[:, heads : 2 * heads]), alone)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("backend", OPS_BACKENDS)
def test_activation_when_a_tensor_is_cut_for_threads_then_each_row_keeps_its_bits(backend: str, name: str) -> None:
    ops, x = make_ops(backend), values(3001, 31)
    rows = ops.activation(name, x)
    for row in (0, 1, 1499, 1500, 1501, 3000):
        assert torch.equal(ops.activation(name, x[row : row + 1]), rows[row : row + 1])


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("backend", OPS_BACKENDS)
def test_activation_when_computed_then_is_as_near_the_truth_as_float32_allows(backend: str, name: str) -> None:
    ops = make_ops(backend)
    x = torch.cat([torch.linspace(-80, 80, 4001), values(999), torch.tensor([0.0, -0.0, 20.0, 1e4])])
    truth = getattr(F, name)(x.double())
    assert torch.allclose(ops.activation(name, x).double(), truth, rtol=6e-7, atol=1e-37)
    strided = x.view(4, -1)[::2, 5:].T
    assert torch.equal(ops.activation(name, strided), ops.activation(name, strided.contiguous()))
    assert ops.activation(name, torch.tensor([float("nan")])).isnan().all()
    assert ops.activation(name, x[:0]).shape == (0,)


@DTYPES
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("name", SCANS)
def test_scan_when_tokens_come_one_by_one_then_states_keep_every_bit(name: str, odd: bool, dtype: torch.dtype) -> None:
    scan = make_scan(name, make_ops("cpp"), dtype, odd=odd)
    expected, pool = scan.cut(())
    found, found_pool = scan.cut(tuple(range(1, NUM_ROWS + 1)))
    assert torch.equal(found, expected)
    assert torch.equal(found_pool, pool)


def states_after(family: str, steps: list[list[int]]) -> Iterator[list[Tensor]]:
    """What the sequence's slot holds after each step; of ``FIRST_LAYERS`` the first layer's part."""
    harness = Harness(family, "cpp")
    harness.add("A", 1, NUM_ROWS)
    layers = harness.model.geometry.state_layers[: 1 if family in FIRST_LAYERS else None]
    for tokens in steps:
        harness.hidden(Work("A", tokens))
        pools = [pool for layer in layers for pool in harness.storage.state_layer(layer.layer_idx).values()]
        yield [pool[1].clone() for pool in pools]


@pytest.mark.parametrize("family", tiered((*FAMILIES, *FIRST_LAYERS), ("qwen3_5", "kimi_linear", "granitemoehybrid")))
def test_state_when_tokens_come_one_by_one_then_is_that_of_a_prompt_computed_at_once(family: str) -> None:
    tokens = random_tokens(NUM_ROWS, 5)
    for count, expected in enumerate(states_after(family, [[token] for token in tokens]), start=1):
        (found,) = states_after(family, [tokens[:count]])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), f"{count} rows"


def test_activation_when_no_step_runs_then_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    make_ops("cpp")
    assert isinstance(engine_model("qwen3_5", ops="cpp").ops, CppOps)  # torch's functions are replaced by now
    monkeypatch.setattr(CppOps, "activation", None)
    x = values(5, 7)
    for found in (x.sigmoid(), torch.sigmoid(x), F.silu(x) / x, F.silu(x.clone(), inplace=True) / x):
        assert torch.allclose(found, 1 / (1 + (-x).exp()))
    assert torch.allclose(F.softplus(x, 2.0), (1 + (2 * x).exp()).log() / 2, atol=1e-6)
