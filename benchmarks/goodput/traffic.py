"""What comes when: requests or chats with Poisson arrivals, drawn from a seed, so that each service sees the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mix:
    """A chat has ``num_turns`` requests: the first of ``num_prompt_tokens``, each further one the conversation so far
    and ``growth`` tokens."""

    num_prompt_tokens: int
    num_answer_tokens: int
    num_turns: int = 1
    growth: int = 0


MIXES = {
    "2048/32": Mix(2048, 32),
    "512/128": Mix(512, 128),
    "128/512": Mix(128, 512),
    "chats": Mix(384, 64, num_turns=5, growth=64),
}
SHIFTING = "shifting"
SHIFT_S = 30.0
THINK_S = 1.0
"""Between an answer and the next turn."""


@dataclass(frozen=True)
class Arrival:
    """``at_s`` after the beginning; ``prompts``: of each turn, what is new."""

    at_s: float
    mix: Mix
    prompts: tuple[tuple[int, ...], ...]


def draw_arrivals(
    mixes: Sequence[Mix], requests_per_s: float, seconds: float, vocab_size: int, seed: int
) -> list[Arrival]:
    """``requests_per_s`` counts turns, not chats. Several ``mixes`` follow each other, each for ``SHIFT_S``, again and
    again; the rate is that of all of them on average, and each has its part of the prompts' and answers' tokens."""
    draw = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s = 0.0
    while True:
        mix = mixes[int(at_s / SHIFT_S) % len(mixes)]
        at_s += draw.expovariate(requests_per_s / mix.num_turns)
        if at_s >= seconds:
            return arrivals
        sizes = [mix.num_prompt_tokens, *[mix.growth] * (mix.num_turns - 1)]
        prompts = tuple(tuple(draw.choices(range(10, vocab_size), k=size)) for size in sizes)
        arrivals.append(Arrival(at_s, mix, prompts))
