"""What placement is asked about one request, and what it answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common.errors import InvalidRequestError
from common.wire.headers import PLACEMENT_HEADER, SESSION_HEADER
from common.wire.resume import RESUME_KEY
from proxy.nodes.node import Node, NodeRole
from proxy.placement.estimate import NO_TARGETS, Targets
from proxy.prefix_index.prompt_keys import PromptKeys

LEAST_LEFT_S = 0.001
"""Of a target that is over already: no target would mean something else."""
MAX_SESSION_ID_LENGTH = 256
"""Characters: a session's id is kept in memory (``proxy.placement.sessions``)."""


class PlacementHeader(enum.Enum):
    """What ``X-Tandem-Placement`` asks for, for tests and operators: local or remote prefill. Without a usable prefill
    node every request is placed locally."""

    AUTO = "auto"
    LOCAL = "local"
    REMOTE = "remote"

    @classmethod
    def from_header(cls, value: str | None) -> PlacementHeader:
        """Raises InvalidRequestError naming the header."""
        if value is None:
            return cls.AUTO
        try:
            return cls(value.strip().lower())
        except ValueError:
            allowed = ", ".join(each.value for each in cls)
            raise InvalidRequestError(
                f"header {PLACEMENT_HEADER} {value[:40]!r} is not one of {allowed}", param=PLACEMENT_HEADER
            ) from None


def session_from_header(value: str | None) -> str | None:
    """The session that ``X-Session-Id`` names. Raises InvalidRequestError naming the header when it is too long to be
    remembered."""
    if value is not None and len(value) > MAX_SESSION_ID_LENGTH:
        raise InvalidRequestError(
            f"header {SESSION_HEADER} has {len(value)} characters, at most {MAX_SESSION_ID_LENGTH} are allowed",
            param=SESSION_HEADER,
        )
    return value or None


@dataclass(slots=True, kw_only=True)
class PlacementRequest:
    """One request to be placed.

    Attributes:
        body: the client's, for prompts that are not tokenised here.
        prompts: one entry per prompt leg; None: the body's own prompt (a chat).
        is_local: the decode node has to compute the prompts itself.
        is_stream: the answer is a stream, whose first byte tells how good the estimate was.
        prompt_keys: one entry per prompt, None for those that the proxy could not tokenise; or empty.
        session_id: as ``X-Session-Id`` says.
        targets: what the request is to keep.
        arrival_s: on ``time.monotonic``'s clock: from when on its first token is waited for; None: from its placement.
        max_answer_tokens: of one answer; None: not said.
    """

    body: Mapping[str, Any]
    prompts: Sequence[Any]
    is_local: bool
    is_stream: bool
    prompt_keys: Sequence[PromptKeys | None] = ()
    session_id: str | None = None
    placement_header: PlacementHeader = PlacementHeader.AUTO
    targets: Targets = NO_TARGETS
    arrival_s: float | None = None
    max_answer_tokens: int | None = None

    def targets_left(self, now: float) -> Targets:
        """The targets, with what is left of the time to the first token; of a stream that goes on elsewhere, all of
        it: it is as urgent as it was at first."""
        if self.targets.ttft_s is None or self.arrival_s is None or RESUME_KEY in self.body:
            return self.targets
        return replace(self.targets, ttft_s=max(LEAST_LEFT_S, self.targets.ttft_s - (now - self.arrival_s)))


@dataclass(slots=True)
class Avoided:
    """Nodes that further tries of a request avoid."""

    decode: list[Node] = field(default_factory=list)
    prefill: list[Node] = field(default_factory=list)

    def add(self, node: Node) -> None:
        (self.prefill if node.role is NodeRole.PREFILL else self.decode).append(node)


@dataclass(frozen=True, slots=True)
class Placement:
    """
    Attributes:
        decode: generates, and computes the prompts itself when ``prefill`` is empty.
        prefill: one node per prompt, or none at all.
        sources: pull sources (``tandem_sources``) for whoever computes the prompts.
        ttft_s: the estimated time to the first token.
        crosses: a node takes the other role's work: ``decode`` computes a prompt that is new to it, or is a prefill
            node.
        late_s: how much later than its target the first token would come for what is placed before it; 0: it would
            come in time, or not even without the others.
    """

    decode: Node
    prefill: Sequence[Node] = ()
    sources: Sequence[Mapping[str, Any]] = ()
    ttft_s: float = 0.0
    crosses: bool = False
    late_s: float = 0.0

    @property
    def is_local(self) -> bool:
        return not self.prefill

    def computing(self, index: int) -> Node:
        """Who computes the prompt ``index``."""
        return self.prefill[index] if self.prefill else self.decode

    @property
    def prefill_names(self) -> str | None:
        """The prefill nodes' names for a trace; None when the placement is local."""
        return ",".join(dict.fromkeys(node.name for node in self.prefill)) or None
