"""Draws tokens from scores: temperature, min_p, top_k, top_p, and one uniform number a row through the inverse of the
cumulative distribution.

All that rows differ in goes to the device in one piece, in the order in which rows are worked on, so that rows that are
computed in the same way lie side by side. On a GPU nothing is asked for in between.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from common.models.backends.upload import upload
from common.request import SamplingParams

_TIES = 64
"""Ranks taken beyond those that are asked for: equals of the last one mostly end there, so that nobody has to look for
more of them in the whole row."""
_NUCLEUS = (1024, 16384)
"""Ranks that are taken, in turn, of a row with top_p alone before all of it is sorted: most distributions have the mass
in the first ones, and in a vocabulary of 150,000 a sort takes ten times as long on a CPU."""
_WIDTH = 64
"""Columns of the narrowest table of probabilities."""
_WHOLE, _NUCLEUS_ALONE = 0, 1
"""Ways to draw: from the whole vocabulary, from what top_p leaves. Others are the width of a table for top_k."""


def draw_rows(
    tokens: Tensor, scores: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> None:
    """Writes the drawn token of each of ``rows`` to its place in ``tokens`` [R]. scores: [R, vocab]; ``params``, with
    temperatures above 0, and ``uniforms``, in [0, 1): of each row drawn.

    Which rows are computed together changes no row's result.
    """
    vocab_size = scores.shape[1]
    ways = [_way(each, vocab_size) for each in params]
    order = sorted(range(len(rows)), key=ways.__getitem__)
    sorted_params = [params[place] for place in order]
    columns = (
        [rows[place] for place in order],
        [p.temperature for p in sorted_params],
        [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in sorted_params],
        [p.top_p for p in sorted_params],
        [p.top_k for p in sorted_params],
        [uniforms[place] for place in order],
    )
    where, temperature, floor, top_p, top_k, uniform = upload(torch.tensor(columns, dtype=torch.float64), scores.device)
    where = where.long()
    own = scores[where] / temperature.to(scores.dtype)[:, None]
    if any(p.min_p > 0 for p in params):
        least = own.amax(-1, keepdim=True) + floor.to(scores.dtype)[:, None]
        own = own.masked_fill(own < least, float("-inf"))
    drawn, begin = [], 0
    for way, members in itertools.groupby(sorted(ways)):
        part = slice(begin, begin + len(list(members)))
        if way == _WHOLE:
            drawn.append(_invert(own[part].double().softmax(-1), uniform[part]))
        elif way == _NUCLEUS_ALONE:
            drawn.append(_draw_nucleus(own[part], top_p[part, None], uniform[part]))
        else:
            drawn.append(_draw_largest(own[part], way, top_k[part, None], top_p[part, None], uniform[part]))
        begin = part.stop
    tokens[where] = torch.cat(drawn)


def _way(params: SamplingParams, vocab_size: int) -> int:
    if 0 < params.top_k < vocab_size:
        # A row's sum is over a width that its own k gives: another width could be summed in another order.
        return min(max(_WIDTH, 1 << (params.top_k - 1).bit_length()), vocab_size)
    return _NUCLEUS_ALONE if params.top_p < 1.0 else _WHOLE


def _draw_nucleus(scores: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """From the most likely tokens that have ``top_p`` [R, 1] of the whole."""
    probs, vocab_size = scores.double().softmax(-1), scores.shape[1]
    if scores.device.type != "cpu":
        order = largest(scores, vocab_size)[1]
        return order.gather(1, _invert(_cut(probs.gather(1, order), top_p), uniform)[:, None])[:, 0]
    tokens = torch.empty(len(scores), dtype=torch.long)
    rows = torch.arange(len(scores))
    for count in (*_NUCLEUS, vocab_size):
        order = largest(scores[rows], min(count, vocab_size))[1]
        ranked = probs[rows].gather(1, order)
        tokens[rows] = order.gather(1, _invert(_cut(ranked, top_p[rows]), uniform[rows])[:, None])[:, 0]
        rows = rows[ranked.cumsum(-1)[:, -1] < top_p[rows, 0]]  # what these have beyond the ranks counts too
        if not rows.shape[0]:
            break
    return tokens


def _draw_largest(scores: Tensor, width: int, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """From the ``top_k`` [R, 1] most likely tokens, ``width`` at most, and of these from those that have ``top_p`` of
    their sum."""
    values, order = largest(scores, width)
    kept = values.masked_fill(torch.arange(width, device=scores.device) >= top_k, float("-inf"))
    places = _invert(_cut(kept.double().softmax(-1), top_p), uniform)
    return order.gather(1, places[:, None])[:, 0]


def _cut(probs: Tensor, top_p: Tensor) -> Tensor:
    """``probs`` [R, n], most likely first, without those that come after ``top_p`` [R, 1]; the first one stays."""
    before = probs.cumsum(-1) - probs
    is_out = (before >= top_p) & (top_p < 1.0)
    is_out[:, 0] = False
    return probs.masked_fill(is_out, 0.0)


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row of ``scores`` [R, vocab] and their places, [R, count] each: the largest first,
    equal ones by place. (``topk`` orders equals, and picks the last ones among them, as its k makes it.)"""
    width = count + _TIES
    if width >= scores.shape[1] or scores.device.type != "cpu":  # elsewhere a sort is fast, and asking for ties slow
        values, places = scores.sort(dim=-1, descending=True, stable=True)
        return values[:, :count], places[:, :count]
    values, places = scores.topk(width, dim=-1)
    places, by_place = places.sort(-1)
    values, by_value = values.gather(1, by_place).sort(dim=-1, descending=True, stable=True)
    places = places.gather(1, by_value)
    if count:
        last = values[:, count - 1]
        for row in ((values[:, -1] == last) & (last > float("-inf"))).nonzero()[:, 0].tolist():
            num_larger = int((values[row] > last[row]).sum())
            equals = (scores[row] == last[row]).nonzero()[:, 0]
            places[row, num_larger:count] = equals[: count - num_larger]
    return values[:, :count], places[:, :count]


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """The place at which each row's running sum first exceeds ``uniform`` of its total. probs [R, n] float64, not
    normalised."""
    running = probs.cumsum(-1)
    target = uniform[:, None] * running[:, -1:]
    return torch.searchsorted(running, target, right=True)[:, 0].clamp_(max=probs.shape[1] - 1)
