"""What the C++ ops promise beyond their numbers: the same bits however a prompt is cut, shapes checked before memory is
touched, precision in bfloat16, and pools that the torch ops read and write as well."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from common.engine.plan import Rows, Segment
from common.kv_cache.sequences.allocation import BlockTable
from common.ops.interface import Ops, StepSize
from common.ops.step.attention_metadata import AttentionMetadata
from common.ops.step.check import PoolSizes
from common.ops.torch.backend import TorchOps
from tests.engine.harness import Harness, Work, random_tokens, stock_logits, tolerance
from tests.support.models import FAMILIES, tiered
from tests.support.ops import make_ops

CPU = torch.device("cpu")
NUM_TOKENS = 270
BLOCK_SIZE = 8
CUTS: dict[str, tuple[int, ...]] = {
    "at_7": (7,),
    "at_64": (64,),
    "at_65": (65,),
    "at_200": (200,),
    "at_all_of_them": (7, 64, 65, 200),
    "everywhere": tuple(range(1, NUM_TOKENS)),
}
each_cut = pytest.mark.parametrize(
    "cuts",
    [
        pytest.param(cuts, id=name, marks=() if name in ("at_65", "at_all_of_them", "everywhere") else pytest.mark.full)
        for name, cuts in CUTS.items()
    ],
)
SCANS = ["conv1d", "conv1d gated", "mamba2", "gated_delta", "kimi_delta", "mamba1"]
ONE_PER_STATE = ("granitemoehybrid", "jamba", "qwen3_5", "kimi_linear")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture
def ops() -> Ops:
    return make_ops("cpp")


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Scan:
    """An op on the rows of one sequence: ``run`` takes the rows' slice, the metadata and the pool of one layer."""

    pool_shape: tuple[int, ...]
    pool_dtype: torch.dtype
    run: Callable[[slice, AttentionMetadata, Tensor], Tensor]

    def cut(self, cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Outputs, and the pool after the sequence went through in pieces: from the state in slot 1; the state after
        130 tokens is in slot 3, the last one in slot 2."""
        pool = rand(4, *self.pool_shape, seed=99).to(self.pool_dtype)
        outputs = []
        for begin, end in itertools.pairwise((0, *cuts, NUM_TOKENS)):
            saves = {130 - begin: 3} if begin < 130 <= end else {}
            source = 2 if begin else 1
            segment = Segment("r", [0] * (end - begin), begin, (), source, 2, tuple(saves), tuple(saves.values()))
            metadata = AttentionMetadata([segment], block_size=BLOCK_SIZE, device=CPU, sizes=PoolSizes(0, 4))
            outputs.append(self.run(slice(begin, end), metadata, pool))
        return torch.cat(outputs), pool


def make_scan(name: str, ops: Ops, dtype: torch.dtype, *, odd: bool) -> Scan:
    """``odd``: sizes that are no whole vectors."""
    n = NUM_TOKENS
    if name.startswith("conv1d"):
        channels = 150 if odd else 192
        x, w, b = (
            rand(n, channels, seed=1).to(dtype),
            rand(channels, 4, seed=2).to(dtype),
            rand(channels, seed=3).to(dtype),
        )
        if name == "conv1d":
            return Scan((channels, 3), dtype, lambda s, i, p: ops.conv1d(x[s], w, b, i, p, silu=True))
        gates = rand(n, 2 * channels, seed=4).to(dtype).chunk(2, dim=1)
        return Scan(
            (channels, 3), dtype, lambda s, i, p: ops.conv1d(x[s], w, b, i, p, gates=(gates[0][s], gates[1][s]))
        )
    if name == "mamba2":
        dim, size = (13, 21) if odd else (32, 64)
        x, dt = rand(n, 4, dim, seed=1).to(dtype), rand(n, 4, seed=2).to(dtype)
        a, b, c = -rand(4, seed=3).exp(), rand(n, 2, size, seed=4).to(dtype), rand(n, 2, size, seed=5).to(dtype)
        steps = StepSize(rand(4, seed=6), True, 0.0, float("inf"))
        return Scan(
            (4, dim, size),
            torch.float32,
            lambda s, i, p: ops.mamba2(x[s], dt[s], a, b[s], c[s], a, i, p, step_size=steps),
        )
    if name in ("gated_delta", "kimi_delta"):
        key_dim, dim = (13, 21) if odd else (32, 64)
        q, k = rand(n, 2, key_dim, seed=1).to(dtype), rand(n, 2, key_dim, seed=2).to(dtype)
        v, beta = rand(n, 4, dim, seed=3).to(dtype), rand(n, 4, seed=4).sigmoid()
        decay = -rand(n, 4, *([key_dim] if name == "kimi_delta" else []), seed=5).exp() * 0.1
        rule = ops.kimi_delta if name == "kimi_delta" else ops.gated_delta
        return Scan(
            (4, key_dim, dim),
            torch.float32,
            lambda s, i, p: rule(q[s], k[s], v[s], decay[s], beta[s], i, p),
        )
    channels, size = (37, 5) if odd else (64, 16)
    x, dt = rand(n, channels, seed=1).to(dtype), rand(n, channels, seed=2).to(dtype)
    a, b, c = -rand(channels, size, seed=3).exp(), rand(n, size, seed=4).to(dtype), rand(n, size, seed=5).to(dtype)
    steps = StepSize(rand(channels, seed=6), True)
    return Scan(
        (channels, size),
        torch.float32,
        lambda s, i, p: ops.mamba1(x[s], dt[s], a, b[s], c[s], a[:, 0], i, p, step_size=steps),
    )


@DTYPES
@each_cut
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("name", SCANS)
def test_scan_when_the_prompt_is_cut_then_outputs_and_states_keep_every_bit(
    ops: Ops, name: str, odd: bool, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    scan = make_scan(name, ops, dtype, odd=odd)
    expected, pool = scan.cut(())
    found, found_pool = scan.cut(cuts)
    assert expected.isfinite().all()
    assert not torch.equal(pool[2], pool[3])
    assert torch.equal(found, expected)
    assert torch.equal(found_pool, pool)


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_scan_when_a_state_decays_below_normal_numbers_then_it_is_zero_and_torch_keeps_its_own_mode(
    ops: Ops, num_tokens: int
) -> None:
    """Such numbers are slow, and worth nothing beside what a token adds."""
    n, nothing = num_tokens, torch.zeros(num_tokens, 4, 32)
    segment = Segment("r", [0] * n, 8, (), 1, 2)
    metadata = AttentionMetadata([segment], block_size=BLOCK_SIZE, device=CPU, sizes=PoolSizes(0, 4))
    pools = [torch.full((4, 4, 32, 32), 1e-38) for _ in range(4)]
    a, tenth = torch.full((4,), -0.1), torch.full((n, 4), 0.9)
    ops.mamba2(nothing, torch.full((n, 4), 1.0), a, nothing, nothing, None, metadata, pools[0])
    ops.gated_delta(nothing, nothing, nothing, tenth.log(), tenth, metadata, pools[1])
    ops.kimi_delta(nothing, nothing, nothing, nothing - 0.1, tenth, metadata, pools[2])
    channels = pools[3].flatten(1, 2)
    ops.mamba1(
        nothing.flatten(1), torch.full((n, 128), 1.0), torch.full((128, 32), -0.1),
        torch.zeros(n, 32), torch.zeros(n, 32), None, metadata, channels,
    )  # fmt: skip
    assert [bool(pool[2].any()) for pool in pools] == [False] * 4
    assert (torch.tensor(1e-38) * torch.tensor(0.5)).item() > 0


@DTYPES
@pytest.mark.parametrize(("dim", "size"), [(16, 16), (48, 32), (64, 128), (32, 256), (64, 96)])
def test_mamba2_when_states_are_whole_vectors_then_cuts_keep_every_bit_and_torch_agrees(
    ops: Ops, dim: int, size: int, dtype: torch.dtype
) -> None:
    def scan(with_ops: Ops) -> Scan:
        n = NUM_TOKENS
        x, dt, a = rand(n, 2, dim, seed=1).to(dtype), rand(n, 2, seed=2), -rand(2, seed=3).exp()
        b, c = rand(n, 1, size, seed=4).to(dtype), rand(n, 1, size, seed=5).to(dtype)
        steps = StepSize(None, True)
        return Scan(
            (2, dim, size),
            torch.float32,
            lambda s, i, p: with_ops.mamba2(x[s], dt[s], a, b[s], c[s], a, i, p, step_size=steps),
        )

    expected, pool = scan(ops).cut(())
    for cuts in ((1, 2, 9, 16, 33), (7, 15, 100, 101), (8, 12, 130)):
        found, found_pool = scan(ops).cut(cuts)
        assert torch.equal(found, expected)
        assert torch.equal(found_pool, pool)
    reference, reference_pool = scan(make_ops("torch")).cut(())
    assert torch.allclose(pool[2], reference_pool[2], rtol=1e-4, atol=1e-4 * float(reference_pool[2].abs().max()))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    assert torch.allclose(expected, reference, rtol=tolerance, atol=tolerance * float(reference.abs().max()))


class _Widened(TorchOps):
    """Attention of the torch ops in float32, whatever comes in."""

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        widened = (x.float() for x in (query, key, value, k_pool, v_pool))
        return super().attention(*widened, metadata, scale)


@dataclass(frozen=True)
class Heads:
    """``latent``: the values are the first columns of the keys, as with MLA."""

    query: int
    kv: int
    size: int
    size_v: int
    latent: bool = False


HEADS = (Heads(6, 2, 16, 16), Heads(4, 4, 20, 12), Heads(5, 1, 64, 64), Heads(3, 1, 72, 48, latent=True))


def attend_in_pieces(ops: Ops, heads: Heads, dtype: torch.dtype, cuts: Sequence[int], window: int = 0) -> Tensor:
    """Outputs of a sequence that goes through in pieces; what is written nowhere is NaN, and so are blocks that no
    window reaches any more."""
    q = rand(NUM_TOKENS, heads.query, heads.size, seed=1).to(dtype)
    k = rand(NUM_TOKENS, heads.kv, heads.size, seed=2).to(dtype)
    v = k[..., : heads.size_v] if heads.latent else rand(NUM_TOKENS, heads.kv, heads.size_v, seed=3).to(dtype)
    table = (torch.randperm(40, generator=torch.Generator().manual_seed(4)) + 1).tolist()
    k_pool = torch.full((41, BLOCK_SIZE, heads.kv, heads.size), float("nan"), dtype=dtype)
    v_pool = k_pool[..., : heads.size_v] if heads.latent else torch.full_like(k_pool, float("nan"))[..., : heads.size_v]
    outputs = []
    for begin, end in itertools.pairwise((0, *cuts, NUM_TOKENS)):
        seen_from = max(0, begin - window + 1) if window else 0
        blocks = [0] * (seen_from // BLOCK_SIZE) + table[seen_from // BLOCK_SIZE :]
        segment = Segment("r", [0] * (end - begin), begin, [BlockTable(blocks)], 0, 0)
        sizes = PoolSizes(41, 0)
        metadata = AttentionMetadata([segment], block_size=BLOCK_SIZE, device=CPU, sizes=sizes, window=window)
        k_pool[0] = v_pool[0] = 0.0
        ops.write_kv(k[begin:end], v[begin:end], k_pool, v_pool, metadata)
        outputs.append(ops.attention(q[begin:end], k[begin:end], v[begin:end], k_pool, v_pool, metadata, 0.2))
    return torch.cat(outputs)


@DTYPES
@each_cut
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_when_the_prompt_is_cut_then_outputs_keep_every_bit(
    ops: Ops, heads: Heads, window: int, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    expected = attend_in_pieces(ops, heads, dtype, (), window)
    assert expected.isfinite().all()
    assert torch.equal(attend_in_pieces(ops, heads, dtype, cuts, window), expected)


@pytest.mark.parametrize("window", [0, 1, 50, 128, 1000])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_when_cut_or_windowed_then_equals_torch(ops: Ops, heads: Heads, window: int) -> None:
    expected = attend_in_pieces(make_ops("torch"), heads, torch.float32, (7, 200, 201), window)
    found = attend_in_pieces(ops, heads, torch.float32, (7, 200, 201), window)
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_when_two_threads_share_the_work_then_nothing_changes(ops: Ops, heads: Heads) -> None:
    expected = attend_in_pieces(ops, heads, torch.bfloat16, (269,))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = attend_in_pieces(ops, heads, torch.bfloat16, (269,))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_when_in_bfloat16_then_is_no_further_from_the_truth_than_torch(heads: Heads) -> None:
    """The truth: the same bfloat16 inputs in float32. Where keys and values differ in size torch's own attention keeps
    its weights in float32 and ours does not: there the bound is wider."""
    truth = attend_in_pieces(_Widened(), heads, torch.bfloat16, (7, 200))
    errors = {}
    for backend in ("torch", "cpp"):
        rows = attend_in_pieces(make_ops(backend), heads, torch.bfloat16, (7, 200))
        errors[backend] = float((rows.float() - truth).abs().mean())
    assert 0 < errors["cpp"] <= (1.1 if heads.size == heads.size_v else 1.5) * errors["torch"]


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("name", SCANS)
def test_scan_when_two_threads_share_the_work_then_nothing_changes(ops: Ops, name: str, odd: bool) -> None:
    scan = make_scan(name, ops, torch.float32, odd=odd)
    expected, pool = scan.cut(())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found, found_pool = scan.cut(())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)
    assert torch.equal(found_pool, pool)


@pytest.mark.parametrize("name", SCANS)
def test_scan_when_in_bfloat16_then_is_no_further_from_the_truth_than_torch(name: str) -> None:
    truth, _ = make_scan(name, make_ops("torch"), torch.float32, odd=False).cut(())
    errors = {}
    for backend in ("torch", "cpp"):
        rows, _ = make_scan(name, make_ops(backend), torch.bfloat16, odd=False).cut(())
        errors[backend] = float((rows.float() - truth).abs().mean())
    assert 0 < errors["cpp"] <= 1.1 * errors["torch"]


@pytest.mark.parametrize("value", [0.0, -1e-8, 1e-8, -20.0, 19.9, 20.1, -87.0, -200.0, 88.0, 1e6])
def test_step_size_when_extreme_then_equals_softplus(ops: Ops, value: float) -> None:
    """A state of one channel that begins at 0 becomes step size * x * b."""
    pool = torch.zeros(2, 1, 1)
    segment = Segment("r", [0], 0, (), 0, 1)
    metadata = AttentionMetadata([segment], block_size=BLOCK_SIZE, device=CPU, sizes=PoolSizes(0, 2))
    one = torch.ones(1, 1)
    ops.mamba1(one, torch.tensor([[value]]), -one, one, one, None, metadata, pool, step_size=StepSize(None, True))
    expected = torch.nn.functional.softplus(torch.tensor(value, dtype=torch.float64))
    assert float(pool[1, 0, 0]) == pytest.approx(float(expected), rel=1e-6, abs=1e-37)


def test_decay_when_of_any_size_then_equals_the_exponential(ops: Ops) -> None:
    """With beta 0 nothing is written: the state is what it was, times e to the decay."""
    decays = torch.cat([-torch.logspace(-9, 2, 500), torch.tensor([0.0, -1000.0, float("-inf")])])
    pool = torch.ones(2, len(decays), 1, 1)
    segment = Segment("r", [0], 0, (), 1, 1)
    metadata = AttentionMetadata([segment], block_size=BLOCK_SIZE, device=CPU, sizes=PoolSizes(0, 2))
    key = torch.ones(1, len(decays), 1)
    ops.gated_delta(key, key, key, decays[None], torch.zeros(1, len(decays)), metadata, pool)
    assert torch.allclose(pool[1, :, 0, 0].double(), decays.double().exp(), rtol=3e-7, atol=2e-38)


def _bad_calls(ops: Ops) -> dict[str, Callable[[AttentionMetadata], object]]:
    x = torch.zeros(3, 4, 8)
    flat = torch.zeros(3, 4)
    kv = torch.zeros(5, BLOCK_SIZE, 4, 8)
    return {
        "conv1d pool": lambda i: ops.conv1d(flat, torch.zeros(4, 4), None, i, torch.zeros(5, 4, 2)),
        "conv1d weight": lambda i: ops.conv1d(flat, torch.zeros(5, 4), None, i, torch.zeros(5, 4, 3)),
        "conv1d gates": lambda i: ops.conv1d(
            flat, torch.zeros(4, 4), None, i, torch.zeros(5, 4, 3), gates=(flat, flat[:2])
        ),
        "mamba2 pool": lambda i: ops.mamba2(x, flat, flat[0], x[:, :1], x[:, :1], None, i, torch.zeros(5, 4, 8, 9)),
        "mamba2 half": lambda i: ops.mamba2(
            x, flat, flat[0], x[:, :1], x[:, :1], None, i, torch.zeros(5, 4, 8, 8).half()
        ),
        "mamba2 skip": lambda i: ops.mamba2(x, flat, flat[0], x[:, :1], x[:, :1], x[0], i, torch.zeros(5, 4, 8, 8)),
        "delta beta": lambda i: ops.gated_delta(x, x, x, flat, flat[:, :2], i, torch.zeros(5, 4, 8, 8)),
        "kimi decay": lambda i: ops.kimi_delta(x, x, x, flat, flat, i, torch.zeros(5, 4, 8, 8)),
        "delta pool": lambda i: ops.gated_delta(x, x, x, flat, flat, i, torch.zeros(5, 4, 8, 7)),
        "mamba1 pool": lambda i: ops.mamba1(flat, flat, flat[:1].T, flat, flat, None, i, torch.zeros(5, 4, 3)),
        "write pool": lambda i: ops.write_kv(x, x, kv[..., :7], kv, i),
        "attention rows": lambda i: ops.attention(x[:2], x, x, kv, kv, i, 1.0),
        "attention heads": lambda i: ops.attention(x[:, :3], x, x, kv, kv, i, 1.0),
    }


@pytest.mark.parametrize("name", _bad_calls(None))  # type: ignore[arg-type]
def test_op_when_shapes_do_not_fit_then_raises_before_touching_memory(ops: Ops, name: str) -> None:
    segment = Segment("r", [0] * 3, 0, [BlockTable([1])], 0, 1)
    metadata = AttentionMetadata([segment], block_size=BLOCK_SIZE, device=CPU, sizes=PoolSizes(5, 5))
    with pytest.raises(RuntimeError, match=r"fit|needed"):
        _bad_calls(ops)[name](metadata)


@pytest.mark.parametrize("family", tiered(FAMILIES, ONE_PER_STATE))
@pytest.mark.parametrize(
    "order",
    [pytest.param(("torch", "cpp"), marks=pytest.mark.full), ("cpp", "torch")],
    ids=["torch_to_cpp", "cpp_to_torch"],
)
def test_state_when_written_by_one_backend_then_the_other_goes_on_from_its_bytes(
    family: str, order: tuple[str, str]
) -> None:
    """As between two nodes: the second one has a copy of the first one's blocks and slot, nothing else."""
    prompt, tail = random_tokens(150, 1), random_tokens(30, 2)
    first, second = Harness(family, order[0]), Harness(family, order[1])
    for harness in (first, second):
        harness.add("A", 1, 200)
    first.hidden(Work("A", prompt[:93], rows=Rows.NONE))
    first.hidden(Work("A", prompt[93:], rows=Rows.NONE))
    for there, here in zip(first.storage.block_arenas, second.storage.block_arenas, strict=True):
        here.copy_(there)
    second.storage.slot_arena.copy_(first.storage.slot_arena)
    second.sequences["A"].num_computed = len(prompt)
    second.sequences["A"].src_slot = second.sequences["A"].slot
    rows = [second.logits(Work("A", tail[:20]))[0]]
    rows += [second.logits(Work("A", [token]))[0] for token in tail[20:]]
    expected = stock_logits(family, prompt + tail)[len(prompt) :]
    assert float((torch.cat(rows) - expected).abs().max()) < tolerance(family)


@pytest.mark.parametrize("family", tiered(FAMILIES, ONE_PER_STATE))
def test_logits_when_the_prompt_is_cut_then_are_equal_within_float32_rounding(family: str) -> None:
    prompt = random_tokens(NUM_TOKENS, 3)
    found = []
    for cuts in ((), (7, 64, 65, 200)):
        harness = Harness(family, "cpp")
        harness.add("A", 1, 300)
        pieces = itertools.pairwise((0, *cuts, NUM_TOKENS))
        found.append(torch.cat([harness.logits(Work("A", prompt[a:b]))[0] for a, b in pieces]))
    assert float((found[0] - found[1]).abs().max()) < tolerance(family) / 2
