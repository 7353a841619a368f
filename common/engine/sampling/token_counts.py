"""Which tokens one sequence has, and how often: what penalties read. Made with its sequence and gone with it; counted
up in each step that samples from it, so that a step costs what it adds and not what was there before."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import MutableMapping, Sequence


class TokenCounts:
    """Empty until the first :meth:`update`.

    Attributes:
        prompt: int64, the prompt's distinct tokens, ascending; continuations of one prompt that are sampled in the same
            step share it.
        added: int64, the distinct tokens of the output that the prompt does not have.
        output, times: int64 and float32, the output's distinct tokens, and how often each occurs in it.
    """

    __slots__ = ("_num_counted", "_places", "added", "output", "prompt", "times")

    def __init__(self) -> None:
        self.prompt: array[int] | None = None
        self.added = array("q")
        self.output = array("q")
        self.times = array("f")
        self._places: dict[int, int] = {}
        self._num_counted = 0

    def fork(self) -> TokenCounts:
        """The same counts, to be counted on by itself."""
        copy = TokenCounts()
        copy.prompt, copy.added, copy.output, copy.times = self.prompt, self.added[:], self.output[:], self.times[:]
        copy._places, copy._num_counted = self._places.copy(), self._num_counted
        return copy

    def update(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        vocab_size: int,
        prompts: MutableMapping[int, array[int]],
    ) -> None:
        """Count what has come to ``output`` since the last call; ``prompt`` is read in the first one.

        ``prompts``: the prompts that were counted for other sequences in this step, by the ``id`` of the list.
        """
        if self.prompt is None:
            if id(prompt) not in prompts:
                prompts[id(prompt)] = array("q", sorted(token for token in set(prompt) if token < vocab_size))
            self.prompt = prompts[id(prompt)]
        for token in output[self._num_counted :]:
            place = self._places.get(token)
            if place is not None:
                self.times[place] += 1.0
            elif token < vocab_size:
                self._places[token] = len(self.output)
                self.output.append(token)
                self.times.append(1.0)
                at = bisect_left(self.prompt, token)
                if at == len(self.prompt) or self.prompt[at] != token:
                    self.added.append(token)
        self._num_counted = len(output)
