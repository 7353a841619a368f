"""What transformers itself answers: the oracle of the end-to-end tests, from the same checkpoint that the nodes serve.

``generate`` is the stock greedy loop over the whole prompt in one go. ``score`` is one stock forward over prompt and
answer, for answers that are not greedy or too long to generate twice. Both are cached per prompt.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig

from tests.support.models import VOCAB_SIZE, auto_class, checkpoint

DELTA_RULES = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
    "qwen3_5_vl",
    "qwen3_5_moe_vl",
    "kimi_linear",
    "bailing_hybrid",
)
FIRST_TOKEN = 6
"""Ids below it are special."""


def tolerance(family: str) -> float:
    """Largest allowed difference of a log-probability in float32; stock's gated delta rule is itself that inexact."""
    return 5e-3 if family in DELTA_RULES else 1e-3


def random_tokens(count: int, seed: int) -> list[int]:
    """A prompt of ordinary tokens. Different seeds (modulo 500) differ from the first token on: nothing is shared."""
    draw = random.Random(seed)
    rest = draw.choices(range(FIRST_TOKEN, VOCAB_SIZE), k=count - 1)
    return [FIRST_TOKEN + seed % 500, *rest]


@dataclass(frozen=True)
class Mismatch:
    """Where an answer first differs from stock, and how."""

    index: int
    text: str


@dataclass(frozen=True)
class Greedy:
    """Stock's greedy answer: its tokens, and the log-probabilities of the whole vocabulary at each, [tokens, vocab]."""

    token_ids: list[int]
    logprobs: Tensor

    def mismatch(self, token_ids: Sequence[int], logprobs: Sequence[float], tolerance: float) -> Mismatch | None:
        """The first place where an answer is not this one.

        Where the tokens part although stock's own gap between the two is below ``tolerance``, both are right and
        nothing after can be compared.
        """
        if len(token_ids) != len(self.token_ids) or len(logprobs) != len(self.token_ids):
            return Mismatch(0, f"{len(token_ids)} tokens, {len(logprobs)} logprobs for {len(self.token_ids)}")
        for index, (token_id, logprob, expected_id) in enumerate(zip(token_ids, logprobs, self.token_ids, strict=True)):
            row = self.logprobs[index]
            gap = float(row[expected_id] - row[token_id])
            if gap > tolerance:
                return Mismatch(index, f"token {token_id} for {expected_id}, {gap:.5f} below it")
            difference = abs(logprob - float(row[token_id]))
            if difference > tolerance:
                return Mismatch(index, f"logprob {logprob:.5f} for {float(row[token_id]):.5f}: {difference:.5f} off")
            if token_id != expected_id:
                return None
        return None


class Reference:
    """The stock model of ``family``. Get it with ``reference``."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.tolerance = tolerance(family)
        self._model = auto_class(family).from_pretrained(checkpoint(family), dtype=torch.float32).eval()
        # The checkpoint's own would stop at its end token; the tests ask for a fixed number of tokens.
        self._model.generation_config = GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0)
        self._greedy: dict[tuple[tuple[int, ...], int], Greedy] = {}

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> Greedy:
        self.generate([prompt], num_tokens)
        return self._greedy[tuple(prompt), num_tokens]

    def generate(self, prompts: Iterable[Sequence[int]], num_tokens: int) -> None:
        """Has ``greedy`` of all these prompts ready: those of equal length, which need no padding, in one batch."""
        missing = dict.fromkeys(tuple(each) for each in prompts if (tuple(each), num_tokens) not in self._greedy)
        for length, alike in itertools.groupby(sorted(missing, key=len), key=len):
            batch = list(alike)
            input_ids = torch.tensor(batch)
            output = self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=num_tokens,
                return_dict_in_generate=True,
                output_logits=True,
            )
            logits = torch.stack(output.logits, dim=1).float().log_softmax(-1)  # [prompts, tokens, vocab]
            for prompt, sequence, rows in zip(batch, output.sequences, logits, strict=True):
                self._greedy[prompt, num_tokens] = Greedy(sequence[length:].tolist(), rows)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probabilities of what follows each position, [tokens, vocab], from one forward without a cache."""
        output = self._model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
        return output.logits[0].float().log_softmax(-1)

    def score_answer(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Log-probabilities from which each token of ``answer`` was drawn, [answer tokens, vocab]."""
        return self.score([*prompt, *answer])[len(prompt) - 1 : -1]


@functools.cache
def reference(family: str) -> Reference:
    """The one stock model of ``family`` in this process."""
    return Reference(family)
