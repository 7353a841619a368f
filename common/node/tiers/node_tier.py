"""One tier of a node: what it decides, where its objects are, how fast it is read, and when it is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from common.engine.rates import LinearCost
from common.kv_cache.eviction.base import Outlook
from common.kv_cache.tiers.break_even import ASSUMED_READS, BreakEven
from common.kv_cache.tiers.tier import Tier, TierSettings
from common.tiers.store import ObjectStore, Watch

MEASURED_FOR_S = 60.0
"""After so long without a read it is tried again: what was measured may be of a disk that was busy then."""
READ_REST_S = 30.0
"""For so long nothing is read from a tier that let a read wait until its deadline."""
WRITE_REST_S = 10.0
"""For so long nothing is written to a tier that refused a write."""


class Closable(Protocol):
    def close(self) -> object: ...


class NodeTier:
    """``settings.break_even`` follows what is measured. ``outlook``: what the eviction policy expects of a key.
    ``watch``: what others write there; None: nobody does. ``use``: of what it is in, closed with the tier. Owned by the
    engine thread; ``read_times`` (of bytes, in seconds) is the event loop's."""

    def __init__(
        self,
        settings: TierSettings,
        store: ObjectStore,
        outlook: Callable[[bytes], Outlook | None],
        watch: Watch | None = None,
        use: Closable | None = None,
    ) -> None:
        self.watch = watch
        self.use = use
        self.tier = Tier(settings, outlook, time.monotonic)
        self.store = store
        self.read_times = LinearCost()
        self._no_reads_until = 0.0

    @property
    def kind(self) -> str:
        return self.tier.settings.kind

    @property
    def may_write(self) -> bool:
        return not self.tier.is_hung and time.monotonic() >= self.tier.rests_until_s

    @property
    def may_read(self) -> bool:
        return time.monotonic() >= self._no_reads_until

    @property
    def rates(self) -> tuple[float, float]:
        """Seconds of a read, and of each byte."""
        line = self.read_times.line
        if line is not None and self.read_times.age_s < MEASURED_FOR_S:
            return line.fixed_s, line.unit_s
        return ASSUMED_READS[self.kind]

    def rest_from_reads(self) -> None:
        self._no_reads_until = time.monotonic() + READ_REST_S

    def rest_from_writes(self, seconds: float | None = None) -> None:
        """``seconds``: default WRITE_REST_S."""
        self.tier.rests_until_s = time.monotonic() + (WRITE_REST_S if seconds is None else seconds)

    def measure(self, s_per_token: float) -> None:
        """Brings the break-even up to date. ``s_per_token``: of computing a prompt here."""
        rates: BreakEven = self.tier.settings.break_even
        rates.fixed_s, rates.s_per_byte = self.rates
        if not self.may_read:
            rates.fixed_s = float("inf")
        rates.s_per_token = s_per_token
