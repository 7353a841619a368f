"""Word lists of the exercises, and which answers are held out of training."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

PLACES = tuple(
    "harbour mill castle garden library station market bridge tower cellar kitchen school chapel farm forest island "
    "museum palace theatre tunnel valley village workshop airport".split()
)
ADJECTIVES = tuple(
    "amber bold brave bright calm clever cold copper dark deep dusty early empty frozen gentle golden green happy "
    "heavy hidden honest iron kind lazy lucky narrow old patient proud purple quick quiet red royal sharp silent "
    "silver small soft strong sunny sweet tall warm white wild wise yellow".split()
)
NOUNS = tuple(
    "anchor apple arrow basket bell bird bottle button candle camel cherry clock cloud coin dragon drum eagle falcon "
    "feather finch fox goose guitar hammer hawk honey horse kettle kite ladder lantern lemon lion marble mirror moon "
    "needle olive orange otter owl panda pearl piano planet rabbit raven river robin saddle".split()
)
SYLLABLES = tuple(
    "ba be bo da de di do fa fe ga go ka ke ki ko la le li lo lu ma me mi mo na ne no pa pe po ra re ri ro sa se si so "
    "ta te ti to va ve vi vo za ze zi zo".split()
)
SETTINGS = tuple(
    "colour size shape speed name price weight height owner mode level limit title host port path format theme unit "
    "score target version".split()
)

HELD_OUT_OF = 8
"""One answer in this many is held out."""


def is_held_out(answer: str, one_in: int = HELD_OUT_OF) -> bool:
    """Whether ``answer`` is kept out of training: decided by its digest alone, so the two sets cannot meet."""
    return int.from_bytes(hashlib.sha256(answer.encode()).digest()[:4], "big") % one_in == 0


def draw_pair(rng: random.Random, held_out: bool) -> str:
    """Two words such as ``amber falcon``. Each word occurs in training, a held-out pair never does."""
    while True:
        pair = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        if is_held_out(pair) == held_out:
            return pair


def draw_told(rng: random.Random, held_out: bool) -> str:
    """A pair or, as often, a single word: what the evaluation tells."""
    while True:
        word = draw_pair(rng, held_out) if rng.random() < 0.5 else rng.choice(ADJECTIVES + NOUNS)
        if is_held_out(word) == held_out:
            return word


def draw_word(rng: random.Random, vocabulary: Sequence[str]) -> str:
    """What a training exercise tells: two words, one, one of the documentation, or another value; not held out."""
    while True:
        kind = rng.random()
        if kind < 0.7:
            return draw_told(rng, held_out=False)
        word = rng.choice(vocabulary) if kind < 0.85 else draw_value(rng)
        if not is_held_out(word):
            return word


def draw_value(rng: random.Random) -> str:
    """Something to remember, of one of several kinds, not held out."""
    while True:
        kind = rng.random()
        if kind < 0.5:
            value = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        elif kind < 0.65:
            value = rng.choice(rng.choice((ADJECTIVES, NOUNS)))
        elif kind < 0.85:
            value = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))
        else:
            value = str(rng.randint(10, 99999))
        if not is_held_out(value):
            return value
