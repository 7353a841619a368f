"""What a long prompt's first token costs when another process computes it: ``python -m benchmarks.pipelining``.

Starts a prefill node, a decode node and a proxy on loopback, each node on a core of its own where there are two. New
prompts take turns: *remote*, through the proxy, so that blocks travel while later chunks are computed; *local*, the
decode node's own prefill. The difference is what the handoff adds. Medians in milliseconds; the ratio is the median of
the rounds' own ratios, because a machine's speed drifts by more than a handoff costs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.ports import free_ports
from common.demo_model import FOLDER
from common.wire.headers import TRACE_HEADER
from common.wire.routes import COMPLETIONS_ROUTE, READY_ROUTE

START_TIMEOUT_S = 180.0
REQUEST_TIMEOUT_S = 600.0
PROXY_FLAGS = ("--policy", "round_robin", "--log-level", "warning")  # every prompt is handed off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(FOLDER), help="checkpoint (default: the built-in model)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=8000, help="prompt length")
    parser.add_argument("--chunk", type=int, default=512, help="--max-num-batched-tokens of the nodes")
    parser.add_argument("--rounds", type=int, default=16)
    args = parser.parse_args()
    vocab_size = int(json.loads((Path(args.model) / "config.json").read_text())["vocab_size"])
    with service(args) as (proxy, _, decode), httpx.Client(timeout=REQUEST_TIMEOUT_S) as client:
        times: dict[str, list[float]] = {"remote": [], "local": []}
        trace: dict[str, Any] = {}
        for round_index in range(args.rounds + 1):
            ways = (("remote", proxy), ("local", decode))
            for way, url in ways if round_index % 2 else ways[::-1]:
                draw = random.Random(f"{round_index} {way}")
                prompt = [draw.randrange(10, vocab_size) for _ in range(args.tokens)]
                seconds, answer = first_token(client, url, prompt)
                if round_index:  # the first round warms up
                    times[way].append(seconds * 1000)
                if way == "remote":
                    trace = answer["tandem"]
    medians = {way: statistics.median(values) for way, values in times.items()}
    configuration = {**vars(args), "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    print(json.dumps({"configuration": configuration}))
    print(json.dumps({"ttft_ms": {way: [round(value, 1) for value in values] for way, values in times.items()}}))
    print(json.dumps({"last_trace": trace}))
    ratios = sorted(remote / local for remote, local in zip(times["remote"], times["local"], strict=True))
    print(
        f"remote {medians['remote']:.1f} ms, local {medians['local']:.1f} ms, remote / local "
        f"{statistics.median(ratios):.3f} (rounds {ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


def first_token(client: httpx.Client, url: str, prompt: Sequence[int]) -> tuple[float, dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    started_s = time.perf_counter()
    answer = client.post(url + COMPLETIONS_ROUTE, json=body, headers={TRACE_HEADER: "1"}).raise_for_status()
    return time.perf_counter() - started_s, answer.json()


@contextlib.contextmanager
def service(args: argparse.Namespace, *, is_proxy_apart: bool = False) -> Iterator[tuple[str, str, str]]:
    """URLs of the proxy, the prefill and the decode node; every process is ended on the way out. ``is_proxy_apart``:
    the proxy stays off the decode node's core."""
    cores = sorted(os.sched_getaffinity(0))
    proxy_cores = set(cores[:1]) if is_proxy_apart else set(cores)
    node_flags = [
        *("--model", args.model, "--dtype", args.dtype, "--device", "cpu"),
        *("--max-model-len", str(args.tokens + 64), "--max-num-batched-tokens", str(args.chunk)),
        *("--kv-cache-memory", "1GiB", "--log-level", "warning"),
    ]
    ports = free_ports(3)
    prefill, decode, proxy = (f"http://127.0.0.1:{port}" for port in ports)
    argvs = [
        (["prefill_node", "--port", str(ports[0]), *node_flags], {cores[0]}),
        (["decode_node", "--port", str(ports[1]), *node_flags], {cores[-1]}),
        (["proxy", "--port", str(ports[2]), "--prefill", prefill, "--decode", decode, *PROXY_FLAGS], proxy_cores),
    ]
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as log:
        try:
            for argv, affinity in argvs:
                process = subprocess.Popen([sys.executable, "-m", *argv], stdout=log, stderr=subprocess.STDOUT)
                os.sched_setaffinity(process.pid, affinity)
                processes.append(process)
            for url, process in zip((prefill, decode, proxy), processes, strict=True):
                wait_ready(url, process)
            yield proxy, prefill, decode
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url + READY_ROUTE, timeout=2).status_code == 200:
                return
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise SystemExit(f"{url} did not become ready")


if __name__ == "__main__":
    main()
