"""Turns logits into tokens: the whole sampling pipeline, vectorised over the rows of a step.

Order: logit bias, minimum length, penalties; greedy rows take the largest; the others are divided by the temperature,
cut by min_p, top_k and top_p, and drawn. A draw is one uniform number through the inverse of the cumulative
distribution. With a seed that number is a hash of (seed, fork, position), so a request's tokens do not depend on what
it is batched with, on the node, or on how often it was resumed. Reported log-probabilities are of the model's own
distribution, before all of this.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.request import SamplingParams, TokenLogprob

_UNIFORM_BITS = 52
"""Random bits of one uniform number u in [0, 1). With 52 of them u is at most 1 - 2**-52, so that u times a total stays
below the total in float64."""


@dataclass(frozen=True, slots=True)
class SampleTask:
    """One row to sample.

    Attributes:
        params: the request's.
        prompt_token_ids, output_token_ids: what came before. Penalties read both; the output's length is the position
            that the seed is hashed with.
        index: the fork number (0 without forks); it is hashed with the seed as well.
        eos_token_ids: masked, with the stop tokens, until ``min_tokens`` are out.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    index: int = 0
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def masks_stops(self) -> bool:
        return len(self.output_token_ids) < self.params.min_tokens

    @property
    def has_penalties(self) -> bool:
        p = self.params
        return p.presence_penalty != 0.0 or p.frequency_penalty != 0.0 or p.repetition_penalty != 1.0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the largest logit and nothing else is asked for."""
        p = self.params
        return p.is_greedy and p.logprobs is None and not (p.logit_bias or self.masks_stops or self.has_penalties)


class Sampler:
    """``seed`` feeds the draws of requests without a seed of their own (None: from the system)."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def sample(self, logits: Tensor, tasks: Sequence[SampleTask]) -> list[TokenLogprob]:
        """One token per row of ``logits`` [R, vocab].

        A row that asked for no logprobs gets ``logprob`` 0.0 and ``rank`` 0: not computed.
        """
        with torch.inference_mode():
            assert logits.shape[0] == len(tasks), "one task per row"
            if not tasks:
                return []
            if all(task.is_plain_greedy for task in tasks):
                return [TokenLogprob(token, 0.0, 0) for token in logits.argmax(-1).tolist()]
            scores = logits.float().clone()
            _add_bias(scores, tasks)
            _mask_stops(scores, tasks)
            _penalise(scores, tasks)
            tokens = scores.argmax(-1)
            drawn = [row for row, task in enumerate(tasks) if not task.params.is_greedy]
            if drawn:
                rows = torch.tensor(drawn, device=scores.device)
                uniform = torch.tensor([self._uniform(tasks[row]) for row in drawn], dtype=torch.float64)
                tokens[rows] = _draw(scores[rows], [tasks[row].params for row in drawn], uniform.to(scores.device))
            return _report(logits, tokens, [task.params.logprobs for task in tasks])

    def prompt_logprobs(self, logits: Tensor, next_token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """Log-probability of each row's next token. logits [T, vocab]; next_token_ids [T]; num_top alternatives (0:
        none)."""
        with torch.inference_mode():
            assert logits.shape[0] == len(next_token_ids), "one next token per row"
            tokens = torch.tensor(next_token_ids, dtype=torch.long, device=logits.device)
            return _report(logits, tokens, [num_top] * len(next_token_ids))

    def _uniform(self, task: SampleTask) -> float:
        """In [0, 1)."""
        if task.params.seed is None:
            bits = self._random.getrandbits(_UNIFORM_BITS)
        else:
            text = f"{task.params.seed}/{task.index}/{len(task.output_token_ids)}"
            digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"tandem-sample").digest()
            bits = int.from_bytes(digest, "big") >> (64 - _UNIFORM_BITS)
        return bits * 2.0**-_UNIFORM_BITS


def _add_bias(scores: Tensor, tasks: Sequence[SampleTask]) -> None:
    entries = [(row, token, bias) for row, task in enumerate(tasks) for token, bias in task.params.logit_bias.items()]
    if entries:
        rows, tokens, biases = zip(*entries, strict=True)
        where = (_ids(rows, scores), _ids(tokens, scores))
        scores.index_put_(where, torch.tensor(biases, dtype=scores.dtype, device=scores.device), accumulate=True)


def _mask_stops(scores: Tensor, tasks: Sequence[SampleTask]) -> None:
    entries = [
        (row, token)
        for row, task in enumerate(tasks)
        if task.masks_stops
        for token in (*task.eos_token_ids, *task.params.stop_token_ids)
    ]
    if entries:
        rows, tokens = zip(*entries, strict=True)
        scores[_ids(rows, scores), _ids(tokens, scores)] = float("-inf")


def _penalise(scores: Tensor, tasks: Sequence[SampleTask]) -> None:
    """Repetition (over prompt and output) scales, frequency and presence (over the output) subtract; as OpenAI and
    vLLM do."""
    rows = [row for row, task in enumerate(tasks) if task.has_penalties]
    if not rows:
        return
    chosen = [tasks[row] for row in rows]
    affected = scores[rows]
    output = _counts([task.output_token_ids for task in chosen], affected)
    seen = (output > 0) | (_counts([task.prompt_token_ids for task in chosen], affected) > 0)

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=scores.dtype, device=scores.device)[:, None]

    repetition = column(task.params.repetition_penalty for task in chosen)
    scaled = torch.where(affected > 0, affected / repetition, affected * repetition)
    affected = torch.where(seen, scaled, affected)
    affected -= column(task.params.frequency_penalty for task in chosen) * output
    affected -= column(task.params.presence_penalty for task in chosen) * (output > 0)
    scores[rows] = affected


def _counts(token_ids: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """[R, vocab] how often each token occurs in each list."""
    counts = torch.zeros_like(like)
    for row, ids in enumerate(token_ids):
        if ids:
            counts[row] = torch.bincount(_ids(ids, like), minlength=like.shape[1])[: like.shape[1]]
    return counts


def _draw(scores: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    """scores [R, vocab], temperatures above 0; uniform [R] -> token ids [R]."""
    vocab_size = scores.shape[1]
    scores = scores / torch.tensor([p.temperature for p in params], dtype=scores.dtype, device=scores.device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], dtype=scores.dtype, device=scores.device)[:, None]
    if bool((min_p > 0).any()):
        floor = scores.amax(-1, keepdim=True) + min_p.log()  # log 0 = -inf: nothing is below
        scores = scores.masked_fill(scores < floor, float("-inf"))
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    cut = [k < vocab_size or p.top_p < 1.0 for k, p in zip(top_k, params, strict=True)]
    tokens = torch.empty(len(params), dtype=torch.long, device=scores.device)
    whole_rows = [row for row, is_cut in enumerate(cut) if not is_cut]
    cut_rows = [row for row, is_cut in enumerate(cut) if is_cut]
    if whole_rows:
        tokens[whole_rows] = _invert(scores[whole_rows].double().softmax(-1), uniform[whole_rows])
    if cut_rows:
        # Most likely first; no further than the largest k, which spares the sort of a whole vocabulary.
        kept, order = scores[cut_rows].topk(max(top_k[row] for row in cut_rows), dim=-1)
        places = torch.arange(kept.shape[1], device=scores.device)
        limits = _ids([top_k[row] for row in cut_rows], scores)[:, None]
        top_p = torch.tensor([params[row].top_p for row in cut_rows], dtype=torch.float64, device=scores.device)[
            :, None
        ]
        probs = kept.masked_fill(places >= limits, float("-inf")).double().softmax(-1)
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill((before >= top_p) & (places > 0) & (top_p < 1.0), 0.0)
        tokens[cut_rows] = order.gather(1, _invert(probs, uniform[cut_rows])[:, None])[:, 0]
    return tokens


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """The place at which each row's running sum first exceeds ``uniform`` of its total. probs [R, n] float64, not
    normalised."""
    running = probs.cumsum(-1)
    target = uniform[:, None] * running[:, -1:]
    return torch.searchsorted(running, target, right=True)[:, 0].clamp_(max=probs.shape[1] - 1)


def _report(logits: Tensor, tokens: Tensor, wanted: Sequence[int | None]) -> list[TokenLogprob]:
    """``wanted``: number of alternatives per row, or None for no log-probability at all."""
    ids = tokens.tolist()
    results = [TokenLogprob(token, 0.0, 0) for token in ids]
    rows = [row for row, count in enumerate(wanted) if count is not None]
    if not rows:
        return results
    logprobs = logits[rows].float().log_softmax(-1)
    own = logprobs.gather(1, tokens[rows][:, None])
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    most = min(max(wanted[row] or 0 for row in rows), logits.shape[1])
    values, order = logprobs.topk(most, dim=-1)
    columns = zip(rows, own[:, 0].tolist(), ranks, order.tolist(), values.tolist(), strict=True)
    for row, logprob, rank, top_ids, top_values in columns:
        count = wanted[row] or 0
        top = tuple(zip(top_ids[:count], top_values[:count], strict=True))
        results[row] = TokenLogprob(ids[row], logprob, rank, top)
    return results


def _ids(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=like.device)
