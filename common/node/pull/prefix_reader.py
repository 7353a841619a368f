"""What pulls have in common, wherever the bytes are: at a peer, or in a tier of this node.

A reader begins the pulls of one kind of prefix. Each pull has one outcome; the destinations belong to it until that
says that it is terminal, or else until ``on_terminal``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from common.kv_cache.sharing.remote_prefix import PullPlan


@dataclass(frozen=True, slots=True)
class FinishedPull:
    """How a pull ended (``common.engine.remote_prefixes.PullResult``), and what it took.

    ``reason``: empty when ok, else one word. ``num_bytes``, ``num_blocks``, ``num_states``: that came from another
    node. ``final_s``: when the final manifest came, on ``time.monotonic``: from then on the client waits for the
    transfer alone. ``seconds``: of reading and checking. ``num_early_parts``: parts that had arrived before the final
    manifest came.
    """

    ok: bool
    terminal: bool
    reason: str = ""
    num_bytes: int = 0
    num_blocks: int = 0
    num_states: int = 0
    output_row: Any = None
    final_s: float | None = None
    seconds: float = 0.0
    num_descriptors: int = 0
    num_early_parts: int = 0


class Pull(Protocol):
    """One pull, on the event loop. ``run`` is called once and raises only CancelledError; ``cancel``: the request was
    aborted, the outcome follows as soon as the destinations are safe; ``failed``: the outcome when ``run`` raised."""

    async def run(self) -> FinishedPull: ...

    def cancel(self) -> None: ...

    def failed(self, reason: str) -> FinishedPull: ...


class PulledPrefix(Protocol):
    """What the engine pulls. ``close``: nobody reads it any more; idempotent, does not wait."""

    @property
    def prefix_key(self) -> bytes: ...

    @property
    def num_tokens(self) -> int: ...

    def close(self) -> None: ...


class PrefixReader(Protocol):
    """Of the prefixes of one class. Called on the event loop."""

    def begin(self, seq_id: str, prefix: Any, plan: PullPlan, on_terminal: Callable[[], None]) -> Pull:
        """``on_terminal`` is called only after an outcome that is not terminal, once nothing can write any more."""

    def ended(self, prefix: Any, result: FinishedPull) -> None:
        """The pull had this outcome: counts it."""
