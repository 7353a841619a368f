"""Which node has how much of a prompt: what their events told, a hint for placement.

A wrong entry costs time, never an answer: nodes look up again what they have.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.prompt_keys import PromptKeys


@dataclass(frozen=True, slots=True)
class Coverage:
    """What one node has of one prompt, in tokens from its start.

    Attributes:
        attention_tokens: whose attention blocks it has.
        state_tokens: the deepest position from which it can go on by itself (a checkpoint within those; for a dense
            model every block boundary is one, so both are equal).
    """

    attention_tokens: int
    state_tokens: int


class PrefixIndex:
    def lookup(self, keys: PromptKeys) -> dict[str, Coverage]:
        """Coverage by node URL; nodes that have nothing are left out."""
        return {}

    def observe(self, url: str, keys: PromptKeys) -> None:
        """A prompt went to a node without events: assume for a while that the node has it."""

    def drop(self, url: str) -> None:
        """Forget a node."""
