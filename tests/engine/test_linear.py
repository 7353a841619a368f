"""Packed weights: the numbers of a linear layer, the same bits whatever else is in the call, what is replaced in a
model and what is left alone."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.cpu.linears import PackedExperts, PackedLinear, pack_linears
from common.ops.cpu.backend import CppOps
from common.ops.cpu.linear import LinearOps, PackedWeight, large_pages
from tests.engine.harness import Harness, Work, engine_model, random_tokens
from tests.support.models import tiered
from tests.support.ops import make_ops

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHAPES = pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (64, 32), (65, 33), (515, 100), (1024, 96), (3000, 7)]
)
NUM_ROWS = 40
PROT_NONE = 0


@pytest.fixture
def ops() -> LinearOps:
    backend = make_ops("cpp")
    assert isinstance(backend, CppOps)
    return backend.linears


def rand(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack(ops: LinearOps, weight: Tensor) -> PackedWeight:
    return ops.pack(weight, large_pages(ops.num_words(weight)))


@SHAPES
@DTYPES
def test_linear_when_compared_with_float64_then_is_no_further_than_torch(
    ops: LinearOps, dtype: torch.dtype, in_features: int, out_features: int
) -> None:
    weight, bias = rand(out_features, in_features, seed=1, dtype=dtype), rand(out_features, seed=2, dtype=dtype)
    x = rand(NUM_ROWS, in_features, seed=3, dtype=dtype)
    truth = F.linear(x.double(), weight.double(), bias.double())
    for found, theirs in (
        (ops.linear(x, pack(ops, weight), bias), F.linear(x, weight, bias)),
        (ops.linear(x, pack(ops, weight)) + bias, F.linear(x, weight) + bias),
    ):
        error, their_error = (float((rows.double() - truth).abs().mean()) for rows in (found, theirs))
        # float32: sums in another order are as good within a factor; bfloat16 is rounded once, like torch's
        allowed = 1.1 * their_error if dtype == torch.bfloat16 else 3 * their_error + 1e-7
        assert error <= allowed


@SHAPES
@DTYPES
def test_linear_when_rows_are_added_then_gives_each_row_the_same_bits(
    ops: LinearOps, dtype: torch.dtype, in_features: int, out_features: int
) -> None:
    weight = pack(ops, rand(out_features, in_features, seed=1, dtype=dtype))
    x = rand(NUM_ROWS, in_features, seed=3, dtype=dtype)
    alone = torch.cat([ops.linear(row[None], weight) for row in x])
    for count in range(1, NUM_ROWS + 1):
        assert torch.equal(ops.linear(x[-count:], weight), alone[-count:]), f"{count} rows"


@DTYPES
def test_linear_when_the_rows_are_those_of_a_prompt_then_each_has_the_bits_it_has_alone(
    ops: LinearOps, dtype: torch.dtype
) -> None:
    """More rows than pass a weight together."""
    weight, x = pack(ops, rand(100, 515, seed=1, dtype=dtype)), rand(419, 515, seed=3, dtype=dtype)
    alone = torch.cat([ops.linear(row[None], weight) for row in x])
    assert torch.equal(ops.linear(x, weight), alone)


@DTYPES
def test_linear_when_run_on_two_threads_then_gives_the_same_bits(ops: LinearOps, dtype: torch.dtype) -> None:
    weight = pack(ops, rand(300, 700, seed=1, dtype=dtype))
    x = rand(NUM_ROWS, 700, seed=3, dtype=dtype)
    expected, threads = ops.linear(x, weight), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(ops.linear(x, weight), expected)
    finally:
        torch.set_num_threads(threads)


@DTYPES
def test_linear_when_the_input_is_strided_or_has_more_dimensions_then_reads_the_right_rows(
    ops: LinearOps, dtype: torch.dtype
) -> None:
    weight = pack(ops, rand(48, 40, seed=1, dtype=dtype))
    x = rand(6, 80, seed=3, dtype=dtype)
    expected = ops.linear(x[:, 20:60].contiguous(), weight)
    assert torch.equal(ops.linear(x[:, 20:60], weight), expected)
    assert torch.equal(ops.linear(x[:, 20:60].T.contiguous().T, weight), expected)
    assert torch.equal(ops.linear(x[:, 20:60].reshape(2, 3, 40), weight), expected.view(2, 3, 48))
    assert ops.linear(x[:0, 20:60], weight).shape == (0, 48)


def test_linear_when_the_input_does_not_fit_then_says_so_before_memory_is_read(ops: LinearOps) -> None:
    weight = pack(ops, rand(48, 40, seed=1, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"\(3, 41\) rows, .* weight with 40 inputs"):
        ops.linear(torch.zeros(3, 41, dtype=torch.bfloat16), weight)
    with pytest.raises(RuntimeError, match="float32"):
        ops.linear(torch.zeros(3, 40), weight)
    with pytest.raises(IndexError, match=r"outside \[0, 48\)"):
        ops.rows(weight, torch.tensor([48]))
    with pytest.raises(RuntimeError, match="does not fit"):
        ops.pack(torch.zeros(48, 40), large_pages(10))


def guarded(num_words: int, *, at_the_end: bool) -> Tensor:
    """int32 [num_words] at one end of some pages between two that nobody may read."""
    page = mmap.PAGESIZE
    inside = -(-4 * num_words // page) * page
    memory = mmap.mmap(-1, inside + 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for address in (begin, begin + page + inside):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), PROT_NONE) == 0
    offset = page + (inside - 4 * num_words if at_the_end else 0)
    return torch.frombuffer(memory, dtype=torch.int32, count=num_words, offset=offset)


@pytest.mark.parametrize("at_the_end", [False, True])
@SHAPES
@DTYPES
def test_linear_when_around_the_weight_nobody_may_read_then_nobody_does(
    ops: LinearOps, dtype: torch.dtype, in_features: int, out_features: int, at_the_end: bool
) -> None:
    weight, x = rand(out_features, in_features, seed=1, dtype=dtype), rand(NUM_ROWS, in_features, seed=3, dtype=dtype)
    packed = ops.pack(weight, guarded(ops.num_words(weight), at_the_end=at_the_end))
    elsewhere = pack(ops, weight)
    for count in (1, 2, 6, 8, NUM_ROWS):
        assert torch.equal(ops.linear(x[:count], packed), ops.linear(x[:count], elsewhere))
    assert torch.equal(ops.rows(packed, torch.arange(out_features)), weight)


@SHAPES
@DTYPES
def test_rows_when_taken_from_a_packed_weight_then_are_the_weights(
    ops: LinearOps, dtype: torch.dtype, in_features: int, out_features: int
) -> None:
    weight = rand(out_features, in_features, seed=1, dtype=dtype)
    indices = torch.randint(out_features, (3, 5), generator=torch.Generator().manual_seed(2))
    assert torch.equal(ops.rows(pack(ops, weight), indices), weight[indices])


@DTYPES
def test_grouped_when_run_then_gives_the_bits_of_one_linear_per_group(ops: LinearOps, dtype: torch.dtype) -> None:
    weight = rand(5, 70, 33, seed=1, dtype=dtype)
    x = rand(NUM_ROWS, 33, seed=3, dtype=dtype)
    begin = [0, 3, 3, 30, 31, NUM_ROWS]
    found = ops.grouped(x, begin, pack(ops, weight))
    each = [ops.linear(x[a:b], pack(ops, w)) for (a, b), w in zip(itertools.pairwise(begin), weight, strict=True)]
    assert torch.equal(found, torch.cat(each))
    with pytest.raises(RuntimeError, match="4 groups for 5 matrices"):
        ops.grouped(x, begin[1:], pack(ops, weight))


class Tied(nn.Module):
    """A head tied to its embedding, a layer whose weight is read directly, one weight in two layers, a router."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = embedding.weight
        self.dt_proj = nn.Linear(24, 24)
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24, bias=False)
        self.second.weight = self.first.weight
        self.half = nn.Linear(24, 24).half()
        self.owner = nn.Linear(24, 24, bias=False)
        self.other = nn.Conv1d(24, 24, 1, bias=False)
        self.other.weight = self.owner.weight  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(self.second(self.first(self.dt_proj(x))))


class ScaledEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


@pytest.mark.parametrize("embedding_class", [nn.Embedding, ScaledEmbedding])
def test_pack_linears_when_weights_are_shared_then_packs_each_once_and_computes_the_same(
    ops: LinearOps, embedding_class: type[nn.Embedding]
) -> None:
    torch.manual_seed(0)
    model = Tied(embedding_class(50, 24)).requires_grad_(False)
    ids = torch.arange(50)[None]
    expected = model(ids)
    pack_linears(model, ops)
    torch.testing.assert_close(model(ids), expected)
    packed = {name for name, module in model.named_children() if isinstance(module, PackedLinear)}
    assert packed == {"head", "first", "second"}
    assert isinstance(model.embedding, embedding_class)
    assert model.first._packed is model.second._packed
    left = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    assert left == {"dt_proj.weight", "half.weight", "owner.weight"}
    assert model.head.weight.shape == (50, 24)
    assert model.head.weight.isnan().all(), "a weight that is gone must not look like one"


# Not those whose routers or decays go through torch ops that treat the last rows of a tensor in their own way.
@pytest.mark.parametrize(
    "family", tiered(("granitemoehybrid", "bamba", "lfm2", "llama", "qwen3"), ("granitemoehybrid", "lfm2"))
)
@pytest.mark.parametrize("dtype", tiered(("float32", "bfloat16"), ("bfloat16",)))
def test_decode_row_when_batched_with_others_then_has_the_bits_it_has_alone(family: str, dtype: str) -> None:
    prompts = {"A": random_tokens(20, 1), "B": random_tokens(33, 2), "C": random_tokens(9, 3)}

    def run(names: Sequence[str]) -> Tensor:
        harness = Harness(family, "cpp", dtype=dtype)
        for slot, name in enumerate(names):
            harness.add(name, slot + 1, 64)
        harness.logits(*(Work(name, prompts[name]) for name in names))
        return torch.stack([harness.logits(*(Work(name, [7 + i]) for name in names))[0][0] for i in range(4)])

    assert torch.equal(run(["A"]), run(["A", "B", "C"]))


def test_packed_experts_when_run_then_equal_the_stock_ones(ops: LinearOps) -> None:
    ours, stock = (engine_model("qwen3_next", ops=backend).model.model.layers[0].mlp for backend in ("cpp", "torch"))
    assert isinstance(ours.experts, PackedExperts)
    x = rand(1, 37, 64, seed=1, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), stock(x), rtol=1e-5, atol=1e-5)


def test_load_model_when_ops_are_torch_then_leaves_the_layers_alone() -> None:
    kinds = {type(module) for module in engine_model("granitemoehybrid", ops="torch").model.modules()}
    assert nn.Linear in kinds
    assert PackedLinear not in kinds
