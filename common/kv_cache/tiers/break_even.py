"""When reading a prefix back is sooner done than computing it, by measured rates."""

from __future__ import annotations

from dataclasses import dataclass

ASSUMED_READS = {
    "host": (0.0005, 1 / 50e9),
    "disk": (0.005, 1 / 3e9),
    "shared": (0.005, 1 / 3e9),
    "mooncake": (0.005, 1 / 1e9),
}
"""By kind of tier: seconds of a read, and of each byte, before one was measured, and in a replay. Slow ones are found
out by reading."""


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
