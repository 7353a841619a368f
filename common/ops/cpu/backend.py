"""The compiled ops as a backend: float32 and bfloat16 on the CPU.

A call hands over one array of 64-bit words (addresses, sizes, strides, in the order of the struct that the kernel
reads) and the step's own. Kernels trust them, so shapes are checked here. ctypes lets go of the interpreter's lock
meanwhile.
"""

from __future__ import annotations

import ctypes
from array import array

import torch
from torch import Tensor

from common.ops.cpu.elementwise import ElementwiseOps
from common.ops.cpu.launch import DTYPES, find_kernel, launch
from common.ops.cpu.linear import LinearOps
from common.ops.cpu.norm import NormOps
from common.ops.interface import FINAL_STEP_SIZE, Ops, StepSize
from common.ops.step.attention_metadata import AttentionMetadata

_OPS = ("conv1d", "mamba2", "gated_delta", "kimi_delta", "mamba1", "write_kv", "attention")


class CppOps(Ops):
    """Scans are the recurrences themselves and attention takes keys in tiles of their position: outputs and states are
    bitwise the same however a prompt was cut into segments. ``linears``: the kernels for packed weights;
    ``norms``: those for norms; ``elementwise``: what is left between them."""

    name = "cpp"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library  # keeps it loaded
        self.linears = LinearOps(library)
        self.norms = NormOps(library)
        self.elementwise = ElementwiseOps(library)
        self._functions = {name: find_kernel(library, name) for name in _OPS}

    def _call(self, name: str, words: list[int], metadata: AttentionMetadata, *kept: object) -> None:
        launch(self._functions[name], words, metadata.packed.address, kept)

    def activation(self, name: str, x: Tensor) -> Tensor:
        return self.elementwise.activation(name, x)

    def conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        metadata: AttentionMetadata,
        pool: Tensor,
        *,
        silu: bool = False,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        num_tokens, channels = x.shape
        kernel = weight.shape[1]
        _check("conv1d", num_tokens == metadata.num_tokens, x)
        _check("conv1d weight", weight.shape == (channels, kernel), weight)
        _check_pool("conv1d", pool, (channels, kernel - 1))
        x = _adjacent(x)
        weight, bias = weight.contiguous(), _flat(bias, channels)
        gate_words = [0, 0, 0, 0]
        if gates is not None:
            for gate in gates:
                _check("conv1d gate", gate.shape == x.shape and gate.dtype == x.dtype, gate)
            gates = (_adjacent(gates[0]), _adjacent(gates[1]))
            gate_words = [word for gate in gates for word in (gate.data_ptr(), gate.stride(0))]
        out = x.new_empty(num_tokens, channels)
        words = [
            *(x.data_ptr(), DTYPES[x.dtype], x.stride(0)),
            *(weight.data_ptr(), DTYPES[weight.dtype], *_optional(bias)),
            *(pool.data_ptr(), DTYPES[pool.dtype], pool.stride(0), out.data_ptr()),
            *(channels, kernel, silu, torch.get_num_threads()),
            *gate_words,
        ]
        self._call("conv1d", words, metadata, weight, bias)
        return out

    def mamba2(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        metadata: AttentionMetadata,
        pool: Tensor,
        *,
        step_size: StepSize = FINAL_STEP_SIZE,
    ) -> Tensor:
        num_tokens, heads, head_dim = x.shape
        groups, state = b.shape[1:]
        _check("mamba2", num_tokens == metadata.num_tokens and heads % groups == 0, x)
        _check("mamba2 dt", dt.shape == (num_tokens, heads), dt)
        _check("mamba2 b", b.shape == c.shape == (num_tokens, groups, state), b)
        _check_pool("mamba2", pool, (heads, head_dim, state), torch.float32)
        x, b, c = _adjacent(x), _adjacent(b), _adjacent(c)
        a, d, bias = a.contiguous(), _flat(d, heads), _flat(step_size.bias, heads)
        _check("mamba2 a", a.shape == (heads,), a)
        limits = array("f", (step_size.low, step_size.high))
        out = x.new_empty(num_tokens, heads, head_dim)
        words = [
            *_tensor(x)[:4],
            *_tensor(dt),
            *_optional(bias),
            *(step_size.softplus, limits.buffer_info()[0], a.data_ptr(), DTYPES[a.dtype]),
            *_tensor(b)[:4],
            *_tensor(c)[:4],
            *_optional(d),
            *(pool.data_ptr(), pool.stride(0), out.data_ptr()),
            *(heads, groups, head_dim, state, torch.get_num_threads()),
        ]
        self._call("mamba2", words, metadata, limits, a, d, bias)
        return out

    def gated_delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        metadata: AttentionMetadata,
        pool: Tensor,
    ) -> Tensor:
        _check("gated_delta decay", decay.shape == beta.shape, decay)
        return self._delta("gated_delta", query, key, value, decay, beta, metadata, pool)

    def kimi_delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        metadata: AttentionMetadata,
        pool: Tensor,
    ) -> Tensor:
        _check("kimi_delta decay", decay.shape == (*beta.shape, key.shape[-1]), decay)
        return self._delta("kimi_delta", query, key, value, _adjacent(decay), beta, metadata, pool)

    def _delta(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        metadata: AttentionMetadata,
        pool: Tensor,
    ) -> Tensor:
        num_tokens, key_heads, key_dim = key.shape
        heads, value_dim = value.shape[1:]
        _check(name, num_tokens == metadata.num_tokens and heads % key_heads == 0, key)
        _check(f"{name} query", query.shape == key.shape, query)
        _check(f"{name} value", value.shape[0] == num_tokens, value)
        _check(f"{name} beta", beta.shape == (num_tokens, heads), beta)
        _check_pool(name, pool, (heads, key_dim, value_dim), torch.float32)
        query, key, value = _adjacent(query), _adjacent(key), _adjacent(value)
        out = value.new_empty(num_tokens, heads, value_dim)
        words = [
            *_tensor(query)[:4],
            *_tensor(key)[:4],
            *_tensor(value)[:4],
            *_tensor(decay)[:4],
            *_tensor(beta),
            *(pool.data_ptr(), pool.stride(0), out.data_ptr()),
            *(key_heads, heads, key_dim, value_dim, torch.get_num_threads()),
        ]
        self._call(name, words, metadata)
        return out

    def mamba1(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        metadata: AttentionMetadata,
        pool: Tensor,
        *,
        step_size: StepSize = FINAL_STEP_SIZE,
    ) -> Tensor:
        num_tokens, channels = x.shape
        state = b.shape[1]
        _check("mamba1", num_tokens == metadata.num_tokens, x)
        _check("mamba1 dt", dt.shape == x.shape, dt)
        _check("mamba1 a", a.shape == (channels, state), a)
        _check("mamba1 b", b.shape == c.shape == (num_tokens, state), b)
        _check_pool("mamba1", pool, (channels, state), torch.float32)
        a, d, bias = a.contiguous(), _flat(d, channels), _flat(step_size.bias, channels)
        limits = array("f", (step_size.low, step_size.high))
        out = torch.empty(num_tokens, channels)
        words = [
            *_tensor(x),
            *_tensor(dt),
            *_optional(bias),
            *(step_size.softplus, limits.buffer_info()[0], a.data_ptr(), DTYPES[a.dtype]),
            *_tensor(b),
            *_tensor(c),
            *_optional(d),
            *(pool.data_ptr(), pool.stride(0), out.data_ptr()),
            *(channels, state, torch.get_num_threads()),
        ]
        self._call("mamba1", words, metadata, limits, a, d, bias)
        return out

    def write_kv(self, key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, metadata: AttentionMetadata) -> None:
        (kv_heads, head_size), head_size_v = key.shape[1:], value.shape[-1]
        _check_kv(key, value, k_pool, v_pool, metadata)
        key, value = _adjacent(key.to(k_pool.dtype)), _adjacent(value.to(v_pool.dtype))
        words = [
            *(key.data_ptr(), *key.stride()[:2], value.data_ptr(), *value.stride()[:2]),
            *(k_pool.data_ptr(), *k_pool.stride()[:3], v_pool.data_ptr(), *v_pool.stride()[:3]),
            *(k_pool.element_size(), kv_heads, head_size, head_size_v),
        ]
        self._call("write_kv", words, metadata)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        num_tokens, heads, head_size = query.shape
        kv_heads, head_size_v = value.shape[1:]
        _check_kv(key, value, k_pool, v_pool, metadata)
        _check("attention", key.shape[2] == head_size and heads % kv_heads == 0, query)
        _check("attention", num_tokens == metadata.num_tokens, query)
        query, key, value = _adjacent(query), _adjacent(key.to(k_pool.dtype)), _adjacent(value.to(v_pool.dtype))
        scales = array("f", (scale,))
        out = query.new_empty(num_tokens, heads, head_size_v)
        words = [
            *_tensor(query)[:4],
            *(key.data_ptr(), *key.stride()[:2], value.data_ptr(), *value.stride()[:2]),
            *(k_pool.data_ptr(), *k_pool.stride()[:3], v_pool.data_ptr(), *v_pool.stride()[:3]),
            *(DTYPES[k_pool.dtype], out.data_ptr(), scales.buffer_info()[0]),
            *(heads, kv_heads, head_size, head_size_v, metadata.window, torch.get_num_threads()),
        ]
        self._call("attention", words, metadata, scales)
        return out


def _tensor(x: Tensor) -> tuple[int, ...]:
    return (x.data_ptr(), DTYPES[x.dtype], *x.stride())


def _optional(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.data_ptr(), DTYPES[x.dtype])


def _adjacent(x: Tensor) -> Tensor:
    """x with the elements of its last dimension side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _flat(x: Tensor | None, size: int) -> Tensor | None:
    if x is not None:
        _check("per-channel parameter", x.shape == (size,), x)
        x = x.contiguous()
    return x


def _check(what: str, holds: bool, x: Tensor) -> None:
    if not holds:
        raise RuntimeError(f"{what}: {tuple(x.shape)} does not fit the other tensors or the step")


def _check_pool(what: str, pool: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """The pool must hold one contiguous ``shape`` per slot."""
    fits = pool.shape[1:] == shape and (dtype is None or pool.dtype == dtype)
    step = 1
    for size, stride in zip(reversed(shape), reversed(pool.stride()), strict=False):
        fits = fits and (stride == step or size == 1)
        step *= size
    if not fits:
        raise RuntimeError(f"{what}: the pool holds {pool.dtype} {tuple(pool.shape[1:])}, needed is {shape}")


def _check_kv(key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, metadata: AttentionMetadata) -> None:
    for x, pool in ((key, k_pool), (value, v_pool)):
        if x.shape[0] != metadata.num_tokens or x.shape[1:] != pool.shape[2:] or pool.stride(3) != 1:
            raise RuntimeError(f"attention: {tuple(x.shape)} rows do not fit a pool of {tuple(pool.shape[2:])}")
    if k_pool.dtype != v_pool.dtype:
        raise RuntimeError(f"attention: pools of {k_pool.dtype} and {v_pool.dtype}")
