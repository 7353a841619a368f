"""The C++ ops compiled for narrower vectors than this CPU has: the paths that other machines run."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from common.models.loading.fingerprint import user_cache_dir
from common.ops.cpu.backend import CppOps
from common.ops.cpu.build import BuildError, load_library
from common.ops.cpu.linear import large_pages
from common.ops.interface import Ops
from tests.engine.test_ops_cpp import CUTS, DTYPES, HEADS, SCANS, Heads, attend_in_pieces, make_scan
from tests.support.ops import make_ops

pytestmark = pytest.mark.full
MACHINES = {
    "8_lanes": ("-march=x86-64-v3", "-fopenmp"),
    "16_lanes_without_bf16": ("-march=x86-64-v4", "-fopenmp"),
    "16_lanes_without_tiles": ("-march=cooperlake", "-fopenmp"),
    "4_lanes": ("-march=x86-64", "-fopenmp"),
}
NEEDS = {
    "8_lanes": "avx2",
    "16_lanes_without_bf16": "avx512vl",
    "16_lanes_without_tiles": "avx512_bf16",
    "4_lanes": "sse2",
}


@pytest.fixture(params=MACHINES)
def ops(request: pytest.FixtureRequest) -> Ops:
    if platform.machine() != "x86_64" or f" {NEEDS[request.param]} " not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU has no {NEEDS[request.param]}")
    make_ops("cpp")  # skips without a compiler
    try:
        return CppOps(load_library(user_cache_dir(), machine_flags=(MACHINES[request.param],)))
    except BuildError as exc:
        pytest.skip(f"the compiler does not know {MACHINES[request.param][0]}: {exc}")


@DTYPES
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("name", SCANS)
def test_scan_when_compiled_for_fewer_lanes_then_cuts_keep_every_bit_and_torch_agrees(
    ops: Ops, name: str, odd: bool, dtype: torch.dtype
) -> None:
    scan = make_scan(name, ops, dtype, odd=odd)
    expected, pool = scan.cut(())
    for cuts in CUTS.values():
        found, found_pool = scan.cut(cuts)
        assert torch.equal(found, expected)
        assert torch.equal(found_pool, pool)
    if dtype == torch.float32:
        reference, _ = make_scan(name, make_ops("torch"), dtype, odd=odd).cut(())
        assert torch.allclose(expected, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))


@DTYPES
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_when_compiled_for_fewer_lanes_then_cuts_keep_every_bit_and_torch_agrees(
    ops: Ops, heads: Heads, window: int, dtype: torch.dtype
) -> None:
    expected = attend_in_pieces(ops, heads, dtype, (), window)
    for cuts in CUTS.values():
        assert torch.equal(attend_in_pieces(ops, heads, dtype, cuts, window), expected)
    reference = attend_in_pieces(make_ops("torch"), heads, dtype, (), window)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert float((expected.float() - reference.float()).abs().max()) < tolerance


@DTYPES
def test_linear_when_compiled_for_fewer_lanes_then_each_row_keeps_its_bits_and_is_no_further_than_torch(
    ops: Ops, dtype: torch.dtype
) -> None:
    assert isinstance(ops, CppOps)
    linears = ops.linears
    weight = torch.randn(100, 515, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = torch.randn(40, 515, generator=torch.Generator().manual_seed(2)).to(dtype)
    packed = linears.pack(weight, large_pages(linears.num_words(weight)))
    found = linears.linear(x, packed)
    assert torch.equal(torch.cat([linears.linear(row[None], packed) for row in x]), found)
    truth, theirs = x.double() @ weight.double().T, torch.nn.functional.linear(x, weight)
    allowed = 1.1 if dtype == torch.bfloat16 else 3.0
    assert (found.double() - truth).abs().mean() <= allowed * (theirs.double() - truth).abs().mean() + 1e-7
    assert torch.equal(linears.rows(packed, torch.arange(100)), weight)
