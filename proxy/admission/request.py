"""What a request brings to admission."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """Times are on ``time.monotonic``'s clock.

    Attributes:
        key: digest of its API key, None without one.
        num_answers: ``n`` for each prompt; a request counts as so many wherever requests are counted.
        num_prompt_tokens: of all prompts, estimated.
        num_answer_tokens: of all answers, when each is as long as it may be.
        is_open_ended: no ``max_tokens`` was given: the answers may be as long as the context.
        max_tokens_field: what the request calls ``max_tokens``, for errors.
    """

    arrival_s: float
    priority: int = 0
    deadline_s: float | None = None
    key: str | None = None
    num_answers: int = 1
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0
    is_open_ended: bool = False
    max_tokens_field: str = "max_tokens"

    @property
    def num_tokens(self) -> int:
        """The most that it may use."""
        return self.num_prompt_tokens + self.num_answer_tokens
