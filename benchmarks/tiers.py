"""What a tier on disk costs and saves: ``python -m benchmarks.tiers --size M --family granitemoehybrid``.

One node's engine, pools and tier in this process, without HTTP; a model with random weights is made on the spot.

- *computed*, *read*: time to the first token of a prompt that is in no memory, by turns: a new one, and one that is in
  the tier; its files in the page cache (*cached*), or dropped from it before (*disk*).
- *steps*: streams that decode while prompts come and go, with a tier that writes and without one, by turns: tokens a
  second, and the gap between tokens that 99 of 100 stay within. What was written in that time is said.

The ways alternate in one run, so that whatever else the machine does hits all alike; figures are medians and ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.models import FAMILIES, SIZES, make_checkpoint
from common.request import Request, SamplingParams
from tests.support.tier_node import TierNode

FIRST_TOKEN = 100
NUM_STREAMS = 4
STREAM_TOKENS = 64


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


def make_node(model: Path, args: argparse.Namespace, *tiers: Path) -> TierNode:
    flags = {"model": str(model), "max_model_len": 2048, "kv_cache_memory": args.memory, "max_num_seqs": 8}
    return TierNode(*(f"disk:{each}?size=64GiB" for each in tiers), **flags)


def num_bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.kv"))


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
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        model = make_checkpoint(args.family, args.size, torch.float32, Path(scratch) / "model")
        for name, measure in (("promotion", promotion), ("steps", steps)):
            found = asyncio.run(measure(model, Path(scratch) / f"tier-{name}", args))
            sys.stdout.write(json.dumps({"measured": name, "family": args.family, "size": args.size, **found}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
