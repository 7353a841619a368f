"""What ``--kv-tier`` names: ``host:64GiB``, ``disk:/path?size=500GiB``, ``shared:/mnt/path?size=2TiB``,
``mooncake:host:50051?size=1TiB&lend=64GiB``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.config.values import format_size, parse_size

TIER_KINDS = ("host", "disk", "shared", "mooncake")
"""Fastest first."""
SHARED_KINDS = ("shared", "mooncake")
"""Of which other nodes read and write the same one."""
ADMIN_PORT = 9003
"""Of a Mooncake master's list of names, where no other is given."""
_WORD = re.compile(
    r"host:(?P<memory>[^?]+)|(?P<kind>disk|shared):(?P<path>/[^?]*)\?size=(?P<size>[^&]+)"
    r"|mooncake:(?P<master>[^/?]+:\d{1,5})\?size=(?P<pool>[^&]+)(?:&lend=(?P<lend>[^&]+))?(?:&admin=(?P<admin>\d{1,5}))?"
)


@dataclass(frozen=True, slots=True)
class TierSpec:
    """``path``: the folder; HOST:PORT of a Mooncake master; empty for host memory. ``lent_bytes``, ``admin_port``: of a
    Mooncake store: memory that this node gives to it, and where its master lists names."""

    kind: str
    path: str
    size_bytes: int
    lent_bytes: int = 0
    admin_port: int = ADMIN_PORT

    def __str__(self) -> str:
        """The word that ``parse_tier`` reads back."""
        size = format_size(self.size_bytes)
        if not self.path:
            return f"{self.kind}:{size}"
        more = f"&lend={format_size(self.lent_bytes)}&admin={self.admin_port}" if self.kind == "mooncake" else ""
        return f"{self.kind}:{self.path}?size={size}{more}"

    @property
    def is_folder(self) -> bool:
        return self.path.startswith("/")


def parse_tier(word: str) -> TierSpec:
    """Raises ValueError, whose text follows "is"."""
    match = _WORD.fullmatch(word.strip())
    if match is None:
        raise ValueError(
            "not a tier such as host:64GiB, disk:/path?size=500GiB, shared:/path?size=2TiB or "
            "mooncake:master:50051?size=1TiB&lend=64GiB"
        )
    try:
        size_bytes = parse_size(match["memory"] or match["size"] or match["pool"])
        lent_bytes = parse_size(match["lend"]) if match["lend"] else size_bytes
    except ValueError as exc:
        raise ValueError(f"not a tier: its size is {exc}") from None
    if size_bytes < 1:
        raise ValueError("not a tier: its size is below its minimum of 1")
    if match["master"]:
        return TierSpec("mooncake", match["master"], size_bytes, lent_bytes, int(match["admin"] or ADMIN_PORT))
    return TierSpec(match["kind"] or "host", match["path"] or "", size_bytes)
