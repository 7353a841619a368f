"""``tandem simulate --cluster``: a trace with arrival times over clusters of nodes, and the cheapest that serves it.

What the caches of nodes hold, ``common.simulate`` says; what their speeds make of it, this does.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.command_line import word_of
from common.config.flag import Flag, flags_of
from common.config.proxy import ProxyConfig
from common.config.values import parse_share
from common.errors import ConfigError
from common.kv_cache.spec import KVCacheConfig
from common.simulate.simulate import CACHE_FLAGS, read_plan
from common.simulate.trace import TraceRequest, read_trace
from proxy.nodes.node import NodeRole
from proxy.placement.estimate import Targets
from proxy.simulation.cluster import Cluster
from proxy.simulation.speeds import Speeds, read_speeds

MAX_NODES = 256
"""Of one cluster: more is a mistake and not a long run."""


ATTAINMENT = 0.9
"""The usual part of the requests that is to keep its targets."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "clusters", "With --cluster, requests come at the trace's times, and nodes take as long as --rates says."
    )
    group.add_argument(
        "--cluster",
        nargs="+",
        default=[],
        metavar="P+D",
        help="prefill and decode nodes, e.g. 2+6; N: all ways to have N",
    )
    group.add_argument(
        "--rates", type=Path, default=None, help="JSON file with what GET /internal/v1/load of a node answers"
    )
    proxy_flags = {each.name: each for each in flags_of(ProxyConfig)}
    for name, of in (("ttft", "each request's first token"), ("itl", "the mean time between its tokens")):
        each = proxy_flags[f"{name}_target_ms"]
        group.add_argument(each.option, type=word_of(each), help=f"target of {of}")
    group.add_argument(
        "--attainment",
        type=word_of(Flag("", "attainment", parse=parse_share)),
        help=f"part of the requests that is to keep both [{ATTAINMENT}]",
    )
    group.add_argument(
        "--arrivals",
        type=word_of(Flag("", "arrivals", parse=parse_share)),
        help="how many times as fast as in the trace requests come [1]",
    )
    group.add_argument("--shed-late", action=argparse.BooleanOptionalAction, help="as of tandem proxy [on]")
    group.add_argument("--elastic", action=argparse.BooleanOptionalAction, help="as of tandem proxy [on]")


def check_none(args: argparse.Namespace) -> None:
    """Without ``--cluster``. Raises ConfigError naming a flag that acts with it alone."""
    for name in ("rates", "ttft_target_ms", "itl_target_ms", "attainment", "arrivals", "shed_late", "elastic"):
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} acts with --cluster only", param=option)


def run(args: argparse.Namespace) -> int:
    clusters = [each for word in args.cluster for each in parse_cluster(word)]
    speeds = _read_speeds(args.rates)
    cache = _read_cache(args, max(each.max_num_seqs for each in speeds.values()))
    targets = Targets(_seconds(args.ttft_target_ms), _seconds(args.itl_target_ms))
    attainment = ATTAINMENT if args.attainment is None else args.attainment
    if not 0 < attainment <= 1:
        raise ConfigError(f"--attainment {attainment} is not above 0 and at most 1", param="--attainment")
    arrivals = 1.0 if args.arrivals is None else args.arrivals
    if not arrivals > 0:
        raise ConfigError(f"--arrivals {arrivals} is not above 0", param="--arrivals")
    trace = [each for each in read_trace(args.trace, args.limit) if each.prompt_token_ids]
    rows = [
        simulate_cluster(
            trace,
            num_prefill,
            num_decode,
            cache=cache,
            speeds=speeds,
            targets=targets,
            arrivals=arrivals,
            elastic=args.elastic is not False,
            shed_late=args.shed_late is not False,
        )
        for num_prefill, num_decode in clusters
    ]
    best = choose(rows, attainment)
    if args.json:
        for row in rows:
            row["is_best"] = row is best
        sys.stdout.write(json.dumps(rows if len(rows) > 1 else rows[0]) + "\n")
    else:
        sys.stdout.write(_table(rows, best))
    return 0


def parse_cluster(word: str) -> list[tuple[int, int]]:
    """``2+6`` -> [(2, 6)]; ``4`` -> [(0, 4), (1, 3), (2, 2), (3, 1)]. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,4})\+(\d{1,4})", word)
    if match is not None:
        found = [(int(match[1]), int(match[2]))]
    elif re.fullmatch(r"\d{1,4}", word):
        found = [(num_prefill, int(word) - num_prefill) for num_prefill in range(int(word))]
    else:
        raise ConfigError(
            f"--cluster {word!r} is neither prefill and decode nodes, such as 2+6, nor a number of nodes",
            param="--cluster",
        )
    if not found or any(num_decode < 1 or num_prefill + num_decode > MAX_NODES for num_prefill, num_decode in found):
        raise ConfigError(
            f"--cluster {word} must have at least 1 decode node and at most {MAX_NODES} nodes", param="--cluster"
        )
    return found


def simulate_cluster(
    trace: Sequence[TraceRequest],
    num_prefill: int,
    num_decode: int,
    *,
    cache: KVCacheConfig,
    speeds: Mapping[NodeRole, Speeds],
    targets: Targets,
    arrivals: float = 1.0,
    **config: Any,
) -> dict[str, Any]:
    """The figures of one cluster as one JSON-able object. ``config``: as of ``Cluster``."""
    began = time.perf_counter()
    cluster = Cluster(num_prefill, num_decode, cache=cache, speeds=speeds, **config)

    def come(request: TraceRequest) -> None:
        # A prompt without an answer still has a first token.
        answer = request.output_token_ids or (0,)
        boundaries = (request.boundary,) if request.boundary else ()
        cluster.submit(request.prompt_token_ids, answer, targets=targets, boundaries=boundaries)

    start_s = min((each.time_s for each in trace), default=0.0)
    for request in trace:
        cluster.at((request.time_s - start_s) / arrivals, lambda request=request: come(request))  # type: ignore[misc]
    cluster.run()
    return {
        "cluster": f"{num_prefill}+{num_decode}",
        **figures(cluster),
        "seconds": round(time.perf_counter() - began, 3),
    }


def figures(cluster: Cluster) -> dict[str, Any]:
    """Of what was served. ``goodput``: requests a second, of the time in which they came, that kept their targets."""
    served = cluster.served
    if not served:
        return {"requests": 0}
    came_s = [each.came_s for each in served]
    answered = [each for each in served if not each.is_refused]
    lasted_s = max(max((each.last_s for each in answered), default=0.0) - min(came_s), 1e-9)
    span_s = max(came_s) - min(came_s) or lasted_s
    num_in_time = sum(each.is_in_time for each in served)
    num_prompt = sum(each.num_prompt_tokens for each in answered)
    return {
        "requests": len(served),
        "goodput": num_in_time / span_s,
        "attainment": num_in_time / len(served),
        "tokens_per_s": sum(each.num_answer_tokens for each in answered) / lasted_s,
        **{
            f"{name}_p{part}_ms": round(1e3 * _percentile(values, part / 100), 3)
            for name, values in (
                ("ttft", [each.ttft_s for each in answered]),
                ("itl", [each.itl_s for each in answered]),
            )
            for part in (50, 90, 99)
        },
        "hit_rate": 1.0 - sum(node.num_computed for node in cluster.nodes.values()) / num_prompt if num_prompt else 0.0,
        "utilisation": _utilisation(cluster, lasted_s),
        "ways": dict(Counter(each.way for each in served)),
    }


def choose(rows: Sequence[Mapping[str, Any]], attainment: float) -> Mapping[str, Any] | None:
    """Of the clusters with the fewest nodes that serve so much in time, the one that serves most; None: none does."""
    enough = [row for row in rows if row.get("attainment", 0.0) >= attainment]
    return min(enough, key=lambda row: (_num_nodes(row), -row["attainment"], row["ttft_p90_ms"]), default=None)


def _num_nodes(row: Mapping[str, Any]) -> int:
    return sum(map(int, row["cluster"].split("+")))


def _utilisation(cluster: Cluster, lasted_s: float) -> dict[str, dict[str, float]]:
    """By role, the part of the time in which nodes ran steps with prompt tokens, and steps without."""
    found: dict[str, dict[str, float]] = {}
    for role in NodeRole:
        nodes = [node for node in cluster.nodes.values() if node.node.role is role]
        if nodes:
            found[role.value] = {
                kind: round(sum(node.busy_s[kind] for node in nodes) / len(nodes) / lasted_s, 4)
                for kind in ("prompt", "decode")
            }
    return found


def _percentile(values: Sequence[float], part: float) -> float:
    return sorted(values or (0.0,))[min(max(0, len(values) - 1), int(part * len(values)))]


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _read_speeds(path: Path | None) -> dict[NodeRole, Speeds]:
    if path is None:
        raise ConfigError("--cluster needs --rates: how fast the nodes are", param="--rates")
    return read_speeds(path)


def _read_cache(args: argparse.Namespace, max_num_seqs: int) -> KVCacheConfig:
    """Of each node."""
    for flag in CACHE_FLAGS:
        if len(getattr(args, flag)) > 1:
            option = f"--{flag.replace('_', '-')}"
            raise ConfigError(f"{option} has several values, which --cluster does not compare", param=option)
    for option, value in (("--kv-tier", args.kv_tier), ("--stop-at", args.stop_at)):
        if value:
            raise ConfigError(f"{option} goes with one cache, not with --cluster", param=option)
    if args.nodes != 1:
        raise ConfigError("--nodes goes with one cache each, asked in turn; --cluster places requests", param="--nodes")
    settings = {parameter: getattr(args, flag)[0] for flag, parameter in CACHE_FLAGS.items()}
    return read_plan(args.model_config, args.dtype, max_num_seqs=max_num_seqs, enable_events=True, **settings).config


def _table(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> str:
    """One line per cluster, the one to take marked."""
    head = ["cluster", "goodput/s", "in time", "ttft p50", "p90 ms", "itl p50", "p90 ms", "hits", "prefill busy"]
    lines = [[*head, "decode busy", "seconds"]]
    for row in rows:
        if not row["requests"]:
            lines.append([row["cluster"], *["-"] * 9, f"{row['seconds']:.1f}"])
            continue
        busy = [
            f"{sum(row['utilisation'][role.value].values()):.0%}" if role.value in row["utilisation"] else "-"
            for role in NodeRole
        ]
        lines.append(
            [
                row["cluster"] + ("*" if row is best else " "),
                f"{row['goodput']:.3f}",
                f"{row['attainment']:.1%}",
                *(f"{row[f'{name}_p{part}_ms']:.1f}" for name in ("ttft", "itl") for part in (50, 90)),
                f"{row['hit_rate']:.1%}",
                *busy,
                f"{row['seconds']:.1f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + "\n" for line in lines
    )
    if num_too_long := rows[0].get("ways", {}).get("too_long"):  # the same for all: their nodes are alike
        text += f"{num_too_long} of {rows[0]['requests']} requests do not fit into a node or the model's context\n"
    return text + ("" if best is not None else "no cluster serves enough of the requests in time\n")
