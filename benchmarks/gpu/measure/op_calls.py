"""Calls of one op on real sizes, and what they need at least.

Every call of a round works on inputs, slots and blocks of its own (``Work.copies`` of them), so that none finds its
data in the L2 cache; a state's source slot is its destination, as in decode steps. Counted bytes: inputs and outputs
once; states read and written; K and V of the context read. Counted operations, two for each product with its sum: of a
state with K x V elements a head, 4 K V a token (what the token adds, what the query takes out), with a delta rule 6 K V
(what the key recalls as well); of attention 2 (K + V) for each pair of query and key. That a chunked scan computes more
is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.measure.op_shapes import OpShape
from benchmarks.gpu.measure.timing import Call
from common.engine.plan import Segment
from common.kv_cache.sequences.allocation import BlockTable
from common.ops.cpu.norm import Gate
from common.ops.interface import Ops, StepSize
from common.ops.step.attention_metadata import AttentionMetadata
from common.ops.step.check import PoolSizes

BLOCK_SIZE = 16
DTYPE = torch.bfloat16
ITEM = DTYPE.itemsize


@dataclass(frozen=True)
class Work:
    """``batch`` sequences of ``num_tokens`` more tokens each, behind ``start``."""

    batch: int
    num_tokens: int
    start: int
    device: torch.device
    copies: int = 1

    def __str__(self) -> str:
        return f"decode {self.batch}" if self.start else f"prefill {self.batch}x{self.num_tokens}"

    @property
    def rows(self) -> int:
        return self.batch * self.num_tokens

    @property
    def blocks(self) -> int:
        """Of a sequence."""
        return -(-(self.start + self.num_tokens) // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        return 1 + self.copies * self.batch * self.blocks

    @property
    def num_slots(self) -> int:
        return 1 + self.copies * self.batch

    @property
    def pairs(self) -> float:
        """Of query and key."""
        return self.rows * (self.start + (self.num_tokens + 1) / 2)

    def rand(self, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype)

    def slots(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        pool = self.rand(self.num_slots, *shape, dtype=dtype) * 0.1
        pool[0] = 0.0
        return pool

    def states_bytes(self, num_elements: int, item: int = 4) -> float:
        """States read (a prompt's is the zero state) and written."""
        return float(self.batch * num_elements * item * (2 if self.start else 1))

    def metadata(self, copy: int) -> AttentionMetadata:
        segments = [
            Segment(
                str(i),
                [0] * self.num_tokens,
                self.start,
                (BlockTable(list(range(1 + i * self.blocks, 1 + (i + 1) * self.blocks))),),
                i + 1 if self.start else 0,
                i + 1,
            )
            for i in range(copy * self.batch, (copy + 1) * self.batch)
        ]
        sizes = PoolSizes(self.num_blocks, self.num_slots)
        return AttentionMetadata(segments, block_size=BLOCK_SIZE, device=self.device, sizes=sizes)


@dataclass(frozen=True)
class OpCalls:
    """``num_bytes``, ``flops``: of one call. ``shared``: makes what all copies share (pools, weights); ``inputs``: a
    copy's own tensors; ``run``: one call of a backend on them. Nothing is allocated before ``calls``."""

    work: Work
    num_bytes: float
    flops: float
    shared: Callable[[], tuple[Any, ...]]
    inputs: Callable[[], tuple[Tensor, ...]]
    run: Callable[..., object]
    needs: str = ""
    """Attribute of a backend without which it has no such op; torch's has plain functions instead."""

    def prepare(self) -> Callable[[Ops], list[Call] | None]:
        """The calls of a backend, one for each copy, on the same tensors for all backends."""
        shared = self.shared()
        copies = [(self.inputs(), self.work.metadata(copy)) for copy in range(self.work.copies)]

        def calls(ops: Ops) -> list[Call] | None:
            if self.needs and ops.name != "torch" and not hasattr(ops, self.needs):
                return None
            return [lambda x=inputs, m=metadata: self.run(ops, m, *shared, *x) for inputs, metadata in copies]

        return calls


def op_calls(shape: OpShape, work: Work) -> OpCalls:
    return _MAKERS[shape.op](work, *shape.sizes)


def _mamba2(work: Work, heads: int, dim: int, state: int, groups: int) -> OpCalls:
    n = work.rows

    def shared() -> tuple[Any, ...]:
        a, d = -torch.rand(heads, device=work.device) * 8 - 1, torch.ones(heads, device=work.device)
        steps = StepSize(torch.randn(heads, device=work.device) - 3, True, 0.0, float("inf"))
        return a, d, steps, work.slots(heads, dim, state)

    def run(ops: Ops, m: AttentionMetadata, a: Any, d: Any, steps: Any, pool: Any, *x: Any) -> object:
        return ops.mamba2(x[0], x[1], a, x[2], x[3], d, m, pool, step_size=steps)

    def inputs() -> tuple[Tensor, ...]:
        b, c = (work.rand(n, groups, state) for _ in range(2))
        return work.rand(n, heads, dim), work.rand(n, heads), b, c

    moved = ITEM * n * (2 * heads * dim + heads + 2 * groups * state) + work.states_bytes(heads * dim * state)
    return OpCalls(work, moved, 4.0 * n * heads * dim * state, shared, inputs, run)


def _mamba1(work: Work, channels: int, state: int) -> OpCalls:
    n = work.rows

    def shared() -> tuple[Any, ...]:
        a = -torch.rand(channels, state, device=work.device) * 8 - 1
        steps = StepSize(torch.randn(channels, device=work.device) - 3, True)
        return a, torch.ones(channels, device=work.device), steps, work.slots(channels, state)

    def run(ops: Ops, m: AttentionMetadata, a: Any, d: Any, steps: Any, pool: Any, *x: Any) -> object:
        return ops.mamba1(x[0], x[1], a, x[2], x[3], d, m, pool, step_size=steps)

    def inputs() -> tuple[Tensor, ...]:
        return work.rand(n, channels), work.rand(n, channels), work.rand(n, state), work.rand(n, state)

    moved = n * (channels * (2 * ITEM + 4) + ITEM * 2 * state) + work.states_bytes(channels * state)
    return OpCalls(work, moved, 4.0 * n * channels * state, shared, inputs, run)


def _delta(kind: str) -> Callable[..., OpCalls]:
    def make(work: Work, key_heads: int, heads: int, key_dim: int, dim: int) -> OpCalls:
        n, columns = work.rows, [key_dim] if kind == "kimi_delta" else []

        def inputs() -> tuple[Tensor, ...]:
            query, key = (work.rand(n, key_heads, key_dim) for _ in range(2))
            decay = -torch.rand(n, heads, *columns, device=work.device)
            return query, key, work.rand(n, heads, dim), decay, torch.rand(n, heads, device=work.device)

        def run(ops: Ops, m: AttentionMetadata, pool: Any, *x: Any) -> object:
            return getattr(ops, kind)(*x, m, pool)

        decays = 4 * n * heads * (2 if not columns else 1 + key_dim)
        moved = ITEM * n * 2 * (key_heads * key_dim + heads * dim) + decays
        moved += work.states_bytes(heads * key_dim * dim)
        flops = 6.0 * n * heads * key_dim * dim
        return OpCalls(work, moved, flops, lambda: (work.slots(heads, key_dim, dim),), inputs, run)

    return make


def _conv1d(work: Work, channels: int, width: int) -> OpCalls:
    def shared() -> tuple[Any, ...]:
        return work.rand(channels, width), work.rand(channels), work.slots(channels, width - 1, dtype=DTYPE)

    def run(ops: Ops, m: AttentionMetadata, weight: Any, bias: Any, pool: Any, x: Any) -> object:
        return ops.conv1d(x, weight, bias, m, pool, silu=True)

    moved = ITEM * work.rows * 2 * channels + work.states_bytes(channels * (width - 1), ITEM)
    return OpCalls(work, moved, 0.0, shared, lambda: (work.rand(work.rows, channels),), run)


def _kv(is_written: bool) -> Callable[..., OpCalls]:
    def make(work: Work, heads: int, kv_heads: int, key_dim: int, dim: int) -> OpCalls:
        n, is_latent = work.rows, key_dim != dim  # MLA: values are columns of the keys

        def shared() -> tuple[Any, ...]:
            k_pool = work.rand(work.num_blocks, BLOCK_SIZE, kv_heads, key_dim)
            return k_pool, k_pool[..., :dim] if is_latent else work.rand(work.num_blocks, BLOCK_SIZE, kv_heads, dim)

        def inputs() -> tuple[Tensor, ...]:
            key = work.rand(n, kv_heads, key_dim)
            return work.rand(n, heads, key_dim), key, key[..., :dim] if is_latent else work.rand(n, kv_heads, dim)

        def write(ops: Ops, m: AttentionMetadata, k_pool: Any, v_pool: Any, _: Any, key: Any, value: Any) -> object:
            return ops.write_kv(key, value, k_pool, v_pool, m)

        def attend(ops: Ops, m: AttentionMetadata, k_pool: Any, v_pool: Any, *x: Any) -> object:
            return ops.attention(*x, k_pool, v_pool, m, key_dim**-0.5)

        kept = kv_heads * (key_dim if is_latent else key_dim + dim)
        if is_written:
            return OpCalls(work, 2.0 * ITEM * n * kept, 0.0, shared, inputs, write)
        read = work.batch * (work.start + work.num_tokens) * kept
        moved = float(ITEM * (read + n * heads * (key_dim + dim)))
        return OpCalls(work, moved, 2.0 * work.pairs * heads * (key_dim + dim), shared, inputs, attend)

    return make


def _norm(work: Work, size: int, group: int, kind: int) -> OpCalls:
    """``size`` channels a row, ``kind``: of :class:`Gate`; of norms per head, 32 heads a token."""
    rows = work.rows * (32 if size == 128 else 1)
    gate = Gate(kind)

    def inputs() -> tuple[Tensor, ...]:
        return work.rand(rows, size), work.rand(rows, size)

    def run(ops: Any, _: AttentionMetadata, weight: Tensor, x: Tensor, gates: Tensor) -> Tensor:
        if ops.name == "torch":
            return _torch_norm(x, weight, gates, group, gate)
        result: Tensor = ops.norms.rms_norm(x, weight, gates if gate else None, epsilon=1e-5, group=group, kind=gate)
        return result

    moved = float(ITEM * rows * size * (3 if gate else 2))
    return OpCalls(work, moved, 0.0, lambda: (work.rand(size),), inputs, run, "norms")


def _torch_norm(x: Tensor, weight: Tensor, gates: Tensor, group: int, gate: Gate) -> Tensor:
    rows = x.float()
    if gate is Gate.SILU_BEFORE:
        rows = rows * F.silu(gates.float())
    groups = rows.view(rows.shape[0], -1, group)
    rows = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-5)).view_as(rows) * weight
    return (rows * F.silu(gates.float()) if gate is Gate.SILU_AFTER else rows).to(x.dtype)


def _silu_mul(work: Work, size: int) -> OpCalls:
    def inputs() -> tuple[Tensor, ...]:
        return work.rand(work.rows, size), work.rand(work.rows, size)

    def run(ops: Any, _: AttentionMetadata, gate: Tensor, up: Tensor) -> object:
        return F.silu(gate) * up if ops.name == "torch" else ops.elementwise.silu_mul(gate, up)

    return OpCalls(work, 3.0 * ITEM * work.rows * size, 0.0, tuple, inputs, run, "elementwise")


_MAKERS: Mapping[str, Callable[..., OpCalls]] = {
    "mamba2": _mamba2,
    "mamba1": _mamba1,
    "gated_delta": _delta("gated_delta"),
    "kimi_delta": _delta("kimi_delta"),
    "conv1d": _conv1d,
    "attention": _kv(is_written=False),
    "write_kv": _kv(is_written=True),
    "rms_norm": _norm,
    "gated_norm": _norm,
    "silu_mul": _silu_mul,
}
