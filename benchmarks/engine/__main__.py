"""The engine's forward beside stock transformers, in one process: ``python -m benchmarks.engine``.

Models with random weights are made on the spot. Measured are prefills and one decode step at several batch sizes behind
prompts of 512 tokens: our ops and stock (static batch, its own cache) take turns, so that whatever else the machine
does hits all alike. Figures are medians in milliseconds; ``of roof`` is our share of what the machine can do, measured
right before and after ours in every round: of its matrix product in a prefill (GF/s; in float32 where
that is faster), of its read bandwidth in a decode step (GB/s). Weights count 16 bits each there, also where ours take
12: a step can be above all of it. ``of best``: of the best rate of the whole run, which may have lasted 50 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.engine.contestants import Contestant, Engine, Nodes, Stock
from benchmarks.engine.models import FAMILIES, SIZES, make_checkpoint
from benchmarks.engine.overhead import print_overhead
from benchmarks.engine.roofline import Machine, decode_bytes, prefill_flops
from common.kv_cache.spec import ModelGeometry
from common.models.loading.loader import load_model
from common.models.loading.quiet import quiet_transformers

CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True)
class Work:
    """``cost``: what it takes at least, in what ``rate`` gives per second. ``inner``: calls per round."""

    name: str
    prepare: Callable[[Contestant], Callable[[], None]]
    inner: int
    cost: float
    rate: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Result:
    """``medians``: milliseconds of one call; ``rates``: the machine's in each round, before or after ours."""

    medians: dict[str, float]
    rates: list[float]
    share: float


def alternate(
    contestants: Mapping[str, Callable[[], None]], work: Work, repeat: int, clock: Callable[[], float]
) -> Result:
    """One round to warm up, then ``repeat`` rounds of ``inner`` calls each. The first contestant is held against the
    machine's rate, round by round."""
    ours = next(iter(contestants))
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    rates: list[float] = []
    shares: list[float] = []
    for turn in range(repeat + 1):
        before = work.rate()
        for name, call in contestants.items():
            times = []
            for _ in range(work.inner):
                begin_s = clock()
                call()
                times.append(clock() - begin_s)
            if name == ours:
                after = work.rate()
            if turn:
                samples[name] += times
        if turn:
            rates += (before, after)
            shares.append(work.cost / statistics.median(samples[ours][-work.inner :]) / ((before + after) / 2))
    medians = {name: 1e3 * statistics.median(values) for name, values in samples.items()}
    return Result(medians, rates, statistics.median(shares))


def measure(family: str, size: str, dtype: torch.dtype, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result per piece of work."""
    largest = max([*args.batch, *(batch for batch, _ in args.prefill)])
    contestants: dict[str, Contestant] = {}
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        path = make_checkpoint(family, size, dtype, Path(folder))
        for backend in args.ops:
            # As nodes load it, prefill and decode.
            models = [load_model(str(path), ops_backend=backend, compact_weights=each) for each in (False, True)]
            models = [replace(each, is_replayed=each.is_replayed and not args.no_replay) for each in models]
            contestants[backend] = Nodes(*(Engine(each, largest) for each in models))
        with quiet_transformers():
            stock_dtype = getattr(torch, args.stock_dtype) if args.stock_dtype else dtype
            stock = AutoModelForCausalLM.from_pretrained(path, dtype=stock_dtype).eval()
        contestants["stock"] = Stock(stock)
    parameters = sum(p.numel() for p in stock.parameters())
    machine = Machine(dtype, CLOCKS[args.clock])
    for work in _works(args, machine, parameters, models[0].geometry, dtype):
        with quiet_transformers():  # it warns of every kernel package that is not installed
            calls = {name: work.prepare(each) for name, each in contestants.items()}
            result = alternate(calls, work, args.repeat, CLOCKS[args.clock])
        ours = result.medians[args.ops[0]]
        yield {
            "family": family,
            "size": size,
            "parameters": parameters,
            "dtype": str(dtype).removeprefix("torch."),
            "stock_dtype": str(stock_dtype).removeprefix("torch."),
            "work": work.name,
            **{f"{name}_ms": round(value, 3) for name, value in result.medians.items()},
            "stock_over_ours": round(result.medians["stock"] / ours, 2),
            "rate": round(statistics.median(result.rates) / 1e9, 1),
            "best_rate": round(max(result.rates) / 1e9, 1),
            "share_of_roofline": round(result.share, 3),
            "share_of_best": round(1e3 * work.cost / ours / max(result.rates), 3),
        }


def _works(
    args: argparse.Namespace, machine: Machine, parameters: int, geometry: ModelGeometry, dtype: torch.dtype
) -> Iterator[Work]:
    for batch, num_tokens in args.prefill:
        flops = prefill_flops(parameters, batch * num_tokens)
        yield Work(
            f"prefill {batch}x{num_tokens}", lambda c, b=batch, n=num_tokens: c.prefill(b, n), 1, flops, machine.flops
        )
    for batch in args.batch:
        num_bytes = decode_bytes(parameters * dtype.itemsize, geometry, dtype, batch)
        yield Work(
            f"decode batch {batch}", lambda c, b=batch: c.decode(b), args.decode_steps, num_bytes, machine.bytes_per_s
        )


def main() -> None:
    args = _parse()
    torch.set_num_threads(args.threads)
    if args.overhead:
        for family in args.family:
            print_overhead(family, CLOCKS[args.clock], is_replayed=not args.no_replay)
        return
    configuration = {
        **{name: value for name, value in vars(args).items() if name != "json"},
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(configuration) if args.json else "\n".join(f"{k}: {v}" for k, v in configuration.items()))
    names = [*args.ops, "stock"]
    if not args.json:
        columns = "".join(f"{name + ' ms':>11}" for name in names)
        print(f"{'family':<17} size {'dtype':<9}{'work':<17}{columns}  stock/ours  of roof  of best    G/s   best")
    for size in args.size:
        for family in args.family:
            for dtype in args.dtype:
                for result in measure(family, size, getattr(torch, dtype), args):
                    print(json.dumps(result) if args.json else _row(result, names))
                    sys.stdout.flush()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", nargs="+", choices=tuple(SIZES), default=["S"])
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16"])
    parser.add_argument(
        "--stock-dtype",
        choices=("float32", "bfloat16"),
        help="of the stock model, by default ours; float32 is faster where the CPU has no bfloat16",
    )
    parser.add_argument("--prefill", nargs="*", type=_batch_and_tokens, default=[(1, 1024), (8, 512)], metavar="BxT")
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32], help="decode batch sizes")
    parser.add_argument("--ops", nargs="+", choices=("cpp", "torch"), default=["cpp"], help="the first is compared")
    parser.add_argument("--repeat", type=int, default=5, help="alternating rounds, after one to warm up")
    parser.add_argument("--decode-steps", type=int, default=4, help="decode steps of one round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=tuple(CLOCKS), default="wall", help="cpu: the process's CPU time, for a busy machine"
    )
    parser.add_argument("--overhead", action="store_true", help="only where a decode step of size S goes, batch 1")
    parser.add_argument("--no-replay", action="store_true", help="decode steps through the model's code, not replayed")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _batch_and_tokens(text: str) -> tuple[int, int]:
    batch, _, num_tokens = text.partition("x")
    return int(batch), int(num_tokens)


def _row(r: Mapping[str, Any], names: list[str]) -> str:
    times = "".join(f"{r[name + '_ms']:11.2f}" for name in names)
    return (
        f"{r['family']:<17} {r['size']:<4} {r['dtype']:<9}{r['work']:<17}{times} {r['stock_over_ours']:11.2f} "
        f"{100 * r['share_of_roofline']:7.1f}% {100 * r['share_of_best']:7.1f}% {r['rate']:6.1f} {r['best_rate']:6.1f}"
    )


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
