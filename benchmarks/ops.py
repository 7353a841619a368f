"""The ops alone, compiled beside torch and beside stock transformers, in one process: ``python -m benchmarks.ops``.

Shapes are those of one layer of the hybrids of ``benchmarks.engine`` at sizes S, M and L (hidden 256, 768, 1536): a
Mamba-2, gated-delta, Kimi-delta, Mamba-1 or short-conv layer, or attention with heads of 64 and two query heads per K/V
head ("attention 16/4" is 16 query and 4 K/V heads at every size). Work is a prefill, or a decode step behind 512
tokens. Calls take turns over the pools of as many layers as the model has, so that a state is as far away in memory as
in a real step. Contestants alternate; figures are medians of one call in milliseconds. "stock" is the function that the
stock model calls (its chunked scan, scaled_dot_product_attention, or conv1d), from an empty state; it has none that
decodes from slots.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from common.engine.plan import Segment
from common.kv_cache.sequences.allocation import BlockTable
from common.models.loading.fingerprint import user_cache_dir
from common.ops.interface import Ops, StepSize
from common.ops.select import create_ops
from common.ops.step.attention_metadata import AttentionMetadata
from common.ops.step.check import PoolSizes

BLOCK_SIZE = 16
PROMPT_TOKENS = 512
SIZES: Mapping[str, tuple[int, int]] = {"S": (256, 6), "M": (768, 12), "L": (1536, 24)}
"""Hidden size and number of layers."""
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
KERNELS = ("mamba2", "gated_delta", "kimi_delta", "mamba1", "conv1d", "attention", "attention 16/4")
CPU = torch.device("cpu")

Call = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """``batch`` sequences of ``num_tokens`` more tokens each, behind ``start``."""

    batch: int
    num_tokens: int
    start: int = 0

    @property
    def rows(self) -> int:
        return self.batch * self.num_tokens

    def __str__(self) -> str:
        return f"decode {self.batch} @{self.start}" if self.start else f"prefill {self.batch}x{self.num_tokens}"

    def metadata(self) -> AttentionMetadata:
        """Sequence i reads and writes slot i + 1 and has blocks of its own."""
        blocks = -(-(self.start + self.num_tokens) // BLOCK_SIZE)
        return AttentionMetadata(
            [
                Segment(
                    str(i),
                    [0] * self.num_tokens,
                    self.start,
                    (BlockTable(list(range(1 + i * blocks, 1 + (i + 1) * blocks))),),
                    i + 1 if self.start else 0,
                    i + 1,
                )
                for i in range(self.batch)
            ],
            block_size=BLOCK_SIZE,
            device=CPU,
            sizes=PoolSizes(1 + self.batch * blocks, 1 + self.batch),
        )


class Layers:
    """The pools of as many layers as a model has; each call of ``next`` gives another one's."""

    def __init__(self, count: int, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        self._pools = [torch.randn(shape).to(dtype) * 0.1 for _ in range(count)]
        for pool in self._pools:
            pool[0] = 0.0
        self._turn = 0

    def next(self) -> Tensor:
        self._turn += 1
        return self._pools[self._turn % len(self._pools)]


def make_calls(
    kernel: str, size: str, dtype: torch.dtype, work: Work, backends: Mapping[str, Ops], max_pools: int
) -> dict[str, Call]:
    """One call per contestant, all on the same inputs."""
    hidden, layers = SIZES[size]
    torch.manual_seed(0)
    n, metadata, slots, pools = work.rows, work.metadata(), work.batch + 1, min(max_pools, layers * 3 // 4)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    def of(run: Callable[[Ops], object], stock: Call | None) -> dict[str, Call]:
        calls: dict[str, Call] = {name: (lambda ops=ops: run(ops)) for name, ops in backends.items()}
        return calls if stock is None or work.start else calls | {"stock": stock}

    def batched(x: Tensor) -> Tensor:
        return x.view(work.batch, work.num_tokens, *x.shape[1:])

    if kernel == "mamba2":
        heads, dim, state = 2 * hidden // 64, 64, 128
        x, dt, b, c = rand(n, heads, dim), rand(n, heads), rand(n, 1, state), rand(n, 1, state)
        a, d, bias = -torch.rand(heads) * 8 - 1, torch.ones(heads), torch.randn(heads) - 3
        pool, steps = Layers(pools, slots, heads, dim, state), StepSize(bias, True, 0.0, float("inf"))
        return of(
            lambda ops: ops.mamba2(x, dt, a, b, c, d, metadata, pool.next(), step_size=steps),
            lambda: mamba2_chunk_scan(
                *(batched(t) for t in (x, dt)), a, batched(b), batched(c), chunk_size=256, D=d, dt_bias=bias,
                dt_softplus=True,
            ),
        )  # fmt: skip
    if kernel in ("gated_delta", "kimi_delta"):
        heads, dim = hidden // 128 * (2 if kernel == "gated_delta" else 1), 128
        q, k, v = rand(n, hidden // 128, dim), rand(n, hidden // 128, dim), rand(n, heads, dim)
        decay = -torch.rand(n, heads, *([dim] if kernel == "kimi_delta" else []))
        beta, pool = torch.rand(n, heads), Layers(pools, slots, heads, dim, dim)
        rule = torch_chunk_gated_delta_rule if kernel == "gated_delta" else chunk_kimi_delta_attention
        queries, keys = (x.repeat_interleave(heads // (hidden // 128), 1) for x in (q, k))
        return of(
            lambda ops: getattr(ops, kernel)(q, k, v, decay, beta, metadata, pool.next()),
            lambda: rule(
                *(batched(t) for t in (queries, keys, v)), g=batched(decay), beta=batched(beta),
                use_qk_l2norm_in_kernel=True,
            ),
        )  # fmt: skip
    if kernel == "mamba1":
        channels, state = 2 * hidden, 16
        x, dt, b, c = rand(n, channels), rand(n, channels), rand(n, state), rand(n, state)
        a, d, bias = -torch.rand(channels, state) * 8 - 1, torch.ones(channels), torch.randn(channels) - 3
        pool, steps = Layers(pools, slots, channels, state), StepSize(bias, True)
        return of(lambda ops: ops.mamba1(x, dt, a, b, c, d, metadata, pool.next(), step_size=steps), None)
    if kernel == "conv1d":
        channels, width = 2 * hidden + 256, 4
        x, weight, bias = rand(n, channels), rand(channels, width), rand(channels)
        pool = Layers(pools, slots, channels, width - 1, dtype=dtype)
        return of(
            lambda ops: ops.conv1d(x, weight, bias, metadata, pool.next(), silu=True),
            lambda: F.silu(F.conv1d(batched(x).transpose(1, 2), weight[:, None], bias, padding=3, groups=channels)),
        )
    heads, kv_heads, dim = (16, 4, 64) if kernel.endswith("16/4") else (hidden // 64, hidden // 128, 64)
    q, k, v = rand(n, heads, dim), rand(n, kv_heads, dim), rand(n, kv_heads, dim)
    blocks = 1 + work.batch * -(-(work.start + work.num_tokens) // BLOCK_SIZE)
    pool = Layers(min(max_pools, layers // 4), 2, blocks, BLOCK_SIZE, kv_heads, dim, dtype=dtype)

    def attend(ops: Ops) -> None:
        k_pool, v_pool = pool.next()
        ops.write_kv(k, v, k_pool, v_pool, metadata)
        ops.attention(q, k, v, k_pool, v_pool, metadata, dim**-0.5)

    return of(
        attend,
        lambda: F.scaled_dot_product_attention(
            *(batched(t).transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
        ),
    )


def alternate(calls: Mapping[str, Call], budget_s: float, clock: Callable[[], float]) -> dict[str, float]:
    """Median milliseconds of one call of each: rounds until ``budget_s`` is spent, 5 at least, after one to warm
    up."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end_s = None
    while end_s is None or time.perf_counter() < end_s or min(map(len, samples.values())) < 5:
        for name, call in calls.items():
            inner = 1 if end_s is None or statistics.median(samples[name] or [1e9]) > 1.0 else 8
            for _ in range(inner):
                begin_s = clock()
                call()
                if end_s is not None:
                    samples[name].append(1e3 * (clock() - begin_s))
        end_s = end_s or time.perf_counter() + budget_s
    return {name: statistics.median(values) for name, values in samples.items()}


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    works = [Work(1, 1024), Work(8, 512), *(Work(batch, 1, args.context) for batch in args.batch)]
    for size in args.size:
        for kernel in args.kernel:
            for name in args.dtype:
                dtype = getattr(torch, name)
                backends = {
                    backend: create_ops(backend, dtype=dtype, device=CPU, cache_dir=user_cache_dir())
                    for backend in args.backend
                }
                for work in works:
                    if args.work is not None and str(work).split()[0] != args.work:
                        continue
                    calls = make_calls(kernel, size, dtype, work, backends, args.max_pools)
                    if not args.stock:
                        calls.pop("stock", None)
                    times = alternate(calls, args.seconds, CLOCKS[args.clock])
                    yield {"kernel": kernel, "size": size, "dtype": name, "work": str(work), **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=tuple(SIZES), default=["S", "M", "L"])
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--backend", nargs="+", choices=("torch", "cpp"), default=["cpp", "torch"])
    parser.add_argument("--no-stock", dest="stock", action="store_false", help="leave stock transformers out")
    parser.add_argument("--work", choices=("prefill", "decode"), help="only these")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32], help="decode batch sizes")
    parser.add_argument("--context", type=int, default=PROMPT_TOKENS, help="tokens before a decode step")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for one line, at least 5 rounds are run")
    parser.add_argument("--max-pools", type=int, default=24, help="pools to take turns over, at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="cpu", help="cpu: the process's CPU time")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    configuration = {
        **{name: value for name, value in vars(args).items() if name != "json"},
        "cpu": next((line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), "")
        or platform.machine(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(configuration) if args.json else "\n".join(f"{k}: {v}" for k, v in configuration.items()))
    if not args.json:
        print(f"{'kernel':<15}size {'dtype':<9}{'work':<15}   cpp ms   torch ms   stock ms  torch/cpp  stock/cpp")
    with torch.inference_mode():
        for result in measure(args):
            print(json.dumps(result) if args.json else _line(result))
            sys.stdout.flush()


def _line(result: Mapping[str, object]) -> str:
    cells = [f"{result['kernel']:<15}{result['size']:<5}{result['dtype']:<9}{result['work']:<15}"]
    times = {name: result.get(name) for name in ("cpp", "torch", "stock")}
    cells += [f"{value:11.3f}" if isinstance(value, float) else " " * 11 for value in times.values()]
    ours = times["cpp"]
    for other in (times["torch"], times["stock"]):
        known = isinstance(ours, float) and isinstance(other, float)
        cells.append(f"{other / ours:11.2f}" if known else " " * 11)
    return "".join(cells).rstrip()


if __name__ == "__main__":
    main()
