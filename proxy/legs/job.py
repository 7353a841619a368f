"""One admitted request, as its legs carry it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.telemetry.tracing import NO_SPAN, RequestSpan
from proxy.legs.bodies import BodyEncoder
from proxy.placement.request import PlacementRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(PlacementRequest):
    """What placement needs of a request, and what else its legs are made of.

    Attributes:
        route: the path of the client's request, and of its legs.
        headers: what every node gets of the client's headers.
        arrival_s: on ``time.monotonic``'s clock.
        encoder: of the bodies of all legs.
    """

    route: str
    headers: Mapping[str, str]
    request_id: str
    arrival_s: float
    span: RequestSpan = NO_SPAN
    encoder: BodyEncoder = field(default_factory=BodyEncoder, repr=False, compare=False)

    @property
    def num_choices(self) -> int:
        """Of the answer: ``n`` for each prompt."""
        return len(self.prompts) * int(self.body.get("n") or 1)
