"""What every drafter is: one object per sequence, asked between steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Drafter(ABC):
    """Guesses the next tokens of one sequence. Made anew where the sequence goes on elsewhere: what it knows, it knows
    from the tokens alone. Owned by the engine thread."""

    @abstractmethod
    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """At most ``max_tokens`` (1 or more) tokens that may follow ``token_ids``: all of the sequence, which only
        grows from call to call. []: no guess. Takes a bounded time, however long the sequence is."""
