"""What the proxy adds to a request: ``python -m benchmarks.proxy``.

Trivial nodes (``benchmarks.proxy.upstream``: a prefill leg, then a stream of 32 chunks) are driven by a lean load
generator directly and through each proxy that is installed. The measured proxy has one core, nodes and generator share
the other. Rounds alternate between the ways, so that whatever else the machine does hits all alike; medians of rounds.

- *tandem*: our proxy; both legs at once (``pull``, what our nodes can), or one after the other (nodes of other makes).
- *fastapi+httpx*: the plainest proxy of both legs (``benchmarks.proxy.plain``).
- *vllm-router*: where it is installed.
- *nginx*, *haproxy*: where they are installed; they pass the decode leg on and know no other, so they are compared with
  that leg alone.

*added*: median (p99) of one client's requests minus the direct ones' median (p99). *cpu*: processor time of the proxy
per request under load, which a busy machine changes least. ``--streams N`` also holds N streams at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvloop

from benchmarks.ports import free_ports
from benchmarks.proxy.contestants import (
    CONTESTANTS,
    Contestant,
    Ports,
    Process,
    contestant_running,
    running,
)
from benchmarks.proxy.load import Leg, Steps, User, latencies, make_body, make_leg, throughput
from common.wire.routes import COMPLETIONS_ROUTE

WARM_UP = 30
SETTLE_S = 1.5
STREAM_PAUSE_S = 0.25


@dataclass
class Figures:
    """One way's results; seconds, one per round."""

    median_s: list[float] = field(default_factory=list)
    p99_s: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def direct_legs(ports: Ports, body: bytes) -> tuple[Leg, Leg]:
    """What a proxy sends, sent by the client itself."""
    prefill = json.dumps({**json.loads(body), "stream": False, "kv_transfer_params": {"do_remote_decode": True}})
    return make_leg(ports.prefill, COMPLETIONS_ROUTE, prefill.encode()), make_leg(ports.decode, COMPLETIONS_ROUTE, body)


async def measure(steps: Steps, figures: Figures, args: argparse.Namespace, process: Process | None) -> None:
    await latencies(steps, WARM_UP)
    times = sorted(await latencies(steps, args.requests))
    figures.median_s.append(statistics.median(times))
    figures.p99_s.append(times[int(0.99 * (len(times) - 1))])
    before_s = process.cpu_seconds() if process else 0.0
    per_second, num_requests = await throughput(steps, args.clients, args.seconds)
    figures.per_second.append(per_second)
    figures.cpu_s.append((process.cpu_seconds() - before_s if process else 0.0) / num_requests)


async def hold_streams(steps: Steps, num_streams: int, process: Process, ports: Ports) -> dict[str, float]:
    """``num_streams`` at once, and how long ``/health`` takes meanwhile."""
    health = Leg(ports.proxy, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    users = [User(steps) for _ in range(num_streams)]
    prober = User([[health]])
    waits, peak = [], 0.0
    started_s = time.perf_counter()
    work = asyncio.gather(*(user.ask() for user in users))
    while not work.done():
        waits.append(await prober.ask())
        peak = max(peak, process.resident_mib())
        await asyncio.sleep(0.01)
    await work
    for user in (*users, prober):
        user.close()
    seconds = time.perf_counter() - started_s
    return {"seconds": round(seconds, 3), "health_max_ms": round(max(waits) * 1e3, 1), "resident_mib": round(peak)}


async def run_group(contestants: Sequence[Contestant], args: argparse.Namespace, pull: bool) -> None:
    prefill, decode = free_ports(2)
    proxies = dict(zip(contestants, free_ports(len(contestants)), strict=True))
    body = make_body(args.prompt_tokens)
    flags = ["--pull"] if pull else []
    upstream = [sys.executable, "-m", "benchmarks.proxy.upstream", str(prefill), str(decode), *flags]
    with running(upstream, [prefill, decode], args.other_core, {}):
        ports = Ports(prefill, decode, 0)
        legs = direct_legs(ports, body)
        direct: dict[bool, Steps] = {True: [legs] if pull else [[leg] for leg in legs], False: [[legs[1]]]}
        bare = {has_both: Figures() for has_both in {each.has_both_legs for each in contestants}}
        figures = {each: Figures() for each in contestants}
        for _ in range(args.rounds):
            for has_both, result in bare.items():
                await measure(direct[has_both], result, args, None)
            for each in contestants:
                its = Ports(prefill, decode, proxies[each])
                with contestant_running(each, its, args.core) as process:
                    await asyncio.sleep(SETTLE_S)  # polls and pools settle
                    await measure(
                        [[make_leg(its.proxy, COMPLETIONS_ROUTE, body, each.headers)]], figures[each], args, process
                    )
        for has_both, result in bare.items():
            print_row("direct, both legs" if has_both else "direct, decode leg", result, None, pull)
        for each in contestants:
            print_row(each.name, figures[each], bare[each.has_both_legs], pull)


async def run_streams(contestant: Contestant, args: argparse.Namespace) -> None:
    """Nodes that pause between chunks, so that all streams are open at once."""
    ports = Ports(*free_ports(3))
    numbers = [str(ports.prefill), str(ports.decode)]
    upstream = [sys.executable, "-m", "benchmarks.proxy.upstream", *numbers, "--pull", "--pause", str(STREAM_PAUSE_S)]
    with (
        running(upstream, [ports.prefill, ports.decode], args.other_core, {}),
        contestant_running(contestant, ports, args.core) as process,
    ):
        await asyncio.sleep(SETTLE_S)
        steps = [[make_leg(ports.proxy, COMPLETIONS_ROUTE, make_body(args.prompt_tokens), contestant.headers)]]
        held = await hold_streams(steps, args.streams, process, ports)
    print(f"{args.streams} streams at once through {contestant.name}: {json.dumps(held)}")


def print_row(name: str, figures: Figures, direct: Figures | None, pull: bool) -> None:
    median, p99 = (statistics.median(each) * 1e3 for each in (figures.median_s, figures.p99_s))
    added = ["-", "-"]
    if direct is not None:
        added = [f"{median - statistics.median(direct.median_s) * 1e3:.2f}"]
        added += [f"{p99 - statistics.median(direct.p99_s) * 1e3:.2f}"]
    per_second, cpu_ms = statistics.median(figures.per_second), statistics.median(figures.cpu_s) * 1e3
    row = (name, "at once" if pull else "in turn", f"{median:.2f}", f"{p99:.2f}", *added, f"{per_second:.0f}")
    print(("{:20} {:8} {:>8} {:>8} {:>9} {:>9} {:>8} {:>8}").format(*row, f"{cpu_ms:.2f}"), flush=True)


async def run(args: argparse.Namespace) -> None:
    print(json.dumps({**vars(args), "python": platform.python_version(), "cores": os.cpu_count()}))
    head = ("way", "legs", "p50 ms", "p99 ms", "added p50", "added p99", "per s", "cpu ms")
    print(("{:20} {:8} {:>8} {:>8} {:>9} {:>9} {:>8} {:>8}").format(*head))
    wanted = [each for each in CONTESTANTS if each.name in args.only] if args.only else list(CONTESTANTS)
    await run_group([each for each in wanted if each.name == "tandem"], args, pull=True)
    await run_group([each for each in wanted if each.is_installed], args, pull=False)
    if args.streams:
        await run_streams(next(each for each in CONTESTANTS if each.name == "tandem"), args)
    for each in wanted:
        if not each.is_installed:
            print(f"{each.name}: not installed")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300, help="of one client, per round")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4.0, help="of load from --clients, per round")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--streams", type=int, default=1000, help="held at once at the end (0: not)")
    parser.add_argument("--core", type=int, default=0, help="of the measured proxy")
    parser.add_argument("--other-core", type=int, default=1, help="of nodes and load generator")
    parser.add_argument("--only", nargs="*", default=[], choices=[each.name for each in CONTESTANTS])
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.other_core})
    uvloop.run(run(args))


if __name__ == "__main__":
    main()
