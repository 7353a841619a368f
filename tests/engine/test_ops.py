"""The varlen ops against token-by-token recurrences in float64, on mixes of decode rows, spans, slots and saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.plan import Segment
from common.kv_cache.sequences.allocation import BlockTable
from common.ops.interface import Ops
from common.ops.step.attention_metadata import AttentionMetadata
from common.ops.step.check import PoolSizes
from tests.support.ops import OPS_BACKENDS, make_ops

CPU = torch.device("cpu")
NUM_SLOTS = 24
BLOCK_SIZE = 8

Step = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(state of one sequence, packed row) -> (output of the row, state after it)."""


@pytest.fixture(params=OPS_BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


@dataclass
class Mix:
    """Segments of one step as (num_tokens, src, dst, {offset: slot})."""

    segments: list[tuple[int, int, int, dict[int, int]]]

    @property
    def num_tokens(self) -> int:
        return sum(s[0] for s in self.segments)

    def metadata(self) -> AttentionMetadata:
        built = [
            Segment("r", [0] * n, 3, (), src, dst, tuple(saves), tuple(saves.values()))
            for n, src, dst, saves in self.segments
        ]
        return AttentionMetadata(built, block_size=BLOCK_SIZE, device=CPU, sizes=PoolSizes(0, NUM_SLOTS))


MIXES = {
    "one_span_from_nothing": Mix([(150, 0, 1, {})]),
    "decode_rows_only": Mix([(1, 1, 1, {}), (1, 2, 3, {}), (1, 0, 4, {1: 5})]),
    "span_saving_in_the_middle_and_at_its_end": Mix([(200, 1, 2, {1: 3, 70: 4, 71: 5, 200: 6})]),
    "spans_and_decode_rows": Mix(
        [
            (1, 1, 1, {}),
            (67, 2, 2, {64: 10}),
            (2, 0, 3, {1: 11, 2: 12}),
            (1, 4, 5, {1: 13}),
            (129, 6, 7, {5: 14, 128: 15}),
            (3, 8, 8, {}),
            (1, 0, 9, {}),
        ]
    ),
}
mixes = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slot_pool(*shape: int) -> Tensor:
    """A strided view as the arena gives it, with neighbours that must not change; slot 0 is zero."""
    wide = rand(NUM_SLOTS, 3, *shape, seed=17)
    wide[0] = 0
    return wide[:, 1]


def reference(mix: Mix, pool: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Outputs and the pool afterwards, one token at a time."""
    after = pool.clone()
    outputs, row = [], 0
    for num_tokens, src, dst, saves in mix.segments:
        state = pool[src].double()
        for offset in range(1, num_tokens + 1):
            output, state = step(state, row)
            outputs.append(output)
            row += 1
            if offset in saves:
                after[saves[offset]] = state.to(pool.dtype)
        after[dst] = state.to(pool.dtype)
    return torch.stack(outputs), after


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    scale = float(expected.abs().max()) + 1e-9
    assert float((found.double() - expected.double()).abs().max()) / scale < tolerance


@mixes
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("kernel", [2, 4])
def test_conv1d_when_mixed_then_equals_the_sliding_window(
    ops: Ops, mix: Mix, has_bias: bool, kernel: int, is_gated: bool
) -> None:
    x, weight = rand(mix.num_tokens, 6, seed=1), rand(6, kernel, seed=2)
    bias = rand(6, seed=3) if has_bias else None
    gates = (rand(mix.num_tokens, 6, seed=4), rand(mix.num_tokens, 6, seed=5))
    pool = slot_pool(6, kernel - 1)

    def step(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        given = x[row] * gates[0][row] if is_gated else x[row]
        window = torch.cat([state, given.double()[:, None]], 1)
        output = (window * weight).sum(1) + (0 if bias is None else bias)
        return output * gates[1][row] if is_gated else output, window[:, 1:]

    expected, after = reference(mix, pool, step)
    assert_close(ops.conv1d(x, weight, bias, mix.metadata(), pool, gates=gates if is_gated else None), expected)
    assert_close(pool, after, 1e-7)


@mixes
@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_when_mixed_then_equals_the_recurrence(ops: Ops, mix: Mix, groups: int) -> None:
    heads, head_dim, size = 4, 6, 5
    total = mix.num_tokens
    x, dt = rand(total, heads, head_dim, seed=1), F.softplus(rand(total, heads, seed=2))
    a, d = -rand(heads, seed=3).exp() * 0.1, rand(heads, seed=4)
    b, c = rand(total, groups, size, seed=5), rand(total, groups, size, seed=6)
    pool = slot_pool(heads, head_dim, size)

    def step(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        keys = b[row].double().repeat_interleave(heads // groups, 0)
        queries = c[row].double().repeat_interleave(heads // groups, 0)
        added = (dt[row, :, None] * x[row]).double()[..., None] * keys[:, None]
        state = state * (dt[row] * a).double().exp()[:, None, None] + added
        return (state @ queries[..., None])[..., 0] + x[row] * d[:, None], state

    expected, after = reference(mix, pool, step)
    assert_close(ops.mamba2(x, dt, a, b, c, d, mix.metadata(), pool), expected)
    assert_close(pool, after)


@mixes
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("per_channel", [False, True])
def test_delta_rule_when_mixed_then_equals_the_recurrence(
    ops: Ops, mix: Mix, key_heads: int, per_channel: bool
) -> None:
    heads, key_dim, value_dim = 4, 8, 6
    total = mix.num_tokens
    query, key = rand(total, key_heads, key_dim, seed=1), rand(total, key_heads, key_dim, seed=2)
    value, beta = rand(total, heads, value_dim, seed=3), rand(total, heads, seed=4).sigmoid()
    decay = -F.softplus(rand(total, heads, *([key_dim] if per_channel else []), seed=5)) * 0.1
    decay[5::9] *= 1000  # some rows forget everything
    pool = slot_pool(heads, key_dim, value_dim)

    def norm(x: Tensor) -> Tensor:
        x = x.double().repeat_interleave(heads // key_heads, 0)
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    def step(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        q, k = norm(query[row]) * key_dim**-0.5, norm(key[row])
        state = state * decay[row].double().exp().view(heads, -1, 1)
        delta = (value[row] - (k[:, None] @ state)[:, 0]) * beta[row, :, None]
        state = state + k[..., None] * delta[:, None]
        return (q[:, None] @ state)[:, 0], state

    expected, after = reference(mix, pool, step)
    rule = ops.kimi_delta if per_channel else ops.gated_delta
    assert_close(rule(query, key, value, decay, beta, mix.metadata(), pool), expected, 1e-4)
    assert_close(pool, after, 1e-4)


@mixes
def test_mamba1_when_mixed_then_equals_the_recurrence(ops: Ops, mix: Mix) -> None:
    channels, size = 7, 5
    total = mix.num_tokens
    x, dt = rand(total, channels, seed=1), F.softplus(rand(total, channels, seed=2))
    a, d = -rand(channels, size, seed=3).exp() * 0.1, rand(channels, seed=4)
    b, c = rand(total, size, seed=5), rand(total, size, seed=6)
    pool = slot_pool(channels, size)

    def step(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        decay = (dt[row, :, None] * a).double().exp()
        state = state * decay + (dt[row] * x[row]).double()[:, None] * b[row]
        return state @ c[row].double() + x[row] * d, state

    expected, after = reference(mix, pool, step)
    assert_close(ops.mamba1(x, dt, a, b, c, d, mix.metadata(), pool), expected)
    assert_close(pool, after)


def test_ops_when_steps_decay_to_nothing_then_stay_finite(ops: Ops) -> None:
    mix = Mix([(130, 1, 1, {}), (1, 2, 2, {})])
    x, b = rand(131, 4, 6, seed=1), rand(131, 1, 5, seed=2)
    dt = torch.full((131, 4), 50.0)  # exp(-50 * 20 * 64) is far below the smallest float32
    a = torch.full((4,), -20.0)
    found = ops.mamba2(x, dt, a, b, b, None, mix.metadata(), slot_pool(4, 6, 5))
    assert bool(found.isfinite().all())


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_attention_when_mixed_then_equals_attention_over_whole_sequences(
    ops: Ops, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    # (start, num_tokens): a first chunk, a continuation over more than one query tile, decode rows early and late
    shapes = [(0, 37), (19, 600), (0, 1), (45, 1), (130, 1), (8, 16)]
    free = (torch.randperm(199, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    segments, queries, keys, values = [], [], [], []
    k_pool = rand(200, 2, num_kv_heads, BLOCK_SIZE, 16, seed=9).to(dtype)[:, 0].transpose(1, 2)
    v_pool = rand(200, 2, num_kv_heads, BLOCK_SIZE, 12, seed=10).to(dtype)[:, 1].transpose(1, 2)
    for i, (start, count) in enumerate(shapes):
        total = start + count
        table = [free.pop() for _ in range(-(-total // BLOCK_SIZE))]
        queries.append(rand(total, num_heads, 16, seed=20 + i).to(dtype))
        keys.append(rand(total, num_kv_heads, 16, seed=40 + i).to(dtype))
        values.append(rand(total, num_kv_heads, 12, seed=60 + i).to(dtype))
        for position in range(start):
            k_pool[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = keys[i][position]
            v_pool[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = values[i][position]
        segments.append(Segment("r", [0] * count, start, [BlockTable(table, write_from=start)], 0, 0))
    metadata = AttentionMetadata(segments, block_size=BLOCK_SIZE, device=CPU, sizes=PoolSizes(200, 0))
    q, k, v = (torch.cat([x[s:] for x, (s, _) in zip(xs, shapes, strict=True)]) for xs in (queries, keys, values))
    ops.write_kv(k, v, k_pool, v_pool, metadata)
    found = ops.attention(q, k, v, k_pool, v_pool, metadata, 0.3)
    expected = []
    for (start, count), qs, ks, vs in zip(shapes, queries, keys, values, strict=True):
        repeat = num_heads // num_kv_heads
        ks, vs = ks.double().repeat_interleave(repeat, 1), vs.double().repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", qs[start:].double(), ks) * 0.3
        scores.masked_fill_(torch.ones(count, start + count, dtype=torch.bool).triu(start + 1), float("-inf"))
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs))
    assert_close(found, torch.cat(expected), 2e-6 if dtype == torch.float32 else 2e-2)


# (start, num_tokens, write_from) -> (block, offset) of each row that is written, with the table [2, 3]
WRITES = {
    (0, 12, 10): [[3, 2], [3, 3]],
    (0, 12, 12): [],
    (0, 12, 16): [],
    (3, 9, 11): [[3, 3]],
    (5, 2, 0): [[2, 5], [2, 6]],
    (11, 1, 11): [[3, 3]],
    (11, 1, 12): [],
}


@pytest.mark.parametrize(("place", "expected"), WRITES.items())
def test_write_kv_when_below_write_from_then_leaves_the_blocks_alone(
    ops: Ops, place: tuple[int, int, int], expected: list[list[int]]
) -> None:
    start, count, write_from = place
    k_pool, v_pool = torch.zeros(6, BLOCK_SIZE, 1, 2), torch.zeros(6, BLOCK_SIZE, 1, 2)
    segments = [
        Segment("r", [0] * count, start, [BlockTable([2, 3], write_from)], 0, 0),
        Segment("other", [0] * 2, 0, [BlockTable([4])], 0, 0),
        Segment("row", [0], 0, [BlockTable([5])], 0, 0),
    ]
    metadata = AttentionMetadata(segments, block_size=BLOCK_SIZE, device=CPU, sizes=PoolSizes(6, 0))
    key = torch.arange(1.0, count + 4)[:, None, None].expand(-1, 1, 2)
    ops.write_kv(key, key, k_pool, v_pool, metadata)
    assert k_pool[:4, :, 0, 0].nonzero().tolist() == expected
    if expected:
        assert [float(k_pool[b, o, 0, 0]) for b, o in expected] == list(range(count - len(expected) + 1, count + 1))
    assert [float(k_pool[b, o, 0, 0]) for b, o in ((4, 0), (4, 1), (5, 0))] == [count + 1, count + 2, count + 3]
    assert torch.equal(v_pool, k_pool)
