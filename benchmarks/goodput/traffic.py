"""What comes when: requests or chats with Poisson arrivals, drawn from a seed, so that each service sees the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
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
    rates: Mapping[Mix, float], seconds: float, vocab_size: int, seed: int, times_seed: int = 0
) -> list[Arrival]:
    """``rates``: requests a second of each mix, turns and not chats. Several mixes follow each other, each for
    ``SHIFT_S``, again and again. ``seed``: of the prompts' tokens; ``times_seed``: of when they come, so that ways are
    compared by the same arrivals, without a prompt that was seen before."""
    draw, times = random.Random(seed), random.Random(times_seed)
    arrivals: list[Arrival] = []
    mixes, begin_s = itertools.cycle(rates.items()), 0.0
    while begin_s < seconds:
        mix, rate = next(mixes)
        end_s = min(seconds, begin_s + SHIFT_S) if len(rates) > 1 else seconds
        at_s = begin_s + times.expovariate(rate / mix.num_turns)
        while at_s < end_s:
            sizes = [mix.num_prompt_tokens, *[mix.growth] * (mix.num_turns - 1)]
            prompts = tuple(tuple(draw.choices(range(10, vocab_size), k=size)) for size in sizes)
            arrivals.append(Arrival(at_s, mix, prompts))
            at_s += times.expovariate(rate / mix.num_turns)
        begin_s = end_s
    return arrivals
