"""The forward that is running on this thread: what the replaced functions read instead of arguments.

Model code calls a few functions without telling them which request a row belongs to, so the step's attention metadata
and pools travel in a context variable. None is set outside :func:`set_forward_context`: then every replaced function
is the stock one, and other models in the same process are not disturbed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from common.models.adapter.pool_views import AttentionPool, PoolViews
from common.ops.interface import Ops
from common.ops.step.attention_metadata import AttentionMetadata
from common.ops.step.segment import SegmentLike


@dataclass(slots=True)
class ForwardContext:
    """One forward in progress.

    Attributes:
        group_metadata: one per attention group (at least one); they differ in block tables and window alone.
        layer_idx: the layer whose cache call came last, set by the cache object.
        latents: the latent rows of that layer, [num_tokens, 1, width], if it keeps any.
        num_scanned: channels of that layer which a scan has taken since (a layer may be scanned in several calls, each
            for some channels).
    """

    group_metadata: tuple[AttentionMetadata, ...]
    pools: PoolViews
    ops: Ops
    layer_idx: int = -1
    latents: Tensor | None = None
    num_scanned: int = 0

    @classmethod
    def of(
        cls, segments: Sequence[SegmentLike], pools: PoolViews, ops: Ops, *, block_size: int, device: torch.device
    ) -> ForwardContext:
        """That of a step that runs ``segments``, packed in this order.

        Raises:
            StepMemoryError: a segment names memory that the pools do not have.
        """
        group_metadata = [
            AttentionMetadata(
                segments, block_size=block_size, device=device, sizes=sizes, window=window, group_id=group_id
            )
            for group_id, (window, sizes) in enumerate(zip(pools.windows, pools.sizes, strict=True))
        ]
        return cls(tuple(group_metadata), pools, ops)

    @property
    def metadata(self) -> AttentionMetadata:
        """Rows, slots and positions; for block tables see :meth:`attention_metadata`."""
        return self.group_metadata[0]

    def attention_pool(self) -> AttentionPool:
        return self.pools.attention[self.layer_idx]

    def attention_metadata(self) -> AttentionMetadata:
        """That of the current layer's attention group."""
        return self.group_metadata[self.attention_pool().group_id]

    def state_pool(self, name: str) -> Tensor:
        return self.pools.state[self.layer_idx][name]


_FORWARD_CONTEXT: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)


def get_forward_context() -> ForwardContext | None:
    """The forward running in this context, or None."""
    return _FORWARD_CONTEXT.get()


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    """Make ``context`` the current one for the body; forwards do not nest."""
    assert _FORWARD_CONTEXT.get() is None, "a forward is already running in this context"
    token = _FORWARD_CONTEXT.set(context)
    try:
        yield
    finally:
        _FORWARD_CONTEXT.reset(token)
