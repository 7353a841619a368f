"""When reading a prefix back is sooner done than computing it, by measured rates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BreakEven:
    """
    Attributes:
        fixed_s: of one read, however small.
        s_per_byte: of reading and checking.
        s_per_token: of computing a prompt.
    """

    fixed_s: float
    s_per_byte: float
    s_per_token: float

    def saved_s(self, num_tokens: int, num_bytes: int) -> float:
        """Seconds that reading ``num_bytes`` saves instead of computing ``num_tokens``; below 0: it does not pay."""
        return num_tokens * self.s_per_token - self.fixed_s - num_bytes * self.s_per_byte
