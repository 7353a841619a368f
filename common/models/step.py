"""The step that is running on this thread: what the replaced functions read instead of arguments.

Model code calls a few functions without telling them which request a row belongs to, so the step's index and pools
travel out of band, in a context variable. No step is active outside :func:`run_step`: then every replaced function is
the stock one, and other models in the same process are not disturbed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.kv_cache.spec import ModelGeometry
from common.ops.index import StepIndex
from common.ops.interface import Ops
from common.ops.packed import SegmentLike


class LayerPools(Protocol):
    """Views of the pools by layer; ``common.kv_cache.storage.KVStorage`` has this shape."""

    def attention_layer(self, layer_idx: int) -> tuple[Tensor, Tensor]: ...
    def state_layer(self, layer_idx: int) -> dict[str, Tensor]: ...


@dataclass(frozen=True, slots=True)
class PoolViews:
    """All layers' views, looked up once per model instead of once per layer and step."""

    attention: dict[int, tuple[Tensor, Tensor]]
    state: dict[int, dict[str, Tensor]]

    @classmethod
    def of(cls, pools: LayerPools, geometry: ModelGeometry) -> PoolViews:
        return cls(
            attention={s.layer_idx: pools.attention_layer(s.layer_idx) for s in geometry.attention_layers},
            state={s.layer_idx: pools.state_layer(s.layer_idx) for s in geometry.state_layers},
        )


@dataclass(slots=True)
class ActiveStep:
    """One forward under way. ``layer_idx`` is the layer whose cache call came last, set by the cache object."""

    index: StepIndex
    pools: PoolViews
    ops: Ops
    layer_idx: int = -1

    @classmethod
    def of(
        cls, segments: Sequence[SegmentLike], pools: PoolViews, ops: Ops, *, block_size: int, device: torch.device
    ) -> ActiveStep:
        """The step that runs ``segments``, packed in this order."""
        return cls(StepIndex.build(segments, block_size=block_size, device=device), pools, ops)

    @property
    def positions(self) -> Tensor:
        """[num_tokens] position of each packed row in its sequence."""
        return self.index.positions

    def attention_pool(self) -> tuple[Tensor, Tensor]:
        return self.pools.attention[self.layer_idx]

    def state_pool(self, name: str) -> Tensor:
        return self.pools.state[self.layer_idx][name]


_ACTIVE_STEP: ContextVar[ActiveStep | None] = ContextVar("active_step", default=None)


def active_step() -> ActiveStep | None:
    """The step running in this context, or None."""
    return _ACTIVE_STEP.get()


@contextmanager
def run_step(step: ActiveStep) -> Iterator[ActiveStep]:
    """Make ``step`` the active one for the body; steps do not nest."""
    assert _ACTIVE_STEP.get() is None, "a step is already running in this context"
    token = _ACTIVE_STEP.set(step)
    try:
        yield step
    finally:
        _ACTIVE_STEP.reset(token)
