"""Ops on rows alone, without state: what a backend may have besides :class:`common.ops.interface.Ops`.

They are found by attribute: ``ops.norms`` and ``ops.elementwise``; a backend of a GPU has the further methods of
:class:`FusedNorms` and :class:`FusedElementwise`, and ``ops.rotary``. Every result is computed in float32 and rounded
once; a row's does not depend on the other rows.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


class Gate(enum.IntEnum):
    """What a gate does: multiplies the input before the norm or the result after it."""

    NONE = 0
    SILU_BEFORE = 1
    SILU_AFTER = 2
    SIGMOID_AFTER = 3


class Norms(Protocol):
    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        gate: Tensor | None,
        *,
        epsilon: float,
        offset: float = 0.0,
        group: int | None = None,
        kind: Gate = Gate.NONE,
    ) -> Tensor:
        """``x / sqrt(mean(x * x) + epsilon) * (weight + offset)``, gated.

        Args:
            x: [..., size]; gate: the same shape or None, then ``kind`` does not matter; weight: [size].
            group: channels that share a mean (None: all).

        Returns: [..., size] in x's dtype.
        """


class Elementwise(Protocol):
    def activation(self, name: str, x: Tensor) -> Tensor:
        """As :meth:`common.ops.interface.Ops.activation`."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, of one shape and dtype."""


MAX_TERMS = 3
"""Tensors that one call of :meth:`FusedNorms.weighted_sum` adds up."""


class FusedNorms(Norms, Protocol):
    def weighted_sum(self, terms: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
        """The sum of at most :data:`MAX_TERMS` tensors [..., size] of one shape and dtype, each times its factor."""

    def rms_norm_of_sum(
        self, terms: Sequence[Tensor], factors: Sequence[float], weight: Tensor, *, epsilon: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of :meth:`weighted_sum`, and the sum itself; the norm is that of the sum as it is rounded."""


class FusedElementwise(Elementwise, Protocol):
    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), of one shape and dtype."""

    def delta_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Gates of the gated delta rule: log decay ``-exp(a_log) * softplus(a + dt_bias)`` and ``sigmoid(b)``.

        a, b: [num_tokens, heads]; a_log, dt_bias: [heads] -> two of [num_tokens, heads] float32.
        """


class Rotary(Protocol):
    def rotate(
        self,
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor] | None = None,
        *,
        epsilon: float = 0.0,
        offset: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Rotary position embedding of the first columns of each head, the halves of which are a pair; the others stay.

        Args:
            query, key: [num_tokens, heads, head_size]; cos, sin: [num_tokens, columns that are rotated].
            norms: weights [head_size] of a root mean square norm of each head of query and key before the rotation.

        Returns: query and key in their shapes and dtypes, contiguous.
        """


@runtime_checkable
class FusedOps(Protocol):
    """A backend for which models are fused further than for a CPU."""

    norms: FusedNorms
    elementwise: FusedElementwise
    rotary: Rotary
