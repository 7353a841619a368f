"""Replay a request trace through the real cache manager: no model, no torch, the same numbers every time.

For capacity planning and for comparing policies. Requests run one after the other, in file order, each to its end:
lookup, admit, as few steps as the cache mode allows, free with donation.

``common.simulate.trace`` says what a trace is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.command_line import word_of
from common.config.flag import Flag, flags_of
from common.config.node import MAX_RANKS, NodeConfig
from common.config.tiers import parse_tier
from common.config.values import parse_int, parse_share, parse_size
from common.errors import ConfigError
from common.geometry.geometry import model_geometry
from common.kv_cache.eviction.base import EVICTION_POLICIES
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.layout import transfer_bytes
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.planner import MAMBA_CACHE_MODES, CachePlan, plan_cache
from common.kv_cache.shards import shard_geometry
from common.kv_cache.spec import DTYPE_BYTES
from common.kv_cache.tiers.tier import MIN_RETURN, TierSettings
from common.simulate.ideal_cache import IdealCache
from common.simulate.tiers import SimulatedTiers, replay_settings
from common.simulate.trace import TraceRequest, read_trace

_SEQ_ID = "request"
"""One id serves all requests, as they run one after the other."""
CACHE_FLAGS = {
    "kv_cache_memory": "kv_cache_memory_bytes",
    "block_size": "block_size",
    "mamba_cache_mode": "mamba_cache_mode",
    "prefix_cache_retention_interval": "retention_interval",
    "eviction_policy": "eviction_policy",
    "state_memory_share": "slot_share",
    "tensor_parallel_size": "tensor_parallel_size",
}
"""Flag -> parameter of ``simulate``."""


def simulate(
    trace_path: Path,
    limit: int | None = None,
    *,
    model_config_path: Path,
    kv_cache_memory_bytes: int,
    block_size: int = 16,
    dtype: str = "auto",
    mamba_cache_mode: str = "auto",
    retention_interval: int | None = None,
    eviction_policy: str = EVICTION_POLICIES[0],
    slot_share: float | None = None,
    tensor_parallel_size: int = 1,
    tiers: Sequence[TierSettings] = (),
    num_nodes: int = 1,
    stop_at: int | None = None,
) -> dict[str, Any]:
    """The figures of `tandem simulate` as one JSON-able object.

    ``kv_cache_memory_bytes``, ``block_bytes``, ``slot_bytes``: of each rank, as flags and logs of a node have them.
    ``kv_bytes_per_token``, ``state_bytes``: what a transfer moves to all of them together.
    ``tiers``: below the pools, fastest first. ``num_nodes``: with a cache of that memory each, asked in turn.
    ``stop_at``: after that many requests all nodes end without warning and start again, with what their tiers kept.
    """
    for flag, value in (("--limit", limit), ("--nodes", num_nodes), ("--stop-at", stop_at)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value} is below its minimum of 1", param=flag)
    if tensor_parallel_size > 1 and tiers:
        option = "--tensor-parallel-size"
        raise ConfigError(f"{option} {tensor_parallel_size} does not go with --kv-tier", param=option)
    started = time.perf_counter()
    plan = read_plan(
        model_config_path,
        dtype,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        block_size=block_size,
        mamba_cache_mode=mamba_cache_mode,
        retention_interval=retention_interval,
        eviction_policy=eviction_policy,
        slot_share=slot_share,
        tensor_parallel_size=tensor_parallel_size,
    )
    kv_bytes_per_token, state_bytes = transfer_bytes(plan.config.geometry, block_size)
    managers = [KVCacheManager(plan.config) for _ in range(num_nodes)]
    ended: list[KVCacheManager] = []
    ideal = IdealCache(block_size)
    totals: Counter[str] = Counter()
    now_s = 0.0
    below = SimulatedTiers(tiers, num_nodes, lambda: now_s)
    below.start(managers)
    for request in read_trace(trace_path, limit):
        if totals["requests"] == stop_at:
            ended, managers = managers, [KVCacheManager(plan.config) for _ in range(num_nodes)]
            below.start(managers)
            totals["hit_before_stop"], totals["prompt_before_stop"] = totals["hit"], totals["prompt_tokens"]
        node, now_s = totals["requests"] % num_nodes, request.time_s
        manager = managers[node]
        totals["requests"] += 1
        totals["prompt_tokens"] += len(request.prompt_token_ids)
        if not request.prompt_token_ids:
            continue
        keys = manager.prefix_keys(request.prompt_token_ids)
        totals["ideal"] += ideal.hit_tokens(keys)
        if tiers:
            below.demote(node, _num_computed(request))
            below.promote(node, keys, keys.num_tokens)
        num_hit = _replay(manager, keys, request)
        if tiers:
            below.publish(node)
        if num_hit is None:
            totals["too_long"] += len(request.prompt_token_ids)
            keys.extend(request.output_token_ids)
        else:
            totals["hit"] += num_hit
        ideal.add(keys, (request.boundary, len(request.prompt_token_ids), _num_computed(request)))
    stats = [manager.stats() for manager in (*ended, *managers)]
    lost = dict(sum((Counter(each.lost_tokens) for each in stats), Counter()))
    if totals["too_long"]:
        lost["too_long"] = totals["too_long"]
    num_prompt = totals["prompt_tokens"]
    return {
        "requests": totals["requests"],
        "prompt_tokens": num_prompt,
        "hit_tokens": totals["hit"],
        "hit_rate": totals["hit"] / num_prompt if num_prompt else 0.0,
        "ideal_hit_rate": totals["ideal"] / num_prompt if num_prompt else 0.0,
        "block_bytes": next((group.block_bytes for group in plan.report.groups), 0),
        "slot_bytes": plan.report.slot_bytes,
        "blocks": next((group.num_blocks for group in plan.report.groups), 0),
        "slots": plan.report.num_slots,
        "kv_bytes_per_token": round(kv_bytes_per_token),
        "state_bytes": state_bytes,
        "checkpoints": {
            "saved": sum(sum(each.checkpoints_saved.values()) for each in stats),
            "skipped": sum(sum(each.checkpoints_skipped.values()) for each in stats),
            "evicted": sum(sum(each.checkpoints_evicted.values()) for each in stats),
        },
        "lost_tokens": lost,
        **({"tiers": below.figures(totals["requests"])} if tiers else {}),
        **_after_stop(totals, stop_at),
        "seconds": round(time.perf_counter() - started, 3),
    }


def read_plan(
    model_config_path: Path, dtype: str, *, max_num_seqs: int = 1, tensor_parallel_size: int = 1, **settings: Any
) -> CachePlan:
    """The cache of one node for a model, as each of its ranks has it. ``settings``: of ``plan_cache``.

    Raises:
        ConfigError: also where so many ranks cannot divide the model.
    """
    if not 1 <= tensor_parallel_size <= MAX_RANKS:
        option = "--tensor-parallel-size"
        raise ConfigError(f"{option} {tensor_parallel_size} is not between 1 and {MAX_RANKS}", param=option)
    raw_config = _read_config(model_config_path)
    geometry = shard_geometry(model_geometry(raw_config, _model_dtype(raw_config, dtype)), tensor_parallel_size)
    return plan_cache(geometry, max_num_seqs=max_num_seqs, max_model_len=1, root_key=b"simulate", **settings)


def _after_stop(totals: Counter[str], stop_at: int | None) -> dict[str, float]:
    num_prompt = totals["prompt_tokens"] - totals["prompt_before_stop"]
    if stop_at is None or totals["requests"] <= stop_at or not num_prompt:
        return {}
    return {"hit_rate_after_stop": (totals["hit"] - totals["hit_before_stop"]) / num_prompt}


def _num_computed(request: TraceRequest) -> int:
    """Tokens of the whole sequence; the last sampled one is never computed."""
    return len(request.prompt_token_ids) + max(0, len(request.output_token_ids) - 1)


def _replay(manager: KVCacheManager, keys: PrefixKeys, request: TraceRequest) -> int | None:
    """Run one request to its end; the tokens it did not have to compute, or None when it does not fit at all."""
    num_prompt = keys.num_tokens
    num_tokens = _num_computed(request)
    hit = manager.lookup(keys, num_prompt)
    if not manager.admit(_SEQ_ID, keys, hit, num_tokens):
        return None
    wanted = manager.save_positions(num_prompt, hit, (request.boundary,) if request.boundary else ())
    done = hit.num_tokens
    while done < num_prompt:
        done = _step(manager, done, done + manager.chunk_size(done, num_prompt - done, num_prompt), wanted)
    manager.finish_prompt(_SEQ_ID, _SEQ_ID)
    keys.extend(request.output_token_ids)
    size = keys.block_size if manager.config.mamba_cache_mode == "align" else num_tokens
    while done < num_tokens:
        done = _step(manager, done, min(num_tokens, done // size * size + size), wanted)
    manager.free(_SEQ_ID, donate=True)
    return hit.num_tokens


def _step(manager: KVCacheManager, start: int, end: int, wanted: Mapping[int, str]) -> int:
    manager.plan_saves(_SEQ_ID, start, end, wanted)
    manager.take_block_copies()
    manager.complete_step(_SEQ_ID, end)
    return end


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        raw_config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"--model-config {file}: {why}", param="--model-config") from exc
    if not isinstance(raw_config, dict):
        raise ConfigError(f"--model-config {file}: not a JSON object", param="--model-config")
    return raw_config


def _model_dtype(raw_config: dict[str, Any], dtype: str) -> str:
    if dtype != "auto":
        return dtype
    for config in (raw_config, raw_config.get("text_config")):
        named = str(config.get("dtype") or config.get("torch_dtype")) if isinstance(config, dict) else ""
        if named in DTYPE_BYTES:
            return named
    return "float32"  # as a node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Numbers are read as a node reads its flags: ``parse_args`` raises ConfigError with flag, value and bound."""
    node_flags = {each.name: each for each in flags_of(NodeConfig)}

    def as_node(name: str) -> Callable[[str], Any]:
        return word_of(node_flags[name])

    def count(name: str) -> Callable[[str], Any]:
        return word_of(Flag("", name, parse=parse_int, minimum=1))

    parser.add_argument("--trace", type=Path, required=True, help="JSON lines, one request each")
    parser.add_argument("--limit", type=count("limit"), default=None, help="replay only the first N requests")
    parser.add_argument("--model-config", type=Path, required=True, help="model folder or its config.json")
    parser.add_argument("--dtype", choices=["auto", *DTYPE_BYTES], default="auto")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; with several values, a list of them"
    )
    several = parser.add_argument_group("cache flags", "Several values of a flag give a table over all combinations.")
    several.add_argument(
        "--kv-cache-memory",
        type=as_node("kv_cache_memory"),
        nargs="+",
        default=[8 << 30],
        help="bytes of cache per rank, e.g. 8GiB",
    )
    several.add_argument("--block-size", type=as_node("block_size"), nargs="+", default=[16], help="tokens per block")
    several.add_argument("--mamba-cache-mode", choices=MAMBA_CACHE_MODES, nargs="+", default=[MAMBA_CACHE_MODES[0]])
    several.add_argument(
        "--prefix-cache-retention-interval",
        type=as_node("prefix_cache_retention_interval"),
        nargs="+",
        default=[None],
        help="tokens between kept states",
    )
    several.add_argument("--eviction-policy", choices=EVICTION_POLICIES, nargs="+", default=[EVICTION_POLICIES[0]])
    several.add_argument(
        "--state-memory-share",
        type=as_node("state_memory_share"),
        nargs="+",
        default=[None],
        help="part of the memory for states, 0.01 to 0.99",
    )
    several.add_argument(
        "--tensor-parallel-size",
        type=as_node("tensor_parallel_size"),
        nargs="+",
        default=[1],
        help="ranks of each node",
    )

    below = parser.add_argument_group("tiers below the cache")
    below.add_argument(
        "--kv-tier", nargs="+", default=[], metavar="TIER", help="fastest first, e.g. host:64GiB disk:/path?size=500GiB"
    )
    below.add_argument("--kv-tier-min-return", default=str(MIN_RETURN), help="least probability of a return to write")
    below.add_argument("--kv-tier-write-rate", default=None, help="bytes per second of the trace's time, e.g. 300MB")
    below.add_argument("--nodes", type=count("nodes"), default=1, help="nodes with that cache each, asked in turn")
    below.add_argument(
        "--stop-at", type=count("stop_at"), help="end all nodes after N requests; tiers but host memory survive"
    )


def _read_tiers(args: argparse.Namespace) -> list[TierSettings]:
    """Raises ConfigError naming flag and value."""

    def read(flag: str, word: str, parse: Callable[[str], Any]) -> Any:
        try:
            return parse(word)
        except ValueError as exc:
            raise ConfigError(f"{flag} {word!r} is {exc}", param=flag) from None

    min_return = read("--kv-tier-min-return", args.kv_tier_min_return, parse_share)
    if not 0 <= min_return <= 1:
        raise ConfigError(f"--kv-tier-min-return {min_return} is not between 0 and 1", param="--kv-tier-min-return")
    rate = args.kv_tier_write_rate
    write_rate = None if rate is None else read("--kv-tier-write-rate", rate, parse_size)
    if write_rate == 0:
        raise ConfigError("--kv-tier-write-rate 0 is below its minimum of 1", param="--kv-tier-write-rate")
    specs = [read("--kv-tier", word, parse_tier) for word in args.kv_tier]
    return [replay_settings(spec.kind, spec.size_bytes, min_return, write_rate) for spec in specs]


def run(args: argparse.Namespace) -> int:
    tiers = _read_tiers(args)
    flags = {flag: getattr(args, flag) for flag in CACHE_FLAGS}
    rows = []
    for values in itertools.product(*flags.values()):
        setting = dict(zip(flags, values, strict=True))
        figures = simulate(
            args.trace,
            args.limit,
            model_config_path=args.model_config,
            dtype=args.dtype,
            tiers=tiers,
            num_nodes=args.nodes,
            stop_at=args.stop_at,
            **{CACHE_FLAGS[flag]: value for flag, value in setting.items()},
        )
        varied = {flag: value for flag, value in setting.items() if len(flags[flag]) > 1}
        rows.append({**varied, **figures})
    if args.json:
        sys.stdout.write(json.dumps(rows if len(rows) > 1 else rows[0]) + "\n")
    elif len(rows) > 1:
        sys.stdout.write(_table(rows, [flag for flag in flags if len(flags[flag]) > 1]))
    else:
        for name, value in rows[0].items():
            sys.stdout.write(f"{name:<18} {value:.4f}\n" if isinstance(value, float) else f"{name:<18} {value}\n")
    return 0


def _table(rows: list[dict[str, Any]], varied: list[str]) -> str:
    """One line per combination, the best hit rate marked."""
    best = max(row["hit_rate"] for row in rows)
    lines = [[*varied, "blocks", "slots", "hit_rate", "seconds"]]
    for row in rows:
        rate = f"{row['hit_rate']:.2%}" + ("*" if row["hit_rate"] == best else " ")
        cells = [f"{row[flag] / (1 << 30):g}GiB" if flag == "kv_cache_memory" else str(row[flag]) for flag in varied]
        lines.append([*cells, str(row["blocks"]), str(row["slots"]), rate, f"{row['seconds']:.1f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + "\n" for line in lines
    )
