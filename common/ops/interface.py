"""The ops that the models need, and what every backend of them promises.

All take the packed rows of one step, the :class:`~common.ops.step.attention_metadata.AttentionMetadata` that says which
rows belong to which segment, and the pool views of one layer, which are read and written in place: the state before a
segment comes from its source slot (slot 0 is the zero state), the state after it goes to its destination slot, states
inside it to its save slots; K/V go to their blocks. Pools have one layout for every backend, so backends may follow
each other on one pool, or work on two nodes that read each other's.

States are float32, as is the arithmetic. An op keeps nothing between calls and runs on the caller's thread and torch's
own number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from common.ops.step.attention_metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepSize:
    """How a scan's raw ``dt`` becomes its step size: ``clamp(softplus(dt + bias), low, high)``.

    ``bias``: [heads] or [channels], or None; without ``softplus`` the sum itself is clamped.
    """

    bias: Tensor | None = None
    softplus: bool = False
    low: float = float("-inf")
    high: float = float("inf")


FINAL_STEP_SIZE = StepSize()
"""For a ``dt`` that is the step size already."""


ACTIVATIONS = ("sigmoid", "silu", "softplus")
"""The functions of :meth:`Ops.activation`, named as in torch."""


class Ops(ABC):
    """One backend. Stateless but for what it was built with."""

    name: str

    @abstractmethod
    def activation(self, name: str, x: Tensor) -> Tensor:
        """One of :data:`ACTIVATIONS` of every element, in x's shape and dtype.

        A result depends on its element alone, not on its place: torch's own functions take other instructions for the
        last elements of a tensor on a CPU, so that a row's gates would depend on how many rows are in the step.
        """

    @abstractmethod
    def conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        metadata: AttentionMetadata,
        pool: Tensor,
        *,
        silu: bool = False,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Causal depthwise convolution.

        Args:
            x: [num_tokens, channels]; weight: [channels, kernel]; bias: [channels].
            pool: [num_slots, channels, kernel - 1], the last inputs of each sequence.
            silu: apply x * sigmoid(x) to the result.
            gates: [num_tokens, channels] each, in x's dtype: x is multiplied by the first (that is what the pool
                keeps), the result by the second.

        Returns: [num_tokens, channels] in x's dtype.
        """

    @abstractmethod
    def mamba2(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        metadata: AttentionMetadata,
        pool: Tensor,
        *,
        step_size: StepSize = FINAL_STEP_SIZE,
    ) -> Tensor:
        """Mamba-2 scan.

        Args:
            x: [num_tokens, heads, head_dim]; dt: [num_tokens, heads].
            a: [heads] negative; b, c: [num_tokens, groups, state]; d: [heads] skip or None.
            pool: [num_slots, heads, head_dim, state] float32.

        Returns: [num_tokens, heads, head_dim] in x's dtype.
        """

    @abstractmethod
    def gated_delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        metadata: AttentionMetadata,
        pool: Tensor,
    ) -> Tensor:
        """Gated delta rule.

        Args:
            query, key: [num_tokens, key_heads, key_dim], not normalised; value: [num_tokens, value_heads, value_dim].
            decay: [num_tokens, value_heads] log decay <= 0; beta: [num_tokens, value_heads].
            pool: [num_slots, value_heads, key_dim, value_dim] float32.

        Returns: [num_tokens, value_heads, value_dim] in value's dtype.
        """

    @abstractmethod
    def kimi_delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        metadata: AttentionMetadata,
        pool: Tensor,
    ) -> Tensor:
        """Kimi delta rule: the gated delta rule with a decay of its own for every channel of the key.

        Args:
            query, key: [num_tokens, key_heads, key_dim], not normalised; value: [num_tokens, value_heads, value_dim].
            decay: [num_tokens, value_heads, key_dim] log decay <= 0; beta: [num_tokens, value_heads].
            pool: [num_slots, value_heads, key_dim, value_dim] float32.

        Returns: [num_tokens, value_heads, value_dim] in value's dtype.
        """

    @abstractmethod
    def mamba1(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        metadata: AttentionMetadata,
        pool: Tensor,
        *,
        step_size: StepSize = FINAL_STEP_SIZE,
    ) -> Tensor:
        """Mamba-1 selective scan.

        Args:
            x, dt: [num_tokens, channels]; a: [channels, state] negative; b, c: [num_tokens, state]; d: [channels] or
                None.
            pool: [num_slots, channels, state] float32.

        Returns: [num_tokens, channels] float32, not gated.
        """

    @abstractmethod
    def write_kv(self, key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, metadata: AttentionMetadata) -> None:
        """Write ``key`` [num_tokens, num_kv_heads, head_size], ``value`` [.., head_size_v] to their blocks; rows below
        their table's ``write_from`` are left out. Pools: [num_blocks, block_size, num_kv_heads, head_size(_v)]."""

    @abstractmethod
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
        """Causal attention of every packed row over its own sequence, within ``metadata.window`` where that is not 0.

        Values may be columns of the keys (MLA latents: one K/V head of some 576 columns, values the first 512 of them).

        Args:
            query: [num_tokens, num_heads, head_size]; key, value: [num_tokens, num_kv_heads, head_size(_v)] of this
                step, already written by :meth:`write_kv`.
            scale: factor on the scores.

        Returns: [num_tokens, num_heads, head_size_v] in the query's dtype.
        """
