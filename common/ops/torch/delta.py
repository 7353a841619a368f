"""The delta rules in plain torch: one decay per head (gated delta, arXiv 2412.06464) or one per channel of the key
(Kimi delta, arXiv 2510.26692), in the UT-transform chunked form of arXiv 2406.06484.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.step.chunks import SpanChunks, chunk_size
from common.ops.step.state_metadata import StateMetadata

_HEAD_CHUNK = 64
"""Most rows of a chunk where a head has one decay: products inside a chunk cost its square, the walk one step each."""
_CHANNEL_CHUNK = 16
"""Most rows of a chunk where each channel has a decay: products inside a chunk take chunk x key_dim exponentials a
row, so chunks are short."""
_L2_EPS = 1e-6
"""Added to a squared norm before its root, as transformers' own delta rules do."""


def delta_varlen(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, metadata: StateMetadata, pool: Tensor
) -> Tensor:
    """The delta rule over the packed rows of a step.

    Args:
        query, key: [num_tokens, key_heads, key_dim], not normalised; value: [num_tokens, value_heads, value_dim].
        decay: [num_tokens, value_heads, 1 or key_dim] log decay <= 0; beta: [num_tokens, value_heads].
        pool: [num_slots, value_heads, key_dim, value_dim] float32.

    Returns: [num_tokens, value_heads, value_dim] in value's dtype.
    """
    out = torch.empty_like(value)
    query = _l2norm(query.float()) * query.shape[-1] ** -0.5
    key = _l2norm(key.float())
    decay, beta = decay.float(), beta.float()
    if metadata.num_decode:
        rows = metadata.decode_rows
        out[rows] = _decode(query[rows], key[rows], value[rows].float(), decay[rows], beta[rows], metadata, pool).to(
            out.dtype
        )
    if metadata.spans:
        limit = _HEAD_CHUNK if decay.shape[-1] == 1 else _CHANNEL_CHUNK
        chunks = metadata.chunks(chunk_size(metadata.longest_run, limit))
        _spans(query, key, value, decay, beta, chunks, pool, out)
    return out


def _decode(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, metadata: StateMetadata, pool: Tensor
) -> Tensor:
    num_rows, num_heads, value_dim = value.shape
    key_dim = key.shape[-1]
    repeats = num_heads // key.shape[1]
    batch = num_rows * num_heads
    q = query[:, :, None].expand(-1, -1, repeats, -1).reshape(batch, 1, key_dim)
    k = key[:, :, None].expand(-1, -1, repeats, -1).reshape(batch, 1, key_dim)
    state = pool[metadata.decode_src].view(batch, key_dim, value_dim)
    state.mul_(decay.exp().view(batch, -1, 1))
    delta = (value.view(batch, 1, value_dim) - torch.bmm(k, state)) * beta.view(batch, 1, 1)
    state.baddbmm_(k.transpose(1, 2), delta)
    metadata.store_decode(pool, state.view(num_rows, num_heads, key_dim, value_dim))
    return torch.bmm(q, state).view(num_rows, num_heads, value_dim)


def _spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunks: SpanChunks,
    pool: Tensor,
    out: Tensor,
) -> None:
    num_heads, value_dim = value.shape[1:]
    num_key_heads, key_dim = key.shape[1:]
    count, size = chunks.rows.shape
    grouped = (count, num_key_heads, num_heads // num_key_heads, size)
    log_decay, rate = chunks.gather(decay), chunks.gather(beta)
    if chunks.padding is not None:
        log_decay = log_decay.masked_fill(chunks.padding[:, :, None, None], 0.0)
        rate = rate.masked_fill(chunks.padding[:, :, None], 0.0)  # a rate of 0 writes nothing
    # [chunks, key heads, repeats, size, 1 or key_dim]
    cumulative = log_decay.cumsum(1).transpose(1, 2).reshape(*grouped, -1)
    rate = rate.transpose(1, 2).reshape(grouped)[..., None]
    q = chunks.gather(query).transpose(1, 2)[:, :, None]  # [chunks, key heads, 1, size, key_dim]
    k = chunks.gather(key).transpose(1, 2)[:, :, None]
    v = chunks.gather(value).float().transpose(1, 2).reshape(*grouped, value_dim)

    products = _head_products if decay.shape[-1] == 1 else _channel_products
    keys_by_keys, queries_by_keys = products(q, k, cumulative)
    system = keys_by_keys * rate  # unit lower triangular: the diagonal is not read
    since_begin = cumulative.exp()
    right = torch.cat([v * rate, k * (rate * since_begin)], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_values, read_keys = solved.split([value_dim, key_dim], -1)

    total = cumulative[..., -1:, :]
    reads = torch.cat([read_keys, q * since_begin], -2).flatten(1, 2)  # [chunks, heads, 2 * size, key_dim]
    writes = (k * (total - cumulative).exp()).flatten(1, 2).transpose(-1, -2)  # [chunks, heads, key_dim, size]
    new_values = new_values.flatten(1, 2)
    chunk_decay = total.exp().view(count, num_heads, -1, 1)
    corrected, past = torch.empty_like(new_values), torch.empty_like(new_values)
    state = torch.empty(0)
    for i, step in enumerate(chunks.walk):
        if step.load_slot is not None:
            state = pool[step.load_slot]
        read = torch.bmm(reads[i], state)
        torch.sub(new_values[i], read[:, :size], out=corrected[i])
        past[i] = read[:, size:]
        state = torch.baddbmm(state * chunk_decay[i], writes[i], corrected[i])
        for slot in step.store_slots:
            pool[slot] = state
    chunks.scatter(out, (queries_by_keys.flatten(1, 2) @ corrected).add_(past).transpose(1, 2))


def _head_products(q: Tensor, k: Tensor, cumulative: Tensor) -> tuple[Tensor, Tensor]:
    """[..., size, size]: of row i's key and of its query with row j's key, decayed from j to i; 0 above the
    diagonal."""
    between = (cumulative - cumulative.transpose(-1, -2)).clamp_(max=0.0).exp_().tril_()
    keys = k.transpose(-1, -2)
    return (k @ keys) * between, (q @ keys) * between


def _channel_products(q: Tensor, k: Tensor, cumulative: Tensor) -> tuple[Tensor, Tensor]:
    """As above, column by column: no product of exponentials that overflow alone, no [size, size, key_dim]."""
    size = q.shape[-2]
    keys_by_keys = cumulative.new_zeros(*cumulative.shape[:-1], size)
    queries_by_keys = torch.zeros_like(keys_by_keys)
    for j in range(size):
        decayed = (cumulative[..., j:, :] - cumulative[..., j : j + 1, :]).exp_().mul_(k[..., j : j + 1, :])
        keys_by_keys[..., j:, j] = (k[..., j:, :] * decayed).sum(-1)
        queries_by_keys[..., j:, j] = (q[..., j:, :] * decayed).sum(-1)
    return keys_by_keys, queries_by_keys


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _L2_EPS)
