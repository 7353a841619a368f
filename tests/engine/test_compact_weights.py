"""bfloat16 weights in 12 bits: the bits of what is computed and read back are those of plain ones.

Where products do not run on tiles no weight is compact, and all of this holds by itself.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.ops.cpu.backend import CppOps
from common.ops.cpu.linear import LinearOps, PackedWeight, large_pages
from tests.engine.harness import Harness, Work, random_tokens
from tests.support.models import tiered
from tests.support.ops import make_ops

SHAPES = pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (33, 65), (64, 32), (515, 100), (1024, 96), (3000, 7), (700, 1300)]
)
NUM_ROWS = (1, 2, 16, 17, 32, 33, 64, 65, 130, 300, 600)
CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
SPECIAL = (0.0, -0.0, 1e30, -3e-20, 1e-40, -1e-40, float("inf"), float("-inf"))


@pytest.fixture
def ops() -> LinearOps:
    backend = make_ops("cpp")
    assert isinstance(backend, CppOps)
    return backend.linears


def weights(*shape: int) -> Tensor:
    """As a layer has them, with some values, one in each corner of a tile among them, that no layer has."""
    weight = (0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(1))).bfloat16()
    out_features, in_features = shape[-2:]
    places = itertools.product((0, 15, 16, 31, out_features - 1), (0, 1, 31, 32, in_features - 1))
    for (row, column), value in zip(places, itertools.cycle(SPECIAL)):
        if row < out_features and column < in_features and in_features * out_features > 10_000:
            weight[..., row, column] = value
    return weight


def rows(count: int, in_features: int) -> Tensor:
    return torch.randn(count, in_features, generator=torch.Generator().manual_seed(3)).bfloat16()


def pack(ops: LinearOps, weight: Tensor, *, is_compact: bool) -> PackedWeight:
    return ops.pack(weight, large_pages(ops.num_words(weight)), is_compact=is_compact)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int16)


@SHAPES
def test_linear_when_the_weight_is_compact_then_gives_the_bits_of_a_plain_one(
    ops: LinearOps, in_features: int, out_features: int
) -> None:
    weight, bias = weights(out_features, in_features), torch.arange(out_features).bfloat16()
    plain, compact = (pack(ops, weight, is_compact=each) for each in (False, True))
    for count in NUM_ROWS:
        x = rows(count, in_features)
        assert torch.equal(bits(ops.linear(x, compact, bias)), bits(ops.linear(x, plain, bias))), f"{count} rows"


def test_linear_when_the_weight_is_compact_and_two_threads_run_then_gives_the_same_bits(ops: LinearOps) -> None:
    weight, x, threads = pack(ops, weights(1300, 700), is_compact=True), rows(40, 700), torch.get_num_threads()
    expected = ops.linear(x, weight)
    torch.set_num_threads(2)
    try:
        assert torch.equal(bits(ops.linear(x, weight)), bits(expected))
    finally:
        torch.set_num_threads(threads)


def test_linear_when_a_compact_weight_is_damaged_then_its_bits_are_others(ops: LinearOps) -> None:
    """What the comparisons above would see."""
    weight, x = pack(ops, weights(96, 1024), is_compact=True), rows(3, 1024)
    expected = ops.linear(x, weight).clone()
    weight.words[17] ^= 0x7F7F7F7F
    assert not torch.equal(bits(ops.linear(x, weight)), bits(expected))


@SHAPES
def test_rows_when_the_weight_is_compact_then_are_the_weights(
    ops: LinearOps, in_features: int, out_features: int
) -> None:
    weight = weights(out_features, in_features)
    found = ops.rows(pack(ops, weight, is_compact=True), torch.arange(out_features))
    assert torch.equal(bits(found), bits(weight))


def test_grouped_when_the_weights_are_compact_then_gives_the_bits_of_plain_ones(ops: LinearOps) -> None:
    weight, x, begin = weights(5, 70, 330), rows(80, 330), [0, 3, 3, 70, 71, 80]
    weight[2] = (
        torch.randint(-(2**15), 2**15, weight[2].shape, generator=torch.Generator().manual_seed(2))
        .to(torch.int16)
        .view(torch.bfloat16)
        .nan_to_num()
    )  # any exponent: this one cannot be compact, between others that are
    plain, compact = (pack(ops, weight, is_compact=each) for each in (False, True))
    assert torch.equal(bits(ops.grouped(x, begin, compact)), bits(ops.grouped(x, begin, plain)))


def test_pack_when_compact_then_takes_three_quarters_or_stays_plain(ops: LinearOps) -> None:
    ordinary = pack(ops, weights(1024, 1024), is_compact=True)
    if "amx_bf16" not in CPU:  # asked of the system: nothing compact where there are tiles is a failure
        pytest.skip("this CPU has no tiles")
    assert ordinary.nbytes < 0.76 * 2 * 1024 * 1024
    spread = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1)).sign() * 2.0 ** (
        torch.arange(1024) % 40 - 20
    )
    for weight in (spread.bfloat16(), weights(256, 256).float()):
        packed = pack(ops, weight, is_compact=True)
        assert packed.books is None
        assert packed.nbytes == weight.nbytes
        assert torch.equal(ops.rows(packed, torch.arange(3)), weight[:3])


@pytest.mark.parametrize("family", tiered(("granitemoehybrid", "qwen3_next", "lfm2"), ("qwen3_next",)))
def test_model_when_loaded_as_on_a_decode_node_then_has_the_bits_of_a_prefill_node(family: str) -> None:
    """Prompts of one and of several chunks, then decode steps: heads, tied embeddings and experts included."""

    def run(compact: bool) -> Tensor:
        harness = Harness(family, "cpp", dtype="bfloat16", compact=compact)
        harness.add("A", 1, 200)
        found = [harness.logits(Work("A", random_tokens(count, 7)))[0] for count in (40, 70, 5)]
        found += [harness.logits(Work("A", [7 + i]))[0] for i in range(4)]
        return torch.cat(found)

    assert torch.equal(run(compact=True), run(compact=False))
