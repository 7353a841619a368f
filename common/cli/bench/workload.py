"""What ``tandem bench`` sends: conversations of one or more turns, and when each begins. The same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from common.cli.bench.settings import FIRST_TOKEN_ID, BenchSettings

Prompt = list[int] | str

_SYLLABLES = ("ba", "co", "de", "fi", "gu", "ka", "lo", "me", "ni", "pu", "ra", "so", "te", "vi", "zu")


@dataclass(frozen=True, slots=True)
class Conversation:
    """``additions``: what each turn adds to all before it, the first prompt first; ``max_tokens`` of each answer.
    ``start_s``: when it begins, after the run's begin."""

    start_s: float
    additions: list[Prompt]
    max_tokens: list[int]


def conversations(settings: BenchSettings, num_requests: int, seed: str) -> Iterator[Conversation]:
    """Conversations of ``settings.turns`` turns, ``num_requests`` turns in all (the last one may be shorter).

    Times, lengths and content are drawn apart: another length does not change who arrives when.
    """
    times, lengths = random.Random(f"times {seed}"), random.Random(f"lengths {seed}")
    write = _Writer(settings, seed)
    # The shared prefix is one for warm-up and run.
    shared = _Writer(settings, str(settings.seed)).draw(settings.shared_tokens)
    start_s, left = 0.0, num_requests
    while left:
        turns = min(settings.turns, left)
        left -= turns
        if settings.request_rate is not None:
            start_s += times.expovariate(settings.request_rate)
        first = max(0, _varied(settings.prompt_tokens, settings.length_spread, lengths) - settings.shared_tokens)
        additions = [join(shared, write.draw(first if settings.shared_tokens else max(1, first)))]
        for _ in range(turns - 1):
            additions.append(write.draw(_varied(settings.turn_tokens, settings.length_spread, lengths)))
        answers = [_varied(settings.max_tokens, settings.length_spread, lengths) for _ in range(turns)]
        yield Conversation(start_s, additions, answers)


def join(before: Prompt, after: Prompt) -> Prompt:
    """Both are token ids, or both are text."""
    if isinstance(before, str) or isinstance(after, str):
        assert isinstance(before, str)
        assert isinstance(after, str)
        return before + after
    return before + after


class _Writer:
    """Draws prompts: token ids, or words that each end with a blank."""

    def __init__(self, settings: BenchSettings, seed: str) -> None:
        self._random = random.Random(f"prompts {seed}")
        self._vocab_size = settings.vocab_size
        self._is_text = settings.is_text

    def draw(self, length: int) -> Prompt:
        if self._is_text:
            return "".join("".join(self._random.choices(_SYLLABLES, k=2)) + " " for _ in range(length))
        return [self._random.randrange(FIRST_TOKEN_ID, self._vocab_size) for _ in range(length)]


def _varied(length: int, spread: float, draw: random.Random) -> int:
    """Uniform within ``spread`` of ``length``, never below 1."""
    return max(1, round(length * (1 + draw.uniform(-spread, spread))))
