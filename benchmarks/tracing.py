"""What tracing costs: TTFT of a service that traces every request against one that does not, in turn.

    python -m benchmarks.tracing [--model DIR] [--requests N] [--prompt-tokens N] [--calls-only]

Two services with the same model, a collector in a process of its own. Each round sends one request to both, in an order
that alternates, with prompts that nobody has seen. Two figures, each with its 95 % interval from a bootstrap over
rounds: the ratio of the two medians, and the median of the rounds' ratios, which a machine that grows slower or faster
on the way does not move. Other work on the machine widens the intervals; 800 rounds are enough for 2 % on a quiet one.
``calls_us`` is what holds there too: the CPU time of all tracing calls that one request makes before its first token,
in all three processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from common import demo_model
from common.engine.outputs import PhaseSeconds
from common.node.serving.request_record import trace_phases
from common.telemetry.create import create_tracer
from common.wire.routes import COMPLETIONS_ROUTE
from tests.support.collector import collecting
from tests.support.service import Service

FLAGS = ("--kv-cache-memory", "256MiB", "--log-level", "warning")
MAX_TOKENS = 8
NUM_RESAMPLES = 2000
NUM_CALLS = 500  # the exporter queues 2048 spans
ROLES = ("proxy", "prefill", "decode")

Pairs = Sequence[tuple[float, float]]
"""Seconds to the first token without and with tracing, of one round each."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=demo_model.FOLDER)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--calls-only", action="store_true")
    args = parser.parse_args()
    here, there = multiprocessing.Pipe()
    collector = multiprocessing.Process(target=_collect, args=(there,), daemon=True)
    collector.start()
    endpoint = here.recv()
    calls_us = _calls_us(endpoint)
    if args.calls_only:
        print(json.dumps({"calls_us": calls_us}))
        return 0
    tracing = ("--otlp-traces-endpoint", endpoint)
    traced = (*FLAGS, *tracing)
    with (
        Service(args.model, prefill_flags=FLAGS, decode_flags=FLAGS) as off,
        Service(args.model, prefill_flags=traced, decode_flags=traced, proxy_flags=tracing) as on,
    ):
        times = _measure({"off": off.url, "on": on.url}, args.requests, args.prompt_tokens)
    here.send("count")
    num_spans = here.recv()
    collector.join()
    pairs = list(zip(times["off"], times["on"], strict=True))
    report = {
        "requests": args.requests,
        "prompt_tokens": args.prompt_tokens,
        "spans": num_spans,
        "calls_us": calls_us,
        "ttft_off_ms": 1e3 * statistics.median(times["off"]),
        "ttft_on_ms": 1e3 * statistics.median(times["on"]),
        "ratio_of_medians": _with_interval(_ratio_of_medians, pairs),
        "median_of_ratios": _with_interval(_median_of_ratios, pairs),
    }
    print(json.dumps(report, indent=2))
    return 0


def _calls_us(endpoint: str) -> float:
    """Median over requests; the exporter's thread is not in it."""
    proxy, prefill, decode = (create_tracer(endpoint, role=role, name=role, version="1") for role in ROLES)
    costs = []
    for _ in range(NUM_CALLS):
        before_s = time.thread_time()
        now_s = time.monotonic()
        request = proxy.begin("/v1/completions", "request", {}, now_s)
        sent = request.headers()
        legs = [tracer.begin("/v1/completions", "request", sent, now_s) for tracer in (prefill, decode)]
        trace_phases(legs[0], PhaseSeconds(prefill=0.1, scheduled_s=now_s), start_s=now_s - 1)
        trace_phases(legs[1], PhaseSeconds(transfer=0.1, first_token=0.1, scheduled_s=now_s), start_s=now_s - 1)
        costs.append(time.thread_time() - before_s)
        for span in (*legs, request):
            span.end("stop")
    for tracer in (proxy, prefill, decode):
        tracer.close()
    return 1e6 * statistics.median(costs)


def _measure(urls: dict[str, str], num_requests: int, num_tokens: int) -> dict[str, list[float]]:
    """TTFT in seconds of each round."""
    draw = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in urls}
    with httpx.Client(timeout=60, trust_env=False) as client:
        for round_ in range(-10, num_requests):
            for name in sorted(urls, reverse=round_ % 2 == 0):
                prompt = [draw.randrange(3, 250) for _ in range(num_tokens)]
                seconds = _ttft_s(client, urls[name], prompt)
                if round_ >= 0:
                    times[name].append(seconds)
    return times


def _ttft_s(client: httpx.Client, url: str, prompt: list[int]) -> float:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    start_s = time.perf_counter()
    first_s = 0.0
    with client.stream("POST", url + COMPLETIONS_ROUTE, json={**body, "return_token_ids": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for _ in answer.iter_raw():
            first_s = first_s or time.perf_counter() - start_s
    return first_s


def _ratio_of_medians(pairs: Pairs) -> float:
    return statistics.median(on_s for _, on_s in pairs) / statistics.median(off_s for off_s, _ in pairs)


def _median_of_ratios(pairs: Pairs) -> float:
    return statistics.median(on_s / off_s for off_s, on_s in pairs)


def _with_interval(figure: Callable[[Pairs], float], pairs: Pairs) -> dict[str, float]:
    drawn = sorted(figure(random.Random(seed).choices(pairs, k=len(pairs))) for seed in range(NUM_RESAMPLES))
    low, high = drawn[int(0.025 * NUM_RESAMPLES)], drawn[int(0.975 * NUM_RESAMPLES)]
    return {"value": round(figure(pairs), 4), "low": round(low, 4), "high": round(high, 4)}


def _collect(pipe: Connection) -> None:
    os.nice(10)
    with collecting() as collector:
        pipe.send(collector.url)
        pipe.recv()
        pipe.send(len(collector.spans))


if __name__ == "__main__":
    sys.exit(main())
