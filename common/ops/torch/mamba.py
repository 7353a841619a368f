"""The Mamba-1 and Mamba-2 scans in plain torch, in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.step.chunks import SpanChunks, chunk_size
from common.ops.step.state_metadata import StateMetadata

_MAMBA2_CHUNK = 64
"""Most rows of a chunk: scores inside a chunk cost its square, the walk over chunks one step each."""
_MAMBA1_CHUNK = 64
"""Most rows of a chunk: each is two wide steps of the loop over a chunk's rows."""


def mamba2_varlen(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    metadata: StateMetadata,
    pool: Tensor,
) -> Tensor:
    """Mamba-2 scan in its chunked (SSD) form, arXiv 2405.21060; groups share B and C, heads are never repeated.

    Args:
        x: [num_tokens, heads, head_dim]; dt: [num_tokens, heads] step sizes, final (bias, softplus and limits applied).
        a: [heads] negative; b, c: [num_tokens, groups, state]; d: [heads] skip or None.
        pool: [num_slots, heads, head_dim, state] float32.

    Returns: [num_tokens, heads, head_dim] in x's dtype.
    """
    out = torch.empty_like(x)
    dt, a = dt.float(), a.float()
    if metadata.num_decode:
        rows = metadata.decode_rows
        out[rows] = _mamba2_decode(x[rows].float(), dt[rows], a, b[rows].float(), c[rows].float(), metadata, pool).to(
            out.dtype
        )
    if metadata.spans:
        chunks = metadata.chunks(chunk_size(metadata.longest_run, _MAMBA2_CHUNK))
        _mamba2_spans(x, dt, a, b, c, chunks, pool, out)
    if d is not None:
        out = (out.float() + x.float() * d.float()[:, None]).to(x.dtype)
    return out


def _mamba2_decode(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, metadata: StateMetadata, pool: Tensor
) -> Tensor:
    num_rows, num_heads, head_dim = x.shape
    num_groups, state_size = b.shape[1:]
    state = pool[metadata.decode_src].view(num_rows, num_heads, head_dim, state_size)
    state.mul_(torch.exp(dt * a)[:, :, None, None])
    grouped = state.view(num_rows * num_groups, -1, state_size)  # [rows * groups, heads of the group * head_dim, state]
    scaled = (dt[:, :, None] * x).view(num_rows * num_groups, -1, 1)
    grouped.baddbmm_(scaled, b.reshape(num_rows * num_groups, 1, state_size))
    metadata.store_decode(pool, state)
    return torch.bmm(grouped, c.reshape(num_rows * num_groups, state_size, 1)).view(num_rows, num_heads, head_dim)


def _mamba2_spans(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunks: SpanChunks, pool: Tensor, out: Tensor
) -> None:
    num_heads, head_dim = x.shape[1:]
    num_groups, state_size = b.shape[1:]
    count, size = chunks.rows.shape
    per_group = num_heads // num_groups
    steps = chunks.gather(dt)
    if chunks.padding is not None:
        steps = steps.masked_fill(chunks.padding[:, :, None], 0.0)  # a step of 0 neither decays nor adds
    decay = (steps * a).cumsum(1)  # [chunks, size, heads], log of the decay since the chunk's begin
    scaled = chunks.gather(x).float().mul_(steps[..., None])  # [chunks, size, heads, head_dim]
    keys = chunks.gather(b).float().transpose(1, 2)  # [chunks, groups, size, state]
    queries = chunks.gather(c).float().transpose(1, 2)
    total = decay[:, -1]  # [chunks, heads]

    # What each chunk adds to the state: sum over its rows of decay to the end * x * b.
    weighted = scaled * torch.exp(total[:, None] - decay)[..., None]
    added = weighted.view(count, size, num_groups, per_group * head_dim).permute(0, 2, 3, 1) @ keys
    added = added.view(count, num_heads, head_dim, state_size)
    before = _walk_decayed(chunks, torch.exp(total)[:, :, None, None], added, pool)

    # Inside the chunk: one score matrix per group, weighted by each head's own decay.
    by_head = decay.transpose(1, 2)  # [chunks, heads, size]
    weights = (by_head[..., None] - by_head[:, :, None]).clamp_(max=0.0).exp_().tril_()
    scores = queries @ keys.transpose(-1, -2)  # [chunks, groups, size, size]
    weights.view(count, num_groups, per_group, size, size).mul_(scores[:, :, None])
    result = (weights @ scaled.transpose(1, 2)).transpose(1, 2)  # [chunks, size, heads, head_dim]

    # From before the chunk.
    past = queries @ before.view(count, num_groups, per_group * head_dim, state_size).transpose(-1, -2)
    past = past.transpose(1, 2).reshape(count, size, num_heads, head_dim)
    chunks.scatter(out, torch.addcmul(result, past, torch.exp(decay)[..., None]))


def mamba1_varlen(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, metadata: StateMetadata, pool: Tensor
) -> Tensor:
    """Mamba-1 selective scan, arXiv 2312.00752.

    A span of n tokens is cut into some sqrt(n) chunks that advance side by side: once from zero to learn what each
    chunk adds, then along the chain of chunks, then again from the right begin for the outputs. A few
    sqrt(n) wide steps, not n.

    Args:
        x: [num_tokens, channels]; dt: [num_tokens, channels] step sizes, final (bias and softplus applied).
        a: [channels, state] negative; b, c: [num_tokens, state]; d: [channels] skip or None.
        pool: [num_slots, channels, state] float32.

    Returns: [num_tokens, channels] float32, not gated.
    """
    x, dt, a, b, c = x.float(), dt.float(), a.float(), b.float(), c.float()
    out = torch.empty_like(x)
    if metadata.num_decode:
        rows = metadata.decode_rows
        state = pool[metadata.decode_src]
        _mamba1_advance(state, dt[rows], x[rows], a, b[rows])
        out[rows] = torch.bmm(state, c[rows][:, :, None])[:, :, 0]
        metadata.store_decode(pool, state)
    if metadata.spans:
        size = chunk_size(int((metadata.longest_run / 2) ** 0.5), _MAMBA1_CHUNK)  # least of 2 * size + length / size
        _mamba1_spans(x, dt, a, b, c, metadata.chunks(size), pool, out)
    return out if d is None else torch.addcmul(out, x, d.float())


def _mamba1_advance(state: Tensor, dt: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
    """One token, in place. state [n, channels, state]; dt, x [n, channels]; b [n, state]."""
    state.mul_(torch.exp(dt[..., None] * a)).addcmul_((dt * x)[..., None], b[:, None])


def _mamba1_spans(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunks: SpanChunks, pool: Tensor, out: Tensor
) -> None:
    count, size = chunks.rows.shape
    steps = chunks.gather(dt)
    if chunks.padding is not None:
        steps = steps.masked_fill(chunks.padding[:, :, None], 0.0)
    # [size, chunks, ...]: the loop below takes one place of every chunk at a time.
    xs, steps = chunks.gather(x).transpose(0, 1).contiguous(), steps.transpose(0, 1).contiguous()
    bs, cs = chunks.gather(b).transpose(0, 1).contiguous(), chunks.gather(c).transpose(0, 1).contiguous()
    added = x.new_zeros(count, *a.shape)
    for i in range(size):
        _mamba1_advance(added, steps[i], xs[i], a, bs[i])
    state = _walk_decayed(chunks, torch.exp(steps.sum(0)[..., None] * a), added, pool)
    results = torch.empty_like(xs)
    for i in range(size):
        _mamba1_advance(state, steps[i], xs[i], a, bs[i])
        torch.bmm(state, cs[i][:, :, None], out=results[i][:, :, None])
    chunks.scatter(out, results.transpose(0, 1))


def _walk_decayed(chunks: SpanChunks, decay: Tensor, added: Tensor, pool: Tensor) -> Tensor:
    """State before each chunk, [chunks, *state], where a chunk turns a state s into ``decay * s + added``; stores on
    the way."""
    before = torch.empty_like(added)
    state = added
    for i, step in enumerate(chunks.walk):
        before[i] = state if step.load_slot is None else pool[step.load_slot]
        state = torch.addcmul(added[i], before[i], decay[i])
        for slot in step.store_slots:
            pool[slot] = state
    return before
