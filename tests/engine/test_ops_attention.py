"""Attention over windows and over latents, against attention over whole sequences in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from common.engine.plan import Segment
from common.errors import StepMemoryError
from common.kv_cache.sequences.allocation import BlockTable
from common.ops.interface import Ops
from common.ops.step.attention_metadata import AttentionMetadata
from common.ops.step.check import PoolSizes
from tests.engine.test_ops import BLOCK_SIZE, CPU, assert_close, rand
from tests.support.models import tiered
from tests.support.ops import OPS_BACKENDS, make_ops

# (start, num_tokens): first chunks shorter and longer than a window, over a query tile; continuations; decode rows
SHAPES = [(0, 12), (0, 700), (0, 1), (19, 600), (45, 1), (130, 1), (131, 2), (8, 16), (300, 9)]
# Images, in some of them: begun in an earlier step, over a query tile, to the end, of the last token alone
IMAGES = {0: ((2, 12),), 1: ((3, 40), (490, 640)), 3: ((10, 30), (300, 570)), 5: ((90, 131),), 6: ((100, 132),), 8: ()}


@pytest.fixture(params=OPS_BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


@dataclass
class Case:
    """Sequences in blocks up to ``start``, the rest as packed rows; entries that no row may read are null."""

    query: Tensor
    key: Tensor
    value: Tensor
    expected: Tensor
    metadata: AttentionMetadata

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5


def make_case(
    k_pool: Tensor,
    v_pool: Tensor,
    num_heads: int,
    window: int,
    values: int | None,
    dtype: torch.dtype,
    images: Mapping[int, tuple[tuple[int, int], ...]] = MappingProxyType({}),
) -> Case:
    """``values``: None for values of their own, else values are that many columns of the keys. ``images``: by the place
    in ``SHAPES``, positions that see each other."""
    num_kv_heads, head_size = k_pool.shape[2:]
    free = (torch.randperm(k_pool.shape[0] - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    segments, parts = [], []
    for i, (start, count) in enumerate(SHAPES):
        total = start + count
        table = [free.pop() for _ in range(-(-total // BLOCK_SIZE))]
        query = rand(total, num_heads, head_size, seed=20 + i).to(dtype)
        key = rand(total, num_kv_heads, head_size, seed=40 + i).to(dtype)
        value = (
            rand(total, num_kv_heads, v_pool.shape[3], seed=60 + i).to(dtype) if values is None else key[..., :values]
        )
        for position in range(start):
            block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            k_pool[block, offset] = key[position]
            if values is None:
                v_pool[block, offset] = value[position]
        passed = max(0, start - window + 1) // BLOCK_SIZE if window else 0
        held = BlockTable([0] * passed + table[passed:], write_from=start)
        whole = images.get(i, ())
        segments.append(Segment("r", [0] * count, start, [held], 0, 0, whole=whole))
        parts.append((query[start:], key[start:], value[start:], attend(query, key, value, start, window, whole)))
    q, k, v, expected = (torch.cat(each) for each in zip(*parts, strict=True))
    sizes = PoolSizes(len(k_pool), 0)
    metadata = AttentionMetadata(segments, block_size=BLOCK_SIZE, device=CPU, sizes=sizes, window=window)
    return Case(q, k, v, expected, metadata)


def attend(
    query: Tensor, key: Tensor, value: Tensor, start: int, window: int, whole: tuple[tuple[int, int], ...] = ()
) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    keys, values = (x.double().repeat_interleave(repeat, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query[start:].double(), keys) * query.shape[-1] ** -0.5
    distance = torch.arange(start, len(key))[:, None] - torch.arange(len(key))
    later = distance < 0
    for begin, end in whole:
        later[max(0, begin - start) : max(0, end - start), begin:end] = False
    hidden = later | (distance >= (window or len(key)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def pools(num_kv_heads: int, head_size: int, head_size_v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Strided as the arena gives them; what nobody wrote is no number, but for the null block."""
    made = []
    for size in (head_size, head_size_v):
        pool = torch.full((400, 2, num_kv_heads, BLOCK_SIZE, size), float("nan"), dtype=dtype)[:, 1].transpose(1, 2)
        pool[0] = 0
        made.append(pool)
    return made[0], made[1]


@pytest.mark.parametrize("window", tiered((1, 7, 8, 21, 64, 1000), (1, 8, 21, 1000)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_when_it_has_a_window_then_sees_that_many_keys(ops: Ops, window: int, dtype: torch.dtype) -> None:
    k_pool, v_pool = pools(2, 16, 12, dtype)
    case = make_case(k_pool, v_pool, 4, window, None, dtype)
    ops.write_kv(case.key, case.value, k_pool, v_pool, case.metadata)
    found = ops.attention(case.query, case.key, case.value, k_pool, v_pool, case.metadata, case.scale)
    assert_close(found, case.expected, 2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("window", tiered((0, 7, 64, 1000), (0, 64)))
@pytest.mark.parametrize("dtype", tiered((torch.float32, torch.bfloat16), (torch.float32,)))
def test_attention_when_tokens_of_images_see_each_other_then_within_the_window_and_no_others(
    ops: Ops, window: int, dtype: torch.dtype
) -> None:
    k_pool, v_pool = pools(2, 16, 16, dtype)
    case = make_case(k_pool, v_pool, 4, window, None, dtype, IMAGES)
    plain = make_case(*pools(2, 16, 16, dtype), 4, window, None, dtype)
    assert not torch.allclose(case.expected, plain.expected, atol=1e-2)
    ops.write_kv(case.key, case.value, k_pool, v_pool, case.metadata)
    found = ops.attention(case.query, case.key, case.value, k_pool, v_pool, case.metadata, case.scale)
    assert_close(found, case.expected, 2e-6 if dtype == torch.float32 else 2e-2)


def test_step_when_it_ends_inside_what_sees_itself_then_refused_before_a_kernel_runs() -> None:
    segment = Segment("r", [0] * 4, 8, [BlockTable([1, 2, 3], write_from=8)], 0, 0, whole=((9, 13),))
    with pytest.raises(StepMemoryError, match="up to 13 see each other, the step ends at 12"):
        AttentionMetadata([segment], block_size=BLOCK_SIZE, device=CPU, sizes=PoolSizes(4, 0))


@pytest.mark.parametrize(("width", "rank"), [(32, 24), (576, 512)])
@pytest.mark.parametrize("dtype", tiered((torch.float32, torch.bfloat16), (torch.bfloat16,)))
def test_attention_when_values_are_columns_of_the_keys_then_equals_attention_over_both(
    ops: Ops, width: int, rank: int, dtype: torch.dtype
) -> None:
    k_pool, v_pool = pools(1, width, 0, dtype)
    case = make_case(k_pool, v_pool, 4, 0, rank, dtype)
    ops.write_kv(case.key, case.key[..., :0], k_pool, v_pool, case.metadata)
    found = ops.attention(case.query, case.key, case.value, k_pool, k_pool[..., :rank], case.metadata, case.scale)
    assert_close(found, case.expected, 2e-6 if dtype == torch.float32 else 2e-2)
