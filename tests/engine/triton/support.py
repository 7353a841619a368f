"""Steps, pools and comparisons for the tests of Triton's kernels.

The reference is ``TorchOps`` on a CPU, on the same numbers in float32. What a kernel must not read is NaN: slots that
no segment starts from, rows of padding, what lies between and beside tensors (``guards.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.plan import Segment
from common.kv_cache.sequences.allocation import BlockTable
from common.ops.step.attention_metadata import AttentionMetadata
from common.ops.step.check import PoolSizes
from common.ops.step.device_step import DeviceStep, StepBuffer
from tests.support.triton_interpreter import TRITON_DEVICE

NUM_SLOTS = 24
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Of the norm, by the dtype of a kernel's inputs."""


def full_beside(*values: Any, others: Sequence[Any]) -> list[Any]:
    """Parameters of a test; ``others`` only in the whole matrix."""
    return [*values, *(pytest.param(value, marks=pytest.mark.full) for value in others)]


dtypes = pytest.mark.parametrize(
    "dtype",
    full_beside(torch.float32, others=(torch.bfloat16, torch.float16)),
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Steps:
    """One step as the torch ops read it, on a CPU, and as kernels do; ``metadata`` is on the kernels' device and has
    ``step`` as its ``on_device``."""

    reference: AttentionMetadata
    metadata: AttentionMetadata
    num_rows: int
    """With the rows of padding."""

    @property
    def step(self) -> DeviceStep:
        return self.metadata.on_device


def make_steps(
    segments: Sequence[Segment],
    *,
    num_slots: int = NUM_SLOTS,
    num_blocks: int = 0,
    block_size: int = 8,
    window: int = 0,
    num_rows: int | None = None,
) -> Steps:
    """``num_blocks``: of the pool that the segments' tables name; ``num_rows``: pad to so many."""
    sizes = PoolSizes(num_blocks, num_slots)
    reference, metadata = (
        AttentionMetadata(segments, block_size=block_size, device=device, sizes=sizes, window=window)
        for device in (CPU, torch.device(TRITON_DEVICE))
    )
    tables = metadata.group_tables
    step = StepBuffer(metadata.device).write([tables], num_rows=num_rows)[0]
    step.block_ids = step.block_ids[: len(tables.block_ids)]
    metadata.on_device = step
    return Steps(reference, metadata, step.num_rows)


def segment(
    num_tokens: int,
    src: int = 0,
    dst: int = 0,
    saves: Sequence[tuple[int, int]] = (),
    *,
    start: int = 0,
    tables: Sequence[BlockTable] = (),
) -> Segment:
    """``saves``: (offset 1 .. num_tokens, slot)."""
    offsets, slots = tuple(offset for offset, _ in saves), tuple(slot for _, slot in saves)
    return Segment("r", [0] * num_tokens, start, tables, src, dst, offsets, slots)


@dataclass(frozen=True)
class Mix:
    """The segments of a step, and the number of rows that it is padded to."""

    segments: tuple[Segment, ...]
    num_rows: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.segments)

    def steps(self) -> Steps:
        return make_steps(self.segments, num_rows=self.num_rows)

    def rows(self, *shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[num_rows, *shape] on a CPU, normal; NaN in the rows of padding."""
        x = torch.full((self.num_rows or self.num_tokens, *shape), float("nan"))
        x[: self.num_tokens] = rand(self.num_tokens, *shape, seed=seed)
        return x.to(dtype)

    def slot_pool(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[NUM_SLOTS, *shape] on a CPU, a strided view as the arena gives it: zeros in slot 0, numbers in the slots
        that segments start from, NaN elsewhere."""
        read = sorted({s.src_slot for s in self.segments} - {0})
        wide = torch.full((NUM_SLOTS, 3, *shape), float("nan"), dtype=dtype)
        wide[read, 1] = rand(len(read), *shape, seed=17).to(dtype)
        wide[0] = 0
        return wide[:, 1]


_ROWS = (segment(1, 1, 1), segment(1, 2, 3), segment(1, 0, 4), segment(1, 5, 5, [(1, 6)]), segment(1, 7, 8, [(1, 9)]))

MIXES = {
    "decode_rows": Mix(_ROWS),
    "padded_decode_rows": Mix(_ROWS, num_rows=8),
    "row_with_two_saves": Mix((segment(1, 1, 1), segment(1, 2, 3, [(1, 10), (1, 11)]), segment(1, 0, 4))),
    "span_from_nothing": Mix((segment(37, 0, 1),)),
    "span_with_saves": Mix((segment(41, 1, 2, [(1, 3), (19, 4), (20, 5), (41, 6)]),)),
    "spans_and_decode_rows": Mix(
        (
            segment(1, 1, 1),
            segment(35, 2, 2, [(16, 10)]),
            segment(2, 0, 3, [(1, 11), (2, 12)]),
            segment(1, 4, 5, [(1, 13)]),
            segment(23, 6, 7, [(5, 14), (22, 15)]),
            segment(3, 8, 8),
            segment(1, 0, 9),
        )
    ),
    "verify_spans": Mix(
        (
            segment(4, 1, 1, [(1, 10), (2, 11), (3, 12), (4, 13)]),
            segment(8, 2, 3, [(i, 13 + i) for i in range(1, 9)]),
            segment(1, 4, 4),
            segment(2, 5, 6, [(1, 22), (2, 23)]),
        )
    ),
}
_QUICK_MIXES = ("padded_decode_rows", "row_with_two_saves", "spans_and_decode_rows", "verify_spans")
mixes = pytest.mark.parametrize(
    "mix",
    [pytest.param(mix, id=name, marks=() if name in _QUICK_MIXES else pytest.mark.full) for name, mix in MIXES.items()],
)


Damage = Callable[[Segment], Segment]
DAMAGES: dict[str, Damage] = {
    "save_one_token_late": lambda s: replace(s, save_offsets=tuple(o + 1 for o in s.save_offsets)),
    "save_to_another_slot": lambda s: replace(s, save_slots=tuple(o + 1 for o in s.save_slots)),
    "wrong_source": lambda s: replace(s, src_slot=6 if s.src_slot != 6 else 2),
    "stale_source": lambda s: replace(s, src_slot=23),
    "wrong_destination": lambda s: replace(s, dst_slot=20),
}
_IN_SHORT_TIER = ("save_one_token_late",)
damages = pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage, id=name, marks=() if name in _IN_SHORT_TIER else pytest.mark.full)
        for name, damage in DAMAGES.items()
    ],
)


def damaged(mix: Mix, damage: Damage, index: int = 1) -> Mix:
    """With one segment (a span with a save, in "spans_and_decode_rows") other than it should be: what a comparison must
    see."""
    segments = list(mix.segments)
    segments[index] = damage(segments[index])
    return replace(mix, segments=tuple(segments))


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Rows [n, ...]: each within ``tolerance`` of its norm, or of the rows' root mean square where that is larger."""
    found, expected = found.cpu().float().flatten(1), expected.float().flatten(1)
    assert found.shape == expected.shape
    norms = expected.norm(dim=1)
    norms = norms.clamp(min=float(norms.square().mean().sqrt()))
    errors = (found - expected).norm(dim=1) / norms.clamp(min=1e-30)
    assert bool((errors <= tolerance).all()), f"errors by row, of its norm: {errors.tolist()}"


def assert_same_pools(found: Tensor, expected: Tensor, before: Tensor, tolerance: float) -> None:
    """Pools [slots or blocks, ...]: where ``expected`` (what the torch ops left in a float32 copy of ``before``) has
    not changed, ``found`` has not changed by a bit; elsewhere it is within ``tolerance`` of the slot's norm."""
    found = found.cpu()
    for index in range(found.shape[0]):
        if torch.allclose(expected[index].float(), before[index].float(), 0.0, 0.0, equal_nan=True):
            assert torch.equal(_bits(found[index]), _bits(before[index])), f"{index} must not change"
            continue
        own, other = found[index].float(), expected[index].float()
        error = float((own - other).norm() / other.norm().clamp(min=1e-30))
        assert error <= tolerance, f"{index} is off by {error} of its norm"


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
