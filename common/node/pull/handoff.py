"""What a decode leg brings along, and what became of it: the words between serving and intake."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.node.pull.pull_task import RemotePrefix
from common.wire.handoff import Rendezvous
from common.wire.manifest import Manifest, PrefillReport

Handover = Manifest | Rendezvous
"""A finished prompt's manifest (carried by any proxy), or the name under which a peer computes it right now."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A handover that was looked at.

    ``prefix``: to be pulled; None: nothing is. ``is_lost``: because it cannot be had, not because all of it is here.
    ``known_report``: what is known of the prefill leg without pulling.
    """

    prefix: RemotePrefix | None = None
    is_lost: bool = False
    known_report: PrefillReport | None = None

    @property
    def report(self) -> PrefillReport | None:
        """What the prefill leg did, as far as it was ever heard."""
        final = self.prefix.offers.final if self.prefix is not None else None
        return self.known_report if final is None else final.report

    @property
    def ready_s(self) -> float | None:
        """When the whole prompt was known to be computed by its prefill leg, on ``time.monotonic``; None: it was not,
        or not there."""
        final = self.prefix.offers.final if self.prefix is not None else None
        return None if final is None else final.known_s

    @property
    def is_remote(self) -> bool:
        """Whether a prefill leg finished this prompt, or would have had nothing to do."""
        return self.known_report is not None or (self.prefix is not None and self.prefix.offers.final is not None)


class Intake(Protocol):
    """How a node takes a computed prompt in."""

    def parse(self, params: Mapping[str, Any]) -> Handover: ...

    def take(
        self, handover: Handover, token_ids: Sequence[int], cache_salt: str | None
    ) -> contextlib.AbstractAsyncContextManager[Taken]: ...
