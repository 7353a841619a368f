"""What ``--kv-tier`` names: ``disk:/path?size=500GiB``, ``host:64GiB``, ``shared:/mnt/path?size=2TiB``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.config.values import format_size, parse_size

TIER_KINDS = ("host", "disk", "shared")
_WORD = re.compile(r"(?:host:(?P<host>[^?]+)|(?P<kind>disk|shared):(?P<path>/[^?]*)\?size=(?P<size>[^&]+))")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """``path``: the folder; empty for host memory."""

    kind: str
    path: str
    size_bytes: int

    def __str__(self) -> str:
        """The word that ``parse_tier`` reads back."""
        size = format_size(self.size_bytes)
        return f"{self.kind}:{self.path}?size={size}" if self.path else f"{self.kind}:{size}"


def parse_tier(word: str) -> TierSpec:
    """Raises ValueError, whose text follows "is"."""
    match = _WORD.fullmatch(word.strip())
    if match is None:
        raise ValueError("not a tier such as host:64GiB, disk:/path?size=500GiB or shared:/path?size=2TiB")
    try:
        size_bytes = parse_size(match["host"] or match["size"])
    except ValueError as exc:
        raise ValueError(f"not a tier: its size is {exc}") from None
    if size_bytes < 1:
        raise ValueError("not a tier: its size is below its minimum of 1")
    return TierSpec(match["kind"] or "host", match["path"] or "", size_bytes)
