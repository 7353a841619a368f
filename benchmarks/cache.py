"""What the cache manager's bookkeeping costs: ``python -m benchmarks.cache``.

Hashing, lookups, allocations and whole requests per second on one core, without a model and without torch. A whole
request is what the engine asks for: keys, lookup, admission, save positions, one step for the prompt, its end, one
token, freeing with donation; the pool is full, so that each request evicts. Half of a prompt is shared with one of 16
prefixes, the other half is its own.

``--distinct N`` instead sends N distinct prompts through accept, publish and evict, and prints how large the maps and
the process are after each tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.geometry.geometry import model_geometry
from common.kv_cache.eviction.base import EVICTION_POLICIES
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.planner import plan_cache

MODEL_CONFIG = Path(__file__).parent / "data" / "qwen3.5-35b-a3b" / "config.json"
NUM_SHARED_PREFIXES = 16
VOCAB_SIZE = 150_000


def make_manager(
    model_config: Path, memory_bytes: int, block_size: int, policy: str, max_model_len: int
) -> KVCacheManager:
    geometry = model_geometry(json.loads(model_config.read_text()), "bfloat16")
    plan = plan_cache(
        geometry,
        kv_cache_memory_bytes=memory_bytes,
        max_num_seqs=4,
        max_model_len=max_model_len,
        block_size=block_size,
        root_key=b"benchmark",
        eviction_policy=policy,
    )
    return KVCacheManager(plan.config)


def make_prompts(num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    half = num_tokens // 2
    shared = [rng.choices(range(VOCAB_SIZE), k=half) for _ in range(NUM_SHARED_PREFIXES)]
    return [rng.choice(shared) + rng.choices(range(VOCAB_SIZE), k=num_tokens - half) for _ in range(num_prompts)]


def serve(manager: KVCacheManager, prompt: list[int], seq_id: str = "request") -> int:
    """One request from its keys to its end; the tokens it had cached."""
    num_tokens = len(prompt)
    keys = manager.prefix_keys(prompt)
    hit = manager.lookup(keys, num_tokens)
    if not manager.admit(seq_id, keys, hit, num_tokens):
        raise RuntimeError("the pool does not hold one request")
    wanted = manager.save_positions(num_tokens, hit)
    if hit.num_tokens < num_tokens:
        manager.plan_saves(seq_id, hit.num_tokens, num_tokens, wanted)
        manager.take_block_copies()
        manager.complete_step(seq_id, num_tokens)
    manager.finish_prompt(seq_id, seq_id)
    keys.extend([1])
    if manager.extend(seq_id, num_tokens + 1):
        manager.plan_saves(seq_id, num_tokens, num_tokens + 1, wanted)
        manager.take_block_copies()
        manager.complete_step(seq_id, num_tokens + 1)
    manager.free(seq_id, donate=True)
    return hit.num_tokens


def measure(run: Callable[[], int], repeats: int) -> float:
    """Median units per second of CPU time: other processes on the machine do not count."""
    rates = []
    for _ in range(repeats):
        started = time.process_time()
        num_units = run()
        rates.append(num_units / (time.process_time() - started))
    return statistics.median(rates)


def measure_block_size(args: argparse.Namespace, block_size: int) -> dict[str, Any]:
    manager = make_manager(args.model_config, args.memory_gib << 30, block_size, args.eviction_policy, args.tokens + 16)
    prompts = make_prompts(args.requests, args.tokens, args.seed)
    warm_up = make_prompts(args.warm_up, args.tokens, args.seed + 1)
    for prompt in warm_up:
        serve(manager, prompt)
    served = iter(prompts)
    num_each = args.requests // args.repeats
    num_cached = 0

    def serve_some() -> int:
        nonlocal num_cached
        for _ in range(num_each):
            num_cached += serve(manager, next(served))
        return num_each

    requests_per_s = measure(serve_some, args.repeats)
    hashed = prompts[: min(len(prompts), 64)]

    def hash_some() -> int:
        for prompt in hashed:
            manager.prefix_keys(prompt).boundary_key(len(prompt) // block_size)
        return sum(map(len, hashed))

    def look_up_some() -> int:
        for keys in all_keys:
            manager.lookup(keys, args.tokens)
        return len(all_keys)

    all_keys = [manager.prefix_keys(prompt) for prompt in hashed]
    for keys in all_keys:
        keys.boundary_key(args.tokens // block_size)

    def allocate_some() -> int:
        for keys in all_keys:
            manager.admit("request", keys, None, args.tokens)
            manager.free("request", donate=False)
        return len(all_keys) * (args.tokens // block_size)

    return {
        "block_size": block_size,
        "hashed_tokens_per_s": round(measure(hash_some, args.repeats)),
        "lookups_per_s": round(measure(look_up_some, args.repeats)),
        "allocated_blocks_per_s": round(measure(allocate_some, args.repeats)),
        "requests_per_s": round(requests_per_s, 1),
        "cached_share": round(num_cached / (num_each * args.repeats * args.tokens), 3),
        "evictions": dict(manager.stats().evictions),
    }


def run_distinct(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Distinct prompts of ``--tokens`` tokens, each accepted from a peer, published and freed."""
    manager = make_manager(args.model_config, args.memory_gib << 30, 16, args.eviction_policy, args.tokens + 16)
    rows = []
    started = time.process_time()
    for number in range(1, args.distinct + 1):
        seq_id = "request"
        keys = manager.prefix_keys(range(number, number + args.tokens))
        if manager.accept_remote(seq_id, keys, args.tokens) is None:
            raise RuntimeError("the pool does not hold one request")
        manager.commit_remote(seq_id, seq_id)
        manager.take_block_copies()
        manager.free(seq_id, donate=False)
        if number % max(1, args.distinct // 10) == 0:
            stats = manager.stats()
            rows.append(
                {
                    "prompts": number,
                    "cached_blocks": stats.num_cached_prefix_blocks,
                    "null_entries": stats.num_marked_blocks,
                    "checkpoints": stats.num_checkpoints,
                    "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                    "cpu_s": round(time.process_time() - started, 1),
                }
            )
            sys.stderr.write(json.dumps(rows[-1]) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache", description=__doc__)
    parser.add_argument("--model-config", type=Path, default=MODEL_CONFIG)
    parser.add_argument("--memory-gib", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per prompt")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=400, help="requests before measuring, to fill the pool")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--eviction-policy", choices=EVICTION_POLICIES, default=EVICTION_POLICIES[0])
    parser.add_argument("--distinct", type=int, default=0, help="send this many distinct prompts instead")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    configuration = {name: value for name, value in vars(args).items() if name != "model_config"}
    configuration |= {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
    results = run_distinct(args) if args.distinct else [measure_block_size(args, size) for size in args.block_size]
    sys.stdout.write(json.dumps({"configuration": configuration, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
