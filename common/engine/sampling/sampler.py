"""Turns logits into tokens: the whole sampling pipeline, vectorised over the rows of a step.

Order: logit bias, what may not come, penalties; greedy rows take the largest; the others are divided by the
temperature, cut by min_p, top_k and top_p, and drawn. A draw is one uniform number through the inverse of the
cumulative distribution. With a seed that number is a hash of (seed, fork, position), and what it draws from depends
on the row alone (equal scores rank by token id, sums have an order of their own): a request's tokens do not depend on
what it is batched with, on the node, or on how often it was resumed. Reported log-probabilities are of the model's
own distribution, before all of this.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.engine.sampling.draw import draw_rows, largest
from common.engine.sampling.token_counts import TokenCounts
from common.engine.sampling.token_lists import KeptTokenLists, TokenLists
from common.errors import GrammarError
from common.request import SamplingParams, TokenLogprob

_UNIFORM_BITS = 52
"""Random bits of one uniform number u in [0, 1). With 52 of them u is at most 1 - 2**-52, so that u times a total stays
below the total in float64."""


_NOTHING = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class SampleTask:
    """One row to sample.

    Attributes:
        params: the request's.
        prompt_token_ids, output_token_ids: what came before. Penalties read both; the output's length is the position
            that the seed is hashed with.
        index: the fork number (0 without forks); it is hashed with the seed as well.
        eos_token_ids: masked, with the stop tokens, until ``min_tokens`` are out.
        counts: the sequence's own, so that penalties need not count all of it again; None: they do.
        mask: of its grammar: uint32 words, bit i % 32 of word i // 32 says whether token i may come; it says of ends
            too. None: all may.
        num_unknown: tokens that came after these, which nobody on the host knows yet.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    index: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    counts: TokenCounts | None = None
    mask: memoryview | None = None
    num_unknown: int = 0

    @property
    def position(self) -> int:
        """Tokens that came before."""
        return len(self.output_token_ids) + self.num_unknown

    @property
    def hides_stops(self) -> bool:
        """Whether ``min_tokens`` are not out yet; a mask says of ends itself."""
        return self.mask is None and self.position < self.params.min_tokens

    @property
    def has_penalties(self) -> bool:
        p = self.params
        return p.presence_penalty != 0.0 or p.frequency_penalty != 0.0 or p.repetition_penalty != 1.0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the largest logit, of those that its mask has, and nothing else is asked for."""
        return self.params.is_greedy and self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked for but a token by temperature, top_k, top_p and min_p."""
        p = self.params
        if p.logprobs is not None or p.allowed_token_ids is not None:
            return False
        return not (p.logit_bias or p.bad_token_ids or self.hides_stops or self.has_penalties)


class Sampler:
    """``seed`` feeds the draws of requests without a seed of their own (None: from the system)."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self.lists = KeptTokenLists()

    def sample(self, logits: Tensor, tasks: Sequence[SampleTask]) -> list[TokenLogprob]:
        """One token per row of ``logits`` [R, vocab].

        A row that asked for no logprobs gets ``logprob`` 0.0 and ``rank`` 0: not computed.

        Raises:
            GrammarError: a row has no token that its mask and the rest of what was asked for allow.
        """
        with torch.inference_mode():
            assert logits.shape[0] == len(tasks), "one task per row"
            if not tasks:
                return []
            if all(task.is_plain_greedy for task in tasks):
                return [TokenLogprob(token, 0.0, 0) for token in _largest(logits, tasks)]
            scores = logits.float().clone()
            lists = [self.lists.of(task.params, task.eos_token_ids, scores.device) for task in tasks]
            _add_bias(scores, lists)
            is_blocked = _mask(scores, tasks, lists)
            _penalise(scores, tasks)
            tokens = scores.argmax(-1)
            drawn = [row for row, task in enumerate(tasks) if not task.params.is_greedy]
            if drawn:
                params = [tasks[row].params for row in drawn]
                draw_rows(tokens, scores, drawn, params, [self._uniform(tasks[row]) for row in drawn])
            report = _report(logits, tokens, [task.params.logprobs for task in tasks], tasks)
            if is_blocked is not None and bool(is_blocked.any()):
                raise GrammarError("the grammar allows no token that the rest of the request allows")
            return report

    def draw(self, logits: Tensor, tasks: Sequence[SampleTask]) -> Tensor:
        """[R] what ``sample`` gives of plain tasks, as a tensor on the device of ``logits``; asks for no value."""
        with torch.inference_mode():
            tokens = logits.argmax(-1)
            drawn = [row for row, task in enumerate(tasks) if not task.params.is_greedy]
            if drawn:
                uniforms = [self._uniform(tasks[row]) for row in drawn]
                draw_rows(tokens, logits.float(), drawn, [tasks[row].params for row in drawn], uniforms)
            return tokens

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
            text = f"{task.params.seed}/{task.index}/{task.position}"
            digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"tandem-sample").digest()
            bits = int.from_bytes(digest, "big") >> (64 - _UNIFORM_BITS)
        return bits * 2.0**-_UNIFORM_BITS


def _add_bias(scores: Tensor, lists: Sequence[TokenLists]) -> None:
    found = [(row, each.bias) for row, each in enumerate(lists) if each.bias is not None]
    if found:
        where = _places([(row, token_ids) for row, (token_ids, _) in found])
        scores.index_put_(where, torch.cat([values for _, (_, values) in found]), accumulate=True)


def _mask(scores: Tensor, tasks: Sequence[SampleTask], lists: Sequence[TokenLists]) -> Tensor | None:
    """Stops before ``min_tokens``, what would complete bad words, and all but the allowed tokens. Which of the rows
    with a grammar have none left; None: there are no such rows."""
    hidden: list[tuple[int, Tensor]] = []
    for row, (task, each) in enumerate(zip(tasks, lists, strict=True)):
        if each.allowed is not None:
            _keep(scores[row], each.allowed)
        if task.mask is not None:
            bits = _bits(task.mask, scores.shape[1])
            if 2 * np.count_nonzero(bits) < bits.size:
                _keep(scores[row], torch.from_numpy(np.flatnonzero(bits)).to(scores.device))
            else:
                scores[row, torch.from_numpy(np.flatnonzero(~bits)).to(scores.device)] = float("-inf")
        if task.hides_stops and each.stops is not None:
            hidden.append((row, each.stops))
        if task.params.bad_token_ids:
            banned = each.banned(task.output_token_ids, hides_stops=task.hides_stops)
            hidden += [(row, token_ids) for token_ids in banned]
    if hidden:
        scores[_places(hidden)] = float("-inf")
    constrained = [row for row, task in enumerate(tasks) if task.mask is not None]
    return scores[constrained].amax(-1) == float("-inf") if constrained else None


def _places(entries: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """The indices of these tokens, [n], in each of these rows."""
    columns = torch.cat([token_ids for _, token_ids in entries])
    rows, counts = _ids([row for row, _ in entries], columns), _ids([len(ids) for _, ids in entries], columns)
    return torch.repeat_interleave(rows, counts, output_size=len(columns)), columns


def _largest(logits: Tensor, tasks: Sequence[SampleTask]) -> list[int]:
    """The largest logit of each row, of those that its mask has."""
    # numpy's argmax takes 9 us for 8 rows of 16,384 on one core with AVX2, torch's 112.
    scores: Any = logits.float().numpy() if logits.device.type == "cpu" else logits
    tokens: list[int] = scores.argmax(-1).tolist()
    for row, task in enumerate(tasks):
        mask = task.mask
        if mask is not None and not mask[tokens[row] >> 5] >> (tokens[row] & 31) & 1:
            bits = _bits(mask, logits.shape[1])
            if isinstance(scores, np.ndarray) and 4 * np.count_nonzero(bits) > bits.size:
                # 12 us of 16,384, where gathering most of them takes 18.
                tokens[row] = int(np.where(bits, scores[row], _NOTHING).argmax())
            else:
                allowed = np.flatnonzero(bits)
                tokens[row] = int(allowed[int(scores[row][allowed].argmax())])
    return tokens


def _bits(mask: memoryview, vocab_size: int) -> Any:
    """[vocab] booleans of numpy: whether the token may come."""
    return np.unpackbits(np.frombuffer(mask, np.uint8), count=vocab_size, bitorder="little").view(bool)


def _keep(scores: Tensor, token_ids: Tensor) -> None:
    """Leaves these tokens alone in a row of scores [vocab]."""
    kept = scores[token_ids]
    scores.fill_(float("-inf"))
    scores[token_ids] = kept


def _penalise(scores: Tensor, tasks: Sequence[SampleTask]) -> None:
    """Repetition (over prompt and output) scales, frequency and presence (over the output) subtract; as OpenAI and
    vLLM do."""
    prompts: dict[int, array[int]] = {}
    for row, task in enumerate(tasks):
        if not task.has_penalties:
            continue
        params, counts = task.params, task.counts or TokenCounts()
        counts.update(task.prompt_token_ids, task.output_token_ids, scores.shape[1], prompts)
        if params.repetition_penalty != 1.0 and counts.prompt is not None:
            seen = torch.cat([_copied(counts.prompt, scores), _copied(counts.added, scores)])
            found = scores[row, seen]
            penalty = params.repetition_penalty
            scores[row, seen] = torch.where(found > 0, found / penalty, found * penalty)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            output, times = _copied(counts.output, scores), _copied(counts.times, scores)
            scores[row, output] = scores[row, output] - params.frequency_penalty * times - params.presence_penalty


def _copied(values: array[Any], like: Tensor) -> Tensor:
    """On the device of ``like``. A copy: an array that a tensor looks into cannot grow."""
    dtype = torch.long if values.typecode == "q" else torch.float32
    if not values:
        return torch.empty(0, dtype=dtype, device=like.device)
    return torch.frombuffer(values, dtype=dtype).to(like.device, copy=True)


def _report(
    logits: Tensor, tokens: Tensor, wanted: Sequence[int | None], tasks: Sequence[SampleTask] = ()
) -> list[TokenLogprob]:
    """``wanted``: number of alternatives per row, or None for no log-probability at all. ``tasks`` may name others."""
    ids = tokens.tolist()
    results = [TokenLogprob(token, 0.0, 0) for token in ids]
    rows = [row for row, count in enumerate(wanted) if count is not None]
    if not rows:
        return results
    logprobs = logits[rows].float().log_softmax(-1)
    own = logprobs.gather(1, tokens[rows][:, None])
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    most = min(max(wanted[row] or 0 for row in rows), logits.shape[1])
    values, order = largest(logprobs, most)
    columns = zip(rows, own[:, 0].tolist(), ranks, order.tolist(), values.tolist(), strict=True)
    for row, logprob, rank, top_ids, top_values in columns:
        count = wanted[row] or 0
        top = tuple(zip(top_ids[:count], top_values[:count], strict=True))
        results[row] = TokenLogprob(ids[row], logprob, rank, top)
    for place, row in enumerate(rows):
        named = tasks[row].params.logprob_token_ids if tasks else None
        if named is not None:
            values_of = logprobs[place, _ids(named, logprobs)].tolist()
            top = tuple(sorted(zip(named, values_of, strict=True), key=lambda entry: -entry[1]))
            results[row] = replace(results[row], top=top)
    return results


def _ids(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=like.device)
