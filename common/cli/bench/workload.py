"""What ``tandem bench`` sends: conversations of one or more turns, and when each begins. The same for the same seed.

Datasets, of which the first prompts are: ``random``: nothing repeats. ``edits``: a text, the text with every tenth
word another, and how it begins: a model that copies writes it once more. ``rag``: passages of a collection, some of
which other prompts have too, a question, and how one of the passages begins: a model that copies quotes it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common.cli.bench.settings import FIRST_TOKEN_ID, BenchSettings

Prompt = list[int] | str
LEAD = 12
"""Of what is to be repeated, the beginning at the end of the prompt, as far as there is room."""
_EDIT_EVERY = 10
_NUM_PASSAGES, _PASSAGES_EACH = 24, 3

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
    # The shared prefix is one for warm-up and run, and so is the collection of passages.
    common = _Writer(settings, str(settings.seed))
    shared = common.draw(settings.shared_tokens)
    size = settings.prompt_tokens // (2 * _PASSAGES_EACH)
    passages = [common.units(size) for _ in range(_NUM_PASSAGES)] if settings.dataset == "rag" else []
    start_s, left = 0.0, num_requests
    while left:
        turns = min(settings.turns, left)
        left -= turns
        if settings.request_rate is not None:
            start_s += times.expovariate(settings.request_rate)
        first = max(0, _varied(settings.prompt_tokens, settings.length_spread, lengths) - settings.shared_tokens)
        first = first if settings.shared_tokens else max(1, first)
        if settings.dataset == "edits":
            units = write.edits(first)
        elif settings.dataset == "rag":
            units = write.quotes(first, passages)
        else:
            units = write.units(first)
        additions = [join(shared, write.whole(units))]
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
    """Draws prompts of units: token ids, or words that each end with a blank."""

    def __init__(self, settings: BenchSettings, seed: str) -> None:
        self._random = random.Random(f"prompts {seed}")
        self._vocab_size = settings.vocab_size
        self._is_text = settings.is_text

    def units(self, length: int) -> list[Any]:
        if self._is_text:
            return ["".join(self._random.choices(_SYLLABLES, k=2)) + " " for _ in range(length)]
        return [self._random.randrange(FIRST_TOKEN_ID, self._vocab_size) for _ in range(length)]

    def whole(self, units: list[Any]) -> Prompt:
        return "".join(units) if self._is_text else units

    def draw(self, length: int) -> Prompt:
        return self.whole(self.units(length))

    def edits(self, length: int) -> list[Any]:
        lead = min(LEAD, length // 4)
        size = (length - lead) // 2
        text = self.units(size)
        edited = [*text]
        edited[::_EDIT_EVERY] = self.units(len(edited[::_EDIT_EVERY]))
        return [*self.units(length - lead - 2 * size), *text, *edited, *text[:lead]]

    def quotes(self, length: int, passages: list[list[Any]]) -> list[Any]:
        chosen = self._random.sample(passages, _PASSAGES_EACH)
        found = [unit for passage in chosen for unit in passage][: max(0, length - LEAD)]
        lead = self._random.choice(chosen)[: min(LEAD, length - len(found))]
        return [*found, *self.units(length - len(found) - len(lead)), *lead]


def _varied(length: int, spread: float, draw: random.Random) -> int:
    """Uniform within ``spread`` of ``length``, never below 1."""
    return max(1, round(length * (1 + draw.uniform(-spread, spread))))
