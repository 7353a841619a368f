"""Training sequences: documentation text and exercises, packed to one length."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import torch

from benchmarks.demo_model import exercises
from benchmarks.demo_model.corpus import Item
from benchmarks.demo_model.exercises import Context
from benchmarks.demo_model.phrasings import THINGS
from benchmarks.demo_model.tokens import END_ID, FILLER_MARK, Encoder, Weights
from benchmarks.demo_model.words import PLACES, SETTINGS

_CHARS_PER_TOKEN = 3
_SHORT = 100
_OTHER_PLACES = 4
"""Of the documentation's words, beside the 24 places: one in seven of a sequence's places."""


class SequenceSource:
    """An endless stream of training sequences, the same for the same seed.

    Half of the tokens are plain documentation, in a new order every epoch. Filler inside of exercises is documentation
    too and is learnt as such.
    """

    def __init__(self, items: Sequence[Item], encoder: Encoder, seed: int) -> None:
        training = [item for item in items if not item.is_held_out]
        self._encoder = encoder
        self._rng = random.Random(seed)
        self._texts = [encoder.text(item.text) for item in training]
        self._stream: list[int] = []
        self._text = "\n\n".join(item.text for item in training)
        self._vocabulary = sorted(set(re.findall(r"(?<= )[a-z]{4,9}(?= )", self._text)))
        self._weights = Weights()
        self._kinds = (
            (exercises.recall, 0.62),
            (exercises.copying, 0.1),
            (exercises.settings, 0.12),
            (exercises.questions(list(training)), 0.08),
            (exercises.arithmetic, 0.05),
            (exercises.counting, 0.03),
        )

    def state(self) -> object:
        return self._rng.getstate(), list(self._stream)

    def restore(self, state: object) -> None:
        rng_state, self._stream = state  # type: ignore[misc]
        self._rng.setstate(rng_state)

    def batch(self, count: int, length: int, text_share: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [count, length + 1] and the weights of their targets [count, length]."""
        rows = [self._row(length + 1, text_share) for _ in range(count)]
        return torch.tensor([ids for ids, _ in rows]), torch.tensor([weights[1:] for _, weights in rows])

    def _row(self, length: int, text_share: float) -> tuple[list[int], list[float]]:
        if self._rng.random() < text_share:
            while len(self._stream) < length:
                for index in self._rng.sample(range(len(self._texts)), len(self._texts)):
                    self._stream += [*self._texts[index], END_ID]
            row, self._stream = self._stream[:length], self._stream[length:]
            return row, [1.0] * length
        # Some places are any word, so that a user's need be none of ours.
        named = {*PLACES, *self._rng.sample(self._vocabulary, min(_OTHER_PLACES, len(self._vocabulary)))}
        places, keys = (self._rng.sample(sorted(names), len(names)) for names in (named, {*SETTINGS, *THINGS}))
        ids: list[int] = [END_ID]
        weights: list[float] = [0.0]
        while len(ids) < length:
            more_ids, more_weights = self._exercise(length - len(ids), places, keys)
            ids += more_ids
            weights += more_weights
        return ids[:length], weights[:length]

    def _exercise(self, room: int, places: list[str], keys: list[str]) -> tuple[list[int], list[float]]:
        kinds, shares = zip(*self._kinds, strict=True)
        make = self._rng.choices(kinds, shares)[0]
        # A long conversation or several short ones; a short one that overhangs the end is cut off there.
        tokens = room if self._rng.random() < 0.5 else self._rng.randint(0, room)
        while True:
            context = Context(self._rng, self._filler, max(0, tokens - 8), list(places), list(keys), self._vocabulary)
            ids, weights = self._encoder.turns(make(context), self._weights)
            if len(ids) <= room or tokens < _SHORT:
                places[:], keys[:] = context.places, context.keys
                return ids, weights
            tokens = tokens * 9 // 10

    def _filler(self, tokens: int) -> str:
        if tokens <= 0:
            return ""
        start = self._rng.randrange(len(self._text))
        text = self._text[start : start + tokens * _CHARS_PER_TOKEN + 80]
        text = text[text.find("\n") + 1 :][: tokens * _CHARS_PER_TOKEN].strip()
        return f"{FILLER_MARK}{text}{FILLER_MARK}"
