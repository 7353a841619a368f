"""Who serves a request: one decode node, one prefill node per prompt or none, and hints where else its prefix may be.

Pure choice among usable nodes: no waiting, no I/O. What a try has shown to be broken is avoided by the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.config import ProxyConfig
from common.errors import NodeUnavailableError
from proxy.decode_leg import Job
from proxy.nodes import Node, NodePool, NodeRole
from proxy.placement import create_policy, pick


@dataclass(frozen=True, slots=True)
class Placement:
    """
    Attributes:
        decode: generates, and computes the prompts itself when ``prefill`` is empty.
        prefill: one node per prompt, or none at all.
        sources: ``tandem_sources`` hints for whoever computes the prompts.
    """

    decode: Node
    prefill: Sequence[Node] = ()
    sources: Sequence[Mapping[str, Any]] = ()

    @property
    def is_local(self) -> bool:
        return not self.prefill

    @property
    def prefill_names(self) -> str | None:
        """The prefill nodes' names for a trace; None when the placement is local."""
        return ",".join(dict.fromkeys(node.name for node in self.prefill)) or None


@dataclass(slots=True)
class Avoided:
    """Nodes that further tries of a request avoid."""

    decode: list[Node] = field(default_factory=list)
    prefill: list[Node] = field(default_factory=list)


class Placer:
    """Places requests over one node pool. Called from the event loop only."""

    def __init__(self, config: ProxyConfig, pool: NodePool) -> None:
        self._pool = pool
        self._prefill_policy = create_policy(config.policy)
        self._decode_policy = create_policy(config.decode_policy or config.policy)

    @property
    def name(self) -> str:
        """Of the policy that decides between local and remote, for metrics."""
        return self._prefill_policy.name

    def place(self, job: Job, avoided: Avoided, *, began: Sequence[Node] = ()) -> Placement:
        """Nodes for the next try of ``job``. ``began``: prefill nodes that already compute its prompts, kept if usable.

        Raises NodeUnavailableError when no decode node is left.
        """
        decode = self.place_decode(avoided)
        if decode is None:
            raise self.no_decode_node()
        if job.is_local:
            return Placement(decode)
        usable = self._pool.usable(NodeRole.PREFILL)
        if began and all(node in usable and node not in avoided.prefill for node in began):
            prefill = list(began)
        else:
            picked = [self.place_prefill(avoided) for _ in job.prompts]
            prefill = [node for node in picked if node is not None]
        if len(prefill) < len(job.prompts):
            return Placement(decode, (), self._sources(decode, with_decode=False))
        return Placement(decode, prefill, self._sources(decode))

    def place_prefill(self, avoided: Avoided) -> Node | None:
        """A prefill node for one prompt; None when none is left."""
        return pick(self._prefill_policy, self._pool.usable(NodeRole.PREFILL), tried=avoided.prefill)

    def place_decode(self, avoided: Avoided) -> Node | None:
        return pick(self._decode_policy, self._pool.usable(NodeRole.DECODE), tried=avoided.decode)

    def no_decode_node(self) -> NodeUnavailableError:
        return NodeUnavailableError("; ".join(self._pool.reasons()) or "no decode node is ready")

    def _sources(self, decode: Node, *, with_decode: bool = True) -> list[dict[str, Any]]:
        """Who may have part of the prompt: the node that is to generate, then one more of its kind."""
        if not decode.info.pull:
            return []
        others = [node for node in self._pool.usable(NodeRole.DECODE) if node is not decode]
        hints = [node.source_hint() for node in ([decode] if with_decode else []) + others[:1]]
        return [hint for hint in hints if hint is not None]
