"""Counts that penalties read, kept up step by step."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterator

from common.engine.sampling.token_counts import TokenCounts

VOCAB = 40


class ReadOnce(list[int]):
    """A prompt that may be gone through once."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return super().__iter__()


def test_counts_when_the_output_grows_in_any_steps_then_are_those_of_the_whole() -> None:
    rng = random.Random(1)
    for _ in range(50):
        prompt = [rng.randrange(VOCAB + 5) for _ in range(rng.randrange(30))]  # some beyond what the head gives
        output: list[int] = []
        counts = TokenCounts()
        for _ in range(rng.randrange(1, 8)):
            output += [rng.randrange(VOCAB) for _ in range(rng.randrange(12))]
            counts.update(prompt, list(output), VOCAB, {})
            assert dict(zip(counts.output, counts.times, strict=True)) == Counter(output)
            given = {token for token in prompt if token < VOCAB}
            assert counts.prompt is not None
            assert list(counts.prompt) == sorted(given)
            assert sorted(counts.added) == sorted(set(output) - given)


def test_counts_when_updated_then_read_the_prompt_once_and_only_what_is_new_of_the_output() -> None:
    prompt, counts = ReadOnce(range(20)), TokenCounts()
    for length in range(5):
        counts.update(prompt, [None] * (length - 1) + [3] if length else [], VOCAB, {})  # type: ignore[list-item]
    assert prompt.times == 1
    assert dict(zip(counts.output, counts.times, strict=True)) == {3: 4.0}


def test_counts_when_continuations_of_one_prompt_begin_together_then_share_it() -> None:
    prompt = ReadOnce(range(20))
    prompts: dict[int, array[int]] = {}
    forks = [TokenCounts() for _ in range(5)]
    for fork, counts in enumerate(forks):
        counts.update(prompt, [30 + fork], VOCAB, prompts)
    assert prompt.times == 1
    assert all(counts.prompt is forks[0].prompt for counts in forks)
    assert [list(counts.added) for counts in forks] == [[30 + fork] for fork in range(5)]
