"""What a tier on disk costs and saves: ``python -m benchmarks.tiers --size M --family granitemoehybrid``.

One node's engine, pools and tier in this process, without HTTP; a model with random weights is made on the spot. One
line for each of:

- *promotion*: time to the first token of a prompt that is in no memory, by turns: a new one (*computed*), and one that
  is in the tier; its files in the page cache (*cached*), or dropped from it before (*disk*).
- *steps*: streams that decode while prompts come and go, with a tier that writes and without one, by turns: tokens a
  second, and the gap between tokens that 99 of 100 stay within. What was written in that time is said.
- *damage*: requests that want nothing of the tier, beside others that do: how long they take when every read of it
  hangs, is slow, or finds damage, against a node without a tier, which computes the same.
- *bounds*: for ``--seconds`` a node is asked for prompts that never return, with a tier that is too small for them and
  a write rate: how large the folder was at most, and what was written against what the rate allows.

The ways alternate in one run, so that whatever else the machine does hits all alike; figures are medians and ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.models import FAMILIES, SIZES, make_checkpoint
from common.request import Request, SamplingParams
from common.tiers.object_header import ObjectHeader
from common.tiers.store import ObjectReadError, ObjectStore
from tests.support.tier_node import TierNode

FIRST_TOKEN = 100
NUM_STREAMS = 4
STREAM_TOKENS = 64
SLOW_S = 0.2
"""Of each object that a slow disk reads."""
HANG_S = 2.0
"""Deadline of a read in *damage*."""


async def times(node: TierNode, prompt: list[int], num_tokens: int) -> list[float]:
    """When the request began, and when each token came."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    found = [time.perf_counter()]
    async for output in node.engine.generate(Request(uuid.uuid4().hex, prompt, sampling)):
        found += [time.perf_counter()] * len(output.token_ids)
    return found


async def first_token_s(node: TierNode, prompt: list[int]) -> float:
    began, first = await times(node, prompt, 1)
    return first - began


def prompts(seed: int, num_tokens: int) -> Iterator[list[int]]:
    draw = random.Random(seed)
    return ([draw.randrange(FIRST_TOKEN, 1000) for _ in range(num_tokens)] for _ in itertools.count())


def make_node(model: Path, args: argparse.Namespace, *tiers: Path, size: int = 64 << 30, **more: Any) -> TierNode:
    flags = {"model": str(model), "max_model_len": 2048, "kv_cache_memory": args.memory, "max_num_seqs": 8, **more}
    return TierNode(*(f"disk:{each}?size={size}" for each in tiers), **flags)


def num_bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.kv"))


def sizes_in(folder: Path) -> list[int]:
    """Of objects, and of those that are being written."""
    found = []
    for path in (*folder.rglob("*.kv"), *folder.rglob("*.tmp")):
        with contextlib.suppress(FileNotFoundError):
            found.append(path.stat().st_size)
    return found


def drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


async def promotion(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    new = prompts(1, args.tokens)
    seconds: dict[str, list[float]] = {"computed": [], "cached": [], "disk": []}
    async with make_node(model, args, folder) as node:
        await first_token_s(node, next(new))  # warm
        for _ in range(args.repeat):
            prompt = next(new)
            seconds["computed"].append(await first_token_s(node, prompt))
            await node.flush()
            for way in ("cached", "disk"):
                await node.forget_memory()
                if way == "disk":
                    drop_page_cache(folder)
                num_pulls = len(node.pulls)
                seconds[way].append(await first_token_s(node, prompt))
                assert [pull.ok for pull in node.pulls[num_pulls:]] == [True], "it was not read"
        num_bytes = node.pulls[-1].num_bytes
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    return {
        "prompt_tokens": args.tokens,
        "mib": round(num_bytes / 2**20, 1),
        **{f"{way}_ms": round(1000 * value, 1) for way, value in medians.items()},
        "times_faster_cached": round(medians["computed"] / medians["cached"], 1),
        "times_faster_disk": round(medians["computed"] / medians["disk"], 1),
    }


async def stream(node: TierNode, seed: int, num_prompt: int) -> tuple[float, list[float]]:
    """Streams behind prompts that were never seen: tokens a second, and the gaps."""
    new = prompts(seed, num_prompt)
    began = time.perf_counter()
    all_times = await asyncio.gather(*(times(node, next(new), STREAM_TOKENS) for _ in range(NUM_STREAMS)))
    seconds = time.perf_counter() - began
    gaps = [later - earlier for times in all_times for earlier, later in itertools.pairwise(times[1:])]
    return NUM_STREAMS * STREAM_TOKENS / seconds, gaps


async def steps(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"with": [], "without": []}
    gaps: dict[str, list[float]] = {"with": [], "without": []}
    async with (
        make_node(model, args, folder) as tiered,
        make_node(model, args) as plain,
    ):
        nodes = {"with": tiered, "without": plain}
        for turn in range(-1, args.rounds):
            for way in random.Random(turn).sample(list(nodes), 2):
                rate, found = await stream(nodes[way], 10 + turn, args.tokens // 8)
                if turn >= 0:  # else: warm
                    rates[way].append(rate)
                    gaps[way] += found
                await tiered.flush()  # what it would write while it is idle is not the other's burden
                if way == "with" and turn < 0:
                    before = num_bytes_in(folder)
                    began = time.monotonic()
        written = num_bytes_in(folder) - before
        seconds = time.monotonic() - began
    p99 = {way: statistics.quantiles(values, n=100)[98] for way, values in gaps.items()}
    return {
        "streams": NUM_STREAMS,
        "tokens_per_s": {way: round(statistics.median(values), 1) for way, values in rates.items()},
        "rate_of_without": round(statistics.median(rates["with"]) / statistics.median(rates["without"]), 3),
        "p99_gap_ms": {way: round(1000 * value, 2) for way, value in p99.items()},
        "p99_of_without": round(p99["with"] / p99["without"], 2),
        "written_mib_per_s": round(written / 2**20 / seconds, 1),
    }


class Faulty:
    """A store whose reads are as ``fault`` says."""

    def __init__(self, store: ObjectStore) -> None:
        self.fault = ""
        self.released = threading.Event()
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, wanted: ObjectHeader, buffers: Sequence[memoryview]) -> ObjectHeader:
        if self.fault == "hang":
            self.released.wait()
        elif self.fault == "slow":
            time.sleep(SLOW_S)
        header = self._store.get(wanted, buffers)
        if self.fault == "damage":
            raise ObjectReadError("digest")
        return header


async def damage(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    wanted = [next(prompts(900 + number, args.tokens // 8)) for number in range(args.repeat)]
    new = prompts(2, 48)
    ways = ("without", "sound", "slow", "damage", "hang")
    others: dict[str, list[float]] = {way: [] for way in ways}

    async def round_of(node: TierNode) -> list[float]:
        asking = [asyncio.create_task(times(node, prompt, 4)) for prompt in wanted]
        found = []
        while not found or not all(task.done() for task in asking):
            began, *_, last = await times(node, next(new), 4)
            found.append(last - began)
        await asyncio.gather(*asking)
        return found

    async with (
        make_node(model, args, folder, kv_transfer_timeout_seconds=HANG_S) as tiered,
        make_node(model, args) as plain,
    ):
        assert tiered.tiers is not None
        [tier] = tiered.tiers._tiers.values()
        tier.store = faulty = Faulty(tier.store)
        for turn in range(-1, args.rounds):
            for way in ways:
                node, faulty.fault = (plain, "") if way == "without" else (tiered, "")
                if node is tiered:
                    for prompt in wanted:
                        await first_token_s(node, prompt)
                    await node.flush()
                    faulty.fault = "" if way == "sound" else way
                    tier._no_reads_until = 0.0
                await node.forget_memory()
                found = await round_of(node)
                if turn >= 0:
                    others[way] += found
                faulty.released.set()
                faulty.released = threading.Event()
    p50 = {way: statistics.median(values) for way, values in others.items()}
    p99 = {way: statistics.quantiles(values, n=100)[98] for way, values in others.items()}
    return {
        "others": {way: len(values) for way, values in others.items()},
        "p50_ms": {way: round(1000 * value, 1) for way, value in p50.items()},
        "p99_ms": {way: round(1000 * value, 1) for way, value in p99.items()},
        "p50_of_without": {way: round(p50[way] / p50["without"], 2) for way in ways[1:]},
        "p99_of_without": {way: round(p99[way] / p99["without"], 2) for way in ways[1:]},
    }


async def bounds(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    new, most, largest = prompts(3, args.tokens // 8), 0, 0
    flags = {"kv_tier_write_rate": args.rate, "kv_tier_min_return": 0.0}
    async with make_node(model, args, folder, size=args.tier_size, **flags) as node:
        began = time.monotonic()
        while (seconds := time.monotonic() - began) < args.seconds:
            await times(node, next(new), 8)
            sizes = sizes_in(folder)
            most, largest = max(most, sum(sizes)), max(largest, *sizes, 0, 0)
        written = node.metric("tier_bytes_total", op="write")
    return {
        "seconds": round(seconds),
        "size_mib": round(args.tier_size / 2**20, 1),
        "most_mib": round(most / 2**20, 1),
        "largest_object_mib": round(largest / 2**20, 1),
        "is_within_size_and_one_object": most <= args.tier_size + largest,
        "rate_mib_per_s": round(args.rate / 2**20, 1),
        "written_mib_per_s": round(written / 2**20 / seconds, 2),
        "is_within_rate": written <= args.rate * seconds + largest,
    }


WAYS = {"promotion": promotion, "steps": steps, "damage": damage, "bounds": bounds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=sorted(FAMILIES), default="granitemoehybrid")
    parser.add_argument("--size", choices=sorted(SIZES), default="M")
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompts that are read back")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of computing and reading")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of steps with and without")
    parser.add_argument(
        "--memory", type=int, default=256 << 20, help="bytes of the pools; steps evict and write in them"
    )
    parser.add_argument("--folder", type=Path, default=None, help="where the tier is (default: a temporary folder)")
    parser.add_argument("--seconds", type=float, default=600.0, help="of bounds")
    parser.add_argument("--tier-size", type=int, default=256 << 20, help="bytes, of bounds")
    parser.add_argument("--rate", type=int, default=4 << 20, help="bytes a second that bounds may write")
    parser.add_argument("--only", choices=list(WAYS), nargs="+", default=list(WAYS), help="what to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        model = make_checkpoint(args.family, args.size, torch.float32, Path(scratch) / "model")
        for name in args.only:
            found = asyncio.run(WAYS[name](model, Path(scratch) / f"tier-{name}", args))
            sys.stdout.write(json.dumps({"measured": name, "family": args.family, "size": args.size, **found}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
