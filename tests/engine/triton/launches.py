"""Calls of all ops and row ops in the shapes of models that are served, for what their kernels are compiled for.

Tensors hold nothing: no kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from common.engine.plan import Segment
from common.kv_cache.sequences.allocation import BlockTable
from common.ops.interface import ACTIVATIONS, FINAL_STEP_SIZE, StepSize
from common.ops.row_ops import Gate
from common.ops.step.attention_metadata import AttentionMetadata
from common.ops.step.check import PoolSizes
from common.ops.step.device_step import StepBuffer
from common.ops.triton.backend import TritonOps

Call = Callable[[], object]

_BLOCK_SIZE = 16
_CPU = torch.device("cpu")
# (query heads to a K/V head, head_size, head_size_v); values of 512 columns of 576 are latents
_HEADS = ((4, 64, 64), (1, 80, 80), (4, 96, 96), (4, 128, 128), (7, 128, 128), (1, 192, 128), (8, 256, 256),
          (16, 576, 512), (32, 576, 512))  # fmt: skip
# heads, groups, head_dim, state: Nemotron Nano 2, Granite 4, Bamba, Zamba 2, Falcon H1, MiniMax (lightning attention)
_MAMBA2 = (
    (128, 8, 80, 128),
    (48, 1, 64, 128),
    (128, 1, 64, 128),
    (64, 2, 64, 64),
    (24, 1, 64, 256),
    (32, 32, 128, 128),
)
# key heads, heads, key_dim, value_dim: Qwen3.5, OLMo Hybrid
_GATED_DELTA = ((16, 32, 128, 128), (30, 30, 96, 192))
# channels, state: Mamba, Jamba and Falcon Mamba, a head of Zamba
_MAMBA1 = ((8192, 16), (3712, 16))


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _step(
    lengths: Sequence[int],
    *,
    start: int = 0,
    window: int = 0,
    saves: bool = False,
    whole: tuple[tuple[int, int], ...] = (),
) -> AttentionMetadata:
    """Segments of ``lengths`` tokens from position ``start`` on; ``saves``: the state after their first token too."""
    segments = []
    for length in lengths:
        table = BlockTable(list(range(1, 2 + (start + length) // _BLOCK_SIZE)))
        offsets, slots = ((1,), (2,)) if saves else ((), ())
        segments.append(Segment("r", [0] * length, start, [table], 1, 1, offsets, slots, whole=whole))
    metadata = AttentionMetadata(segments, block_size=_BLOCK_SIZE, device=_CPU, sizes=PoolSizes(0, 0), window=window)
    metadata.on_device = StepBuffer(_CPU).write([metadata.group_tables])[0]
    return metadata


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """(Name, call) of everything that a model of ``dtype`` calls; the usual shapes of an op first."""
    ops = TritonOps()
    yield from _scans(ops, dtype)
    yield from _attention(ops, dtype)
    yield from _row_ops(ops, dtype)


def _scans(ops: TritonOps, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    step = _step([1, 4, 300], saves=True)
    n = step.num_tokens

    def rows(*shape: int) -> Tensor:
        return _tensor(n, *shape, dtype=dtype)

    weight, bias, pool = _tensor(8192, 4, dtype=dtype), _tensor(8192, dtype=dtype), _tensor(4, 8192, 3, dtype=dtype)
    yield "conv1d", partial(ops.conv1d, rows(8192), weight, bias, step, pool, silu=True)
    weight, pool, gates = _tensor(2048, 3, dtype=dtype), _tensor(4, 2048, 2, dtype=dtype), (rows(2048), rows(2048))
    yield "conv1d, gated", partial(ops.conv1d, rows(2048), weight, None, step, pool, gates=gates)
    for heads, groups, dim, size in _MAMBA2:
        d = None if groups == heads else _tensor(heads, dtype=dtype)
        step_size = FINAL_STEP_SIZE if d is None else StepSize(_tensor(heads, dtype=dtype), True, 0.0)
        inputs = rows(heads, dim), rows(heads), _tensor(heads), rows(groups, size), rows(groups, size), d
        pool = _tensor(4, heads, dim, size)
        yield f"mamba2 {heads}x{dim}x{size}", partial(ops.mamba2, *inputs, step, pool, step_size=step_size)
    for key_heads, heads, key_dim, value_dim in _GATED_DELTA:
        inputs = *(rows(key_heads, key_dim) for _ in range(2)), rows(heads, value_dim), _tensor(n, heads), rows(heads)
        pool = _tensor(4, heads, key_dim, value_dim)
        yield f"gated_delta {key_dim}x{value_dim}", partial(ops.gated_delta, *inputs, step, pool)
    inputs = *(rows(32, 128) for _ in range(3)), _tensor(n, 32, 128), rows(32)
    yield "kimi_delta 128x128", partial(ops.kimi_delta, *inputs, step, _tensor(4, 32, 128, 128))
    for channels, size in _MAMBA1:
        dt = _tensor(channels, n, dtype=dtype).T
        inputs = rows(channels), dt, _tensor(channels, size), rows(size), rows(size), _tensor(channels)
        pool, step_size = _tensor(4, channels, size), StepSize(_tensor(channels), True)
        yield f"mamba1 {channels}x{size}", partial(ops.mamba1, *inputs, step, pool, step_size=step_size)


def _attention(ops: TritonOps, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    works = {
        "1 row": _step([1], start=8191),
        "256 rows": _step([1] * 256, start=1023),
        "drafts": _step([4], start=8191),
        "prompt": _step([512]),
    }
    others = {
        "images": _step([512], whole=((3, 200),)),
        "window": _step([512], start=8192, window=4096),
        "window, 1 row": _step([1], start=8191, window=4096),
    }
    for ratio, size, size_v in _HEADS:
        is_latent = size > 512
        num_kv = 1 if is_latent else 8
        k_pool, values = (
            _tensor(1024, num_kv, _BLOCK_SIZE, columns, dtype=dtype).transpose(1, 2) for columns in (size, size_v)
        )
        v_pool = k_pool[..., :size_v] if is_latent else values
        for name, step in (works if is_latent else {**works, **others}).items():
            yield (
                f"attention {ratio}x{size}x{size_v}, {name}",
                partial(_attend, ops, step, num_kv * ratio, k_pool, v_pool, is_latent),
            )


def _attend(
    ops: TritonOps, step: AttentionMetadata, num_heads: int, k_pool: Tensor, v_pool: Tensor, is_latent: bool
) -> None:
    n, dtype, (num_kv, size), size_v = step.num_tokens, k_pool.dtype, k_pool.shape[2:], v_pool.shape[3]
    query, key = (_tensor(n, count, size, dtype=dtype) for count in (num_heads, num_kv))
    value = key[..., :size_v] if is_latent else _tensor(n, num_kv, size_v, dtype=dtype)
    ops.write_kv(key, value[..., :0] if is_latent else value, k_pool, v_pool, step)
    ops.attention(query, key, value, k_pool, v_pool, step, size**-0.5)


def _row_ops(ops: TritonOps, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    n = 4

    def rows(*shape: int) -> Tensor:
        return _tensor(n, *shape, dtype=dtype)

    norms, elementwise, rotary = ops.norms, ops.elementwise, ops.rotary
    for size, group, kind in (
        (4096, None, Gate.NONE),
        (10240, 1280, Gate.SILU_BEFORE),
        (128, None, Gate.SILU_AFTER),
        (128, None, Gate.SIGMOID_AFTER),
    ):
        gate, weight = None if kind is Gate.NONE else rows(32, size), _tensor(size, dtype=dtype)
        norm = partial(norms.rms_norm, rows(32, size), weight, gate, epsilon=1e-6, offset=1.0, group=group, kind=kind)
        yield f"rms_norm {size} {kind.name}", norm
    for terms in (1, 2, 3):
        each, factors, weight = [rows(4096)] * terms, [0.5] * terms, _tensor(4096, dtype=dtype)
        yield f"sum of {terms}", partial(norms.weighted_sum, each, factors)
        yield (
            f"norm of a sum of {terms}",
            partial(norms.rms_norm_of_sum, each, factors, weight, epsilon=1e-6, offset=0.0),
        )
    for name in ACTIVATIONS:
        yield name, partial(elementwise.activation, name, rows(4096))
    yield "silu_mul", partial(elementwise.silu_mul, rows(12288), rows(12288))
    yield "mul_sigmoid", partial(elementwise.mul_sigmoid, rows(32, 128), rows(32, 128))
    yield "delta_gates", partial(elementwise.delta_gates, rows(32), rows(32), _tensor(32), _tensor(32))
    for size, rotated, has_norms in (
        (128, 128, True),
        (128, 128, False),
        (256, 64, True),
        (64, 64, False),
        (80, 32, False),
    ):
        weights = (_tensor(size, dtype=dtype), _tensor(size, dtype=dtype)) if has_norms else None
        inputs = rows(32, size), rows(8, size), rows(rotated), rows(rotated), weights
        yield f"rotate {rotated} of {size}", partial(rotary.rotate, *inputs, epsilon=1e-6)
