"""One admitted request, as its legs carry it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.telemetry.tracing import NO_SPAN, RequestSpan
from proxy.legs.bodies import BodyEncoder
from proxy.placement.request import PlacementRequest
from proxy.prefix_index.prompt_keys import KeySource


@dataclass(slots=True, kw_only=True)
class Job(PlacementRequest):
    """What placement needs of a request, and what else its legs are made of.

    Attributes:
        route: the path of its legs.
        headers: what every node gets of the client's headers.
        admitted_s: on ``time.monotonic``'s clock, as ``arrival_s``: when admission let it in; 0: at once.
        encoder: of the bodies of all legs.
        key_sources: instead of ``prompt_keys``, once the answer has begun.
    """

    route: str
    headers: Mapping[str, str]
    request_id: str
    arrival_s: float
    admitted_s: float = 0.0
    span: RequestSpan = NO_SPAN
    encoder: BodyEncoder = field(default_factory=BodyEncoder, repr=False, compare=False)
    key_sources: Sequence[KeySource | None] = ()

    @property
    def num_choices(self) -> int:
        """Of the answer, which has not begun: ``n`` for each prompt."""
        return len(self.prompts) * int(self.body.get("n") or 1)

    def begin_answer(self, *, may_go_on: bool) -> None:
        """The client has the first byte: no leg is made of this job again, except, if it ``may_go_on``, of what is left
        of its stream. Answers take long; the prompts, and what was made of them, are given up as far as that allows."""
        self.encoder = BodyEncoder()
        if not may_go_on:
            self.body, self.prompts = {}, ()
        elif self.prompt_keys:
            self.key_sources = [None if keys is None else keys.source for keys in self.prompt_keys]
        self.prompt_keys = ()
