"""Paged attention and the writing of K/V, against the torch ops on the same blocks in float32. NaN is in all places
that no row may read: the null block, free blocks, what a sequence's blocks hold behind its last token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from common.engine.plan import Segment
from common.kv_cache.sequences.allocation import BlockTable
from common.ops.torch.backend import TorchOps
from tests.engine.triton.guards import Guards
from tests.engine.triton.support import (
    TOLERANCES,
    Steps,
    assert_close,
    dtypes,
    full_beside,
    make_steps,
    rand,
)
from tests.support.triton_interpreter import TRITON_DEVICE

from common.ops.step.device_step import DeviceStep  # isort: skip
from common.ops.triton.attention import paged_attention, split_columns  # isort: skip
from common.ops.triton.kv import write_kv  # isort: skip

Images = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """A segment: ``num_tokens`` from position ``start`` on. ``shared``: of them, these exist in the blocks already."""

    num_tokens: int
    start: int = 0
    shared: int = 0
    images: Images = ()


@dataclass(frozen=True)
class Heads:
    num: int = 4
    num_kv: int = 2
    size: int = 16
    size_v: int = 16
    is_latent: bool = False


MIXES = {
    "decode_rows": (Part(1, 44), Part(1), Part(1, 15), Part(1, 16), Part(1, 69)),
    "first_chunks": (Part(37), Part(2), Part(16), Part(70)),
    "continued_chunks": (Part(20, 30), Part(33, 16), Part(3, 1)),
    "chunks_and_decode_rows": (Part(1, 44), Part(37), Part(1), Part(20, 30, shared=5), Part(9, 0, shared=9)),
    "verify_spans": (Part(4, 44), Part(8, 61), Part(1, 20), Part(2, 3)),
}
mixes = pytest.mark.parametrize(
    "mix",
    full_beside(MIXES["chunks_and_decode_rows"], MIXES["verify_spans"], others=[*MIXES.values()][:3]),
    ids=("chunks_and_decode_rows", "verify_spans", "decode_rows", "first_chunks", "continued_chunks"),
)
WHOLE = (Part(1, 44), Part(37, images=((3, 12), (30, 37))), Part(40, 30, images=((25, 40), (50, 66))), Part(5, 60))


@dataclass(frozen=True)
class Case:
    """A step, its rows, and the blocks before it; all on a CPU."""

    steps: Steps
    heads: Heads
    query: Tensor
    key: Tensor
    value: Tensor
    k_pool: Tensor
    v_pool: Tensor

    def expected(self) -> Tensor:
        """The output, in float32."""
        k_pool, v_pool = (torch.nan_to_num(pool.float()) for pool in self.pools_after())
        query, key, value = (x[: self.steps.reference.num_tokens].float() for x in (self.query, self.key, self.value))
        return TorchOps().attention(query, key, value, k_pool, v_pool, self.steps.reference, self.scale)

    def pools_after(self) -> tuple[Tensor, Tensor]:
        """Of keys and values; with latents the values are columns of the keys."""
        k_pool, v_pool = self.k_pool.clone(), self.v_pool.clone()
        key, value = (x[: self.steps.reference.num_tokens] for x in (self.key, self.value))
        if self.heads.is_latent:
            v_pool = k_pool[..., : self.heads.size_v]
        TorchOps().write_kv(key, value[..., : self.written], k_pool, v_pool[..., : self.written], self.steps.reference)
        return k_pool, v_pool

    @property
    def written(self) -> int:
        """Columns of the values that are written."""
        return 0 if self.heads.is_latent else self.heads.size_v

    @property
    def scale(self) -> float:
        return self.heads.size**-0.5

    def run(self, guard: Guards, damage: Callable[[DeviceStep], DeviceStep] = lambda step: step) -> tuple[Tensor, ...]:
        """Output, and the pools after the step. ``damage``: what the kernels get in place of the step."""
        k_pool = guard(self.k_pool)
        v_pool = k_pool[..., : self.heads.size_v] if self.heads.is_latent else guard(self.v_pool)
        query, key = guard(self.query), guard(self.key)
        value = key[..., : self.heads.size_v] if self.heads.is_latent else guard(self.value)
        step = guard.step(damage(self.steps.step))
        write_kv(key, value[..., : self.written], k_pool, v_pool[..., : self.written], step)
        out = paged_attention(query, key, value, k_pool, v_pool, step, self.scale)
        return out.cpu(), k_pool.cpu(), v_pool.cpu()

    def check(self, found: tuple[Tensor, ...]) -> None:
        """Rows are within the dtype's tolerance, blocks are equal bit by bit."""
        num_tokens = self.steps.reference.num_tokens
        assert_close(found[0][:num_tokens], self.expected(), TOLERANCES[self.query.dtype])
        assert bool((found[0][num_tokens:] == 0).all()), "rows of padding are zero"
        for pool, expected in zip(found[1:], self.pools_after(), strict=True):
            same = (pool == expected) | (pool.isnan() & expected.isnan())
            assert bool(same.all()), f"places {(~same).flatten(2).any(2).nonzero().tolist()} differ"


def make_case(
    mix: tuple[Part, ...],
    dtype: torch.dtype,
    heads: Heads = Heads(),
    *,
    block_size: int = 16,
    window: int = 0,
    num_rows: int | None = None,
) -> Case:
    num_blocks = sum(-(-(part.start + part.num_tokens) // block_size) for part in mix) + 3
    free = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    # As the arena gives them: each block's K, then its V, then other layers'.
    k_pool, v_pool = (
        torch.full((num_blocks, 2, block_size, heads.num_kv, size), float("nan"), dtype=dtype)[:, 0]
        for size in (heads.size, heads.size_v)
    )
    segments: list[Segment] = []
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for i, part in enumerate(mix):
        end, exists = part.start + part.num_tokens, part.start + part.shared
        passed = max(0, part.start - window + 1) // block_size if window else 0
        table = [free.pop() for _ in range(-(-end // block_size))]
        key = rand(end, heads.num_kv, heads.size, seed=3 * i).to(dtype)
        value = rand(end, heads.num_kv, heads.size_v, seed=3 * i + 1).to(dtype)
        if heads.is_latent:
            value = key[..., : heads.size_v]
        for position in range(passed * block_size, exists):
            k_pool[table[position // block_size], position % block_size] = key[position]
            v_pool[table[position // block_size], position % block_size] = value[position]
        query = rand(part.num_tokens, heads.num, heads.size, seed=3 * i + 2).to(dtype)
        rows.append((query, key[part.start :], value[part.start :]))
        held = BlockTable([0] * passed + table[passed:], write_from=exists)
        segments.append(Segment("r", [0] * part.num_tokens, part.start, [held], 0, 0, whole=part.images))
    steps = make_steps(
        segments, num_slots=0, num_blocks=num_blocks, block_size=block_size, window=window, num_rows=num_rows
    )
    query, key, value = (torch.cat(each) for each in zip(*rows, strict=True))
    padding = [0, 0, 0, 0, 0, steps.num_rows - query.shape[0]]
    query, key, value = (torch.nn.functional.pad(x, padding, value=float("nan")) for x in (query, key, value))
    # Heads before rows, as models give them.
    query, key, value = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value))
    return Case(steps, heads, query, key, value, k_pool, v_pool)


@mixes
@dtypes
def test_attention_when_steps_are_mixed_then_equals_the_torch_ops(
    mix: tuple[Part, ...], dtype: torch.dtype, guard: Guards
) -> None:
    case = make_case(mix, dtype)
    case.check(case.run(guard))


@pytest.mark.parametrize("window", full_beside(16, others=(1, 7, 33, 1000)))
@dtypes
def test_attention_when_it_has_a_window_then_sees_that_many_keys(
    window: int, dtype: torch.dtype, guard: Guards
) -> None:
    case = make_case((*MIXES["chunks_and_decode_rows"], Part(1, 100), Part(4, 90)), dtype, window=window)
    case.check(case.run(guard))


@pytest.mark.parametrize(
    "heads",
    full_beside(Heads(7, 1, 20, 12), others=(Heads(6, 3, 96, 80), Heads(2, 2), Heads(14, 2, 32, 48), Heads(40, 1))),
    ids=lambda heads: f"{heads.num}_over_{heads.num_kv}_of_{heads.size}_and_{heads.size_v}",
)
@dtypes
def test_attention_when_query_heads_share_keys_then_equals_the_torch_ops(
    heads: Heads, dtype: torch.dtype, guard: Guards
) -> None:
    case = make_case(MIXES["chunks_and_decode_rows"], dtype, heads)
    case.check(case.run(guard))


@pytest.mark.parametrize(
    "heads", full_beside(Heads(4, 1, 40, 32, True), others=(Heads(20, 1, 144, 128, True),)), ids=("32", "128")
)
@pytest.mark.parametrize("mix", full_beside("chunks_and_decode_rows", others=("decode_rows", "verify_spans")))
@dtypes
def test_attention_when_values_are_columns_of_keys_then_equals_the_torch_ops(
    heads: Heads, mix: str, dtype: torch.dtype, guard: Guards
) -> None:
    case = make_case(MIXES[mix], dtype, heads)
    case.check(case.run(guard))


@pytest.mark.full
def test_attention_when_latents_are_as_wide_as_models_have_them_then_equals_the_torch_ops(guard: Guards) -> None:
    case = make_case((Part(1, 35), Part(3, 30)), torch.bfloat16, Heads(16, 1, 576, 512, True))
    case.check(case.run(guard))


@pytest.mark.full
@pytest.mark.parametrize("window", [0, 7, 40])
@dtypes
def test_attention_when_tokens_of_images_see_each_other_then_equals_the_torch_ops(
    window: int, dtype: torch.dtype, guard: Guards
) -> None:
    case = make_case(WHOLE, dtype, window=window)
    found = case.run(guard)
    case.check(found)
    with pytest.raises(AssertionError, match="errors"):
        case.check(case.run(guard, lambda step: dataclasses.replace(step, seen=None)))


@pytest.mark.full
@pytest.mark.parametrize("block_size", [1, 4, 24, 64, 1024])
def test_attention_when_blocks_are_of_any_size_then_equals_the_torch_ops(block_size: int, guard: Guards) -> None:
    for window in (0, 9):
        case = make_case(MIXES["chunks_and_decode_rows"], torch.bfloat16, block_size=block_size, window=window)
        case.check(case.run(guard))


@pytest.mark.parametrize(
    "mix", full_beside(MIXES["decode_rows"][:3], others=(MIXES["decode_rows"][:1],)), ids=("three", "one")
)
@dtypes
def test_decode_rows_when_padded_then_nothing_is_written_for_padding(
    mix: tuple[Part, ...], dtype: torch.dtype, guard: Guards
) -> None:
    case = make_case(mix, dtype, num_rows=8)
    case.check(case.run(guard))


def test_blocks_when_heads_come_before_tokens_then_equals_the_torch_ops(guard: Guards) -> None:
    case = make_case(MIXES["chunks_and_decode_rows"], torch.float32)
    k_pool, v_pool = (pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in (case.k_pool, case.v_pool))
    case = dataclasses.replace(case, k_pool=k_pool, v_pool=v_pool)
    case.check(case.run(guard))


def test_blocks_when_they_lie_beyond_what_32_bits_reach_then_equals_the_torch_ops() -> None:
    """Addresses are reserved, and memory is for the pages that are touched."""
    case = make_case((Part(1, 20), Part(20, 10)), torch.bfloat16)
    stride = 1 << 29  # elements: the last of 7 blocks begins behind 3 * 2**30
    far = []
    for pool in (case.k_pool, case.v_pool):
        memory = torch.empty(6 * stride + pool[0].numel(), dtype=pool.dtype, device=TRITON_DEVICE)
        far.append(memory.as_strided(pool.shape, (stride, *pool[0].contiguous().stride())).copy_(pool))
    assert len(case.k_pool) == 7
    assert int(case.steps.step.block_ids.max()) * stride >= 1 << 31
    query, key, value = (x.to(TRITON_DEVICE) for x in (case.query, case.key, case.value))
    write_kv(key, value, far[0], far[1], case.steps.step)
    out = paged_attention(query, key, value, far[0], far[1], case.steps.step, case.scale)
    case.check((out.cpu(), far[0].cpu().contiguous(), far[1].cpu().contiguous()))


def _wrong_table(step: DeviceStep) -> DeviceStep:
    block_ids = step.block_ids.clone()
    block_ids[2] = block_ids[4]  # the last one of the first segment: within its window
    return dataclasses.replace(step, block_ids=block_ids)


def _longer(by: int) -> Callable[[DeviceStep], DeviceStep]:
    return lambda step: dataclasses.replace(step, decode_len=step.decode_len + by)


def _spans_moved(by: int) -> Callable[[DeviceStep], DeviceStep]:
    def damaged(step: DeviceStep) -> DeviceStep:
        spans = tuple(dataclasses.replace(span, start=span.start + by) for span in step.span_rows)
        return dataclasses.replace(step, span_rows=spans)

    return damaged


def _key_shifted(step: DeviceStep) -> DeviceStep:
    return dataclasses.replace(step, write_place=step.write_place.roll(1))


@pytest.mark.parametrize(
    ("mix", "damage"),
    [
        ("decode_rows", _longer(1)),
        ("continued_chunks", _wrong_table),
        ("continued_chunks", _spans_moved(-1)),
        ("continued_chunks", _key_shifted),
        pytest.param("decode_rows", _wrong_table, marks=pytest.mark.full),
        pytest.param("decode_rows", _longer(-1), marks=pytest.mark.full),
        pytest.param("decode_rows", _key_shifted, marks=pytest.mark.full),
        pytest.param("continued_chunks", _spans_moved(1), marks=pytest.mark.full),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
@pytest.mark.parametrize("window", full_beside(12, others=(0,)))
def test_comparison_when_a_table_a_place_or_a_length_is_off_by_one_then_fails(
    mix: str, damage: Callable[[DeviceStep], DeviceStep], window: int, guard: Guards
) -> None:
    # In the last blocks is room behind the last token: a length too long reads a stale place, not beside the table.
    case = make_case(MIXES[mix], torch.bfloat16, window=window, block_size=16 if mix == "decode_rows" else 24)
    with pytest.raises(AssertionError):
        case.check(case.run(guard, damage))


def test_columns_when_split_then_hold_all_with_few_beyond() -> None:
    for size in range(1, 600):
        first, rest = split_columns(size)
        assert size <= first + rest < max(17, 2 * size)
        assert all(part & (part - 1) == 0 for part in (first, rest))
    assert (split_columns(576), split_columns(128), split_columns(80)) == ((512, 64), (128, 0), (64, 32))
