"""What the proxy's placement is worth: ``python -m benchmarks.placement [sessions|ways|choice ...]``.

*sessions*: 2 prefill and 2 decode nodes, 40 sessions of 6 turns interleaved, once for each policy, beside one pair of
nodes with the memory of all; then with decode nodes that hold half the sessions. ``round_robin-`` is without source
hints: nothing but turns. *ways*: local against remote prefill.
*choice*: what a choice costs. Prints the configuration, then a table each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.placement.choice import measure_choice
from benchmarks.placement.services import ChosenModel, session_service, way_service
from benchmarks.placement.sessions import Result, Traffic, names, run_sessions
from benchmarks.placement.ways import measure_cold, measure_suffix
from common.demo_model import FOLDER

PARTS = ("choice", "ways", "sessions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--model", default=str(FOLDER), help="checkpoint (default: the built-in model)")
    parser.add_argument("--policies", nargs="+", default=["cost", "prefix_aware", "round_robin", "round_robin-"])
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--share", type=float, nargs="+", default=[1, 0.5], help="of the sessions, on decode nodes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=512, help="--max-num-batched-tokens of the nodes")
    args = parser.parse_args()
    model = ChosenModel.of(Path(args.model), args.chunk)
    configuration = {**vars(args), "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    print(json.dumps({"configuration": configuration}), flush=True)
    if "choice" in args.parts:
        lookup_s, place_s = measure_choice()
        print(
            f"\nchoice, 8 + 8 nodes, 4,000 tokens: {1e6 * place_s:.0f} us, of which {1e6 * lookup_s:.0f} us the index"
        )
    if "ways" in args.parts:
        compare_ways(model, args.rounds)
    if "sessions" in args.parts:
        traffic = Traffic(
            num_sessions=args.sessions,
            num_turns=args.turns,
            concurrency=args.concurrency,
            vocab_size=model.vocab_size,
        )
        for share in args.share:
            compare_policies(model, traffic, args.policies, share if share < 1 else None)


def compare_ways(model: ChosenModel, rounds: int) -> None:
    with way_service(model) as service:
        suffix = asyncio.run(measure_suffix(service.url, rounds=rounds, vocab_size=model.vocab_size))
        cold = asyncio.run(measure_cold(service.url, rounds=rounds, vocab_size=model.vocab_size))
    print("\n40 more tokens of a conversation whose 2,000 are on the decode node: time to the first token")
    for name, way in suffix.items():
        print(f"  {name:7} median {way.median_ms:7.1f} ms  placed {sorted(set(way.placed))}")
    print(f"  auto / remote {suffix['auto'].median_ms / suffix['remote'].median_ms:.2f}")
    print("\na cold prompt of 3,000 tokens beside 8 streams: their gaps until its first token")
    for name, way in cold.items():
        print(f"  {name:7} p99 {way.p99_ms:7.1f} ms  median {way.median_ms:7.1f} ms  placed {sorted(set(way.placed))}")
    print(f"  local / auto, p99 {cold['local'].p99_ms / cold['auto'].p99_ms:.2f}", flush=True)


def compare_policies(model: ChosenModel, traffic: Traffic, policies: Sequence[str], share: float | None) -> None:
    """``share``: of the sessions, what the decode nodes together can hold; None: all, with room."""
    print(f"\n{traffic.num_sessions} sessions x {traffic.num_turns} turns, decode nodes hold {share or 'all'} of them")
    print(
        "  policy         nodes   cached tokens   of one pair   local  busiest P   busiest D      moved   median e2e",
        flush=True,
    )
    pair: Result | None = None
    for policy, number in (("cost", 1), *((policy, 2) for policy in policies)):
        name, sources = policy.removesuffix("-"), not policy.endswith("-")
        with session_service(model, traffic, name, number, share, sources=sources) as service:
            result = asyncio.run(run_sessions(service.url, traffic))
            spreads = [result.spread(names(service, role)) for role in ("prefill", "decode")]
        pair = pair or result
        print(
            f"  {policy:14} {number}P+{number}D {result.num_cached_tokens:9}"
            f" ({100 * result.num_cached_tokens / traffic.num_cacheable_tokens:3.0f} %)"
            f" {100 * result.num_cached_tokens / pair.num_cached_tokens:11.1f} %"
            f" {result.placements['local']:7} {100 * spreads[0]:+9.0f} % {100 * spreads[1]:+9.0f} %"
            f" {result.transferred_bytes / 1e6:7.1f} MB {statistics.median(result.e2e_ms):9.0f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
