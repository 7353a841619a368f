"""What the proxy's own client to nodes saves: ``python -m benchmarks.proxy.node_http``.

The same proxy with its own client (``proxy.node_http``), with aiohttp's and with httpx's behind the same interface
(``benchmarks.proxy.node_clients``), in front of the same trivial nodes, both legs of each request at once. Proxies
share one core, nodes and load generator the other; rounds alternate between them. Measured is the processor time of
the proxy per request, which a busy machine changes least, for two shapes:

- *stream*: many streams at once, their chunks some milliseconds apart, so that each is read and sent on by itself;
- *short*: answers in one piece.

*saved*: by which part the own client lowers it, median of the rounds (their range); ``WORTH`` is what was asked of it
when it was last judged (docs/performance.md, "The proxy").
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import httptools
import httpx
import uvloop

from benchmarks.ports import free_ports
from benchmarks.proxy.contestants import Contestant, Ports, Process, contestant_running, running
from benchmarks.proxy.load import make_body, make_leg, throughput
from benchmarks.proxy.node_clients import CLIENTS
from common.wire.routes import COMPLETIONS_ROUTE

WORTH = 0.2
"""Part of a request's processor time in the proxy that the own client should save against aiohttp."""
SETTLE_S = 1.5
WARM_UP_S = 1.0


@dataclass(frozen=True)
class Shape:
    name: str
    is_stream: bool
    num_clients: int


@dataclass(frozen=True)
class Figures:
    """Of one request. ``num_writes``: far below the chunks of a stream, the proxy found several of them at once: the
    machine was too busy, or the streams too many."""

    cpu_s: float
    num_writes: float


def make_contestant(name: str) -> Contestant:
    def command(ports: Ports, folder: object) -> list[str]:
        nodes = [f"--prefill=http://127.0.0.1:{ports.prefill}", f"--decode=http://127.0.0.1:{ports.decode}"]
        proxy = [sys.executable, "-m", "benchmarks.proxy.with_client", name, "--port", str(ports.proxy)]
        return [*proxy, "--max-concurrency", "4096", *nodes]

    return Contestant(name, True, command, headers=("x-tandem-placement: remote",))


async def measure(
    shape: Shape, contestant: Contestant, port: int, process: Process, args: argparse.Namespace
) -> Figures:
    body = make_body(args.prompt_tokens, is_stream=shape.is_stream)
    steps = [[make_leg(port, COMPLETIONS_ROUTE, body, contestant.headers)]]
    await throughput(steps, shape.num_clients, WARM_UP_S)
    cpu_s, num_writes = process.cpu_seconds(), process.num_writes()
    _, num_requests = await throughput(steps, shape.num_clients, args.seconds)
    return Figures((process.cpu_seconds() - cpu_s) / num_requests, (process.num_writes() - num_writes) / num_requests)


@contextlib.contextmanager
def all_running(names: list[str], args: argparse.Namespace) -> Iterator[dict[Contestant, tuple[int, Process]]]:
    prefill, decode, *proxies = free_ports(2 + len(names))
    pace = ["--chunks", str(args.chunks), "--pause", str(args.pause_ms / 1e3)]
    upstream = [sys.executable, "-m", "benchmarks.proxy.upstream", str(prefill), str(decode), "--pull", *pace]
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(upstream, [prefill, decode], args.other_core, {}))
        started = {}
        for name, port in zip(names, proxies, strict=True):
            contestant = make_contestant(name)
            process = stack.enter_context(contestant_running(contestant, Ports(prefill, decode, port), args.core))
            started[contestant] = (port, process)
        yield started


async def run(args: argparse.Namespace) -> None:
    versions = {"python": platform.python_version(), "aiohttp": aiohttp.__version__, "httpx": httpx.__version__}
    versions |= {"httptools": httptools.__version__, "uvloop": uvloop.__version__}
    print(json.dumps({**vars(args), **versions, "cores": os.cpu_count(), "load": os.getloadavg()[0]}))
    shapes = [Shape("stream", True, args.streams), Shape("short", False, args.clients)]
    shapes = [shape for shape in shapes if shape.name in args.shapes]
    figures: dict[tuple[str, str], list[Figures]] = {}
    with all_running(args.only, args) as started:
        await asyncio.sleep(SETTLE_S)
        for _ in range(args.rounds):
            for shape in shapes:
                for contestant, (port, process) in started.items():
                    figure = await measure(shape, contestant, port, process, args)
                    figures.setdefault((shape.name, contestant.name), []).append(figure)
    print(f"{'shape':8} {'client':8} {'cpu ms':>8} {'range':>15} {'writes':>8} {'saved':>8} {'range':>15}")
    least_saved = 1.0
    for (shape_name, name), each in figures.items():
        cpu_ms = [figure.cpu_s * 1e3 for figure in each]
        pairs = zip(figures[shape_name, "own"], each, strict=True)
        saved = [1 - own.cpu_s / other.cpu_s for own, other in pairs]
        if name == "aiohttp":
            least_saved = min(least_saved, statistics.median(saved))
        print(
            f"{shape_name:8} {name:8} {statistics.median(cpu_ms):8.3f} {min(cpu_ms):7.3f}-{max(cpu_ms):7.3f} "
            f"{statistics.median(figure.num_writes for figure in each):8.1f} "
            f"{statistics.median(saved):8.1%} {min(saved):7.1%}-{max(saved):7.1%}"
        )
    if "aiohttp" in args.only:
        print(f"the own client saves at least {least_saved:.1%} against aiohttp; wanted: {WORTH:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of load, per round, shape and client")
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--chunks", type=int, default=64, help="of each stream")
    parser.add_argument("--pause-ms", type=float, default=10.0, help="between a stream's chunks")
    parser.add_argument("--clients", type=int, default=16, help="of short answers, at once")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--shapes", nargs="*", default=["stream", "short"], choices=["stream", "short"])
    parser.add_argument("--core", type=int, default=0, help="of the proxies")
    parser.add_argument("--other-core", type=int, default=1, help="of nodes and load generator")
    parser.add_argument("--only", nargs="*", default=list(CLIENTS), choices=list(CLIENTS))
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.other_core})
    uvloop.run(run(args))


if __name__ == "__main__":
    main()
