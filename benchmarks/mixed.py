"""What a stream feels of long prompts on the other node: ``python -m benchmarks.mixed``.

A prefill and a decode node of one model (size M, random weights), each on a core of its own, and a proxy. A stream runs
on the decode node, first alone, then while prompts go through the proxy to the prefill node and their states come back
to the decode node for one token each; where it reaches the model's length before they are done, another one follows.
The figure is the 99th percentile of the time between two tokens of a stream, while the prompts are under way, over the
same while nothing is. The proxy and who sends the prompts share the prefill node's core, the streams' reader the decode
node's: on the other it would wait for its turn beside a busy node, and report that.

``--local --itl-target X``: prompts go to the decode node itself, beside a stream with a target of X times its idle
median; then the figure is also p99 over the target, and a prompt's time on either node when nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.engine.models import FAMILIES, MAX_TOKENS, SIZES, make_checkpoint
from benchmarks.pipelining import REQUEST_TIMEOUT_S, service
from common.models.synthetic import build_tokenizer
from common.wire.headers import ITL_TARGET_HEADER
from common.wire.routes import COMPLETIONS_ROUTE

STREAM_PROMPT_TOKENS = 64
STREAM_TOKENS = MAX_TOKENS - STREAM_PROMPT_TOKENS - 1
START_S = 1.0
"""The stream runs when the prompts come."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="granitemoehybrid")
    parser.add_argument("--size", choices=tuple(SIZES), default="M")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--prompts", type=int, default=4, help="under way at once")
    parser.add_argument("--tokens", type=int, default=2000, help="of each prompt")
    parser.add_argument("--chunk", type=int, default=512, help="--max-num-batched-tokens of the nodes")
    parser.add_argument("--local", action="store_true", help="prompts go to the decode node")
    parser.add_argument("--stream", type=int, default=400, help="tokens of the idle stream")
    parser.add_argument(
        "--itl-target", type=float, help="for the stream, in times of its idle median; the prompts have none"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    max_tokens = max(MAX_TOKENS, args.tokens + 1)
    if not 2 <= args.stream <= STREAM_TOKENS:
        parser.error(f"--stream {args.stream} is not from 2 to {STREAM_TOKENS}")
    if args.itl_target is not None and args.itl_target <= 0:
        parser.error(f"--itl-target {args.itl_target} is not above 0")
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens} is below 1")
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        path = make_checkpoint(args.family, args.size, getattr(torch, args.dtype), Path(folder))
        config = path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": max_tokens}))
        tokenizer = build_tokenizer(SIZES[args.size]["vocab"], max_tokens)
        tokenizer.save_pretrained(path)
        letter = tokenizer.convert_tokens_to_ids("a")
        nodes = argparse.Namespace(model=str(path), dtype=args.dtype, chunk=args.chunk, tokens=max_tokens - 64)
        spawn = multiprocessing.get_context("spawn")
        with (
            service(nodes, is_proxy_apart=True) as (proxy, prefill, decode),
            ProcessPoolExecutor(1, spawn, os.sched_setaffinity, (0, cores[:1])) as sender,
        ):
            os.sched_setaffinity(0, {cores[-1]})
            idle: list[float] = []
            loaded: list[float] = []
            targets: list[float] = []
            for number in range(args.rounds + 1):  # the first one warms up
                alone, beside, target = asyncio.run(_round(proxy, decode, sender, args, number, letter))
                if number:
                    idle += alone
                    loaded += beside
                    targets.append(target)
            bodies = [[_body(args, 1000 + number)] for number in range(3)]
            alone_s = {
                role: min(end_s - begin_s for begin_s, end_s in (send_prompts(url, each) for each in bodies))
                for role, url in (("prefill", prefill), ("decode", decode))
            }
    print(json.dumps({**vars(args), "cores": os.cpu_count()}))
    for name, values in (("idle", idle), ("loaded", loaded)):
        median, late = _part(values, 0.5), _part(values, 0.99)
        print(f"{name:<7} intervals {len(values):5}  median {median:7.2f} ms  p99 {late:7.2f} ms")
    print(f"p99 loaded / idle {_part(loaded, 0.99) / _part(idle, 0.99):.2f}")
    if args.itl_target is not None:
        target = sum(targets) / len(targets)
        print(f"target {target:.1f} ms; p99 loaded / target {_part(loaded, 0.99) / target:.2f}")
    print(
        f"a prompt alone: {alone_s['prefill']:.2f} s on the prefill node, {alone_s['decode']:.2f} s on the decode "
        f"node, {alone_s['decode'] / alone_s['prefill']:.2f}"
    )
    print(f"longest gap {max(loaded):.2f} ms, {max(loaded) / _part(loaded, 0.5):.2f} median steps")


async def _round(
    proxy: str, decode: str, sender: Executor, args: argparse.Namespace, number: int, letter: int
) -> tuple[list[float], list[float], float]:
    """Milliseconds between tokens: of a stream alone, and of one while the prompts are under way, with its target.
    ``letter``: the token that streams consist of; of random ones many are parts of a character, which are sent when it
    is whole."""
    draw = random.Random(number)

    def prompt(num_tokens: int) -> list[int]:
        return _prompt(args, draw, num_tokens)

    bodies = [_body(args, 10 * number + index) for index in range(args.prompts)]
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S) as client:
        alone: list[float] = []
        await _stream(client, decode, prompt(STREAM_PROMPT_TOKENS), args.stream, letter, alone)
        target = (args.itl_target or math.inf) * _part(_intervals(alone), 0.5)
        headers = {ITL_TARGET_HEADER: str(max(1, round(target)))} if target < math.inf else {}
        streams: list[list[float]] = []

        async def follow_each_other() -> None:
            while True:
                streams.append([])
                await _stream(client, decode, prompt(STREAM_PROMPT_TOKENS), STREAM_TOKENS, letter, streams[-1], headers)

        following = asyncio.create_task(follow_each_other())
        await asyncio.sleep(START_S)
        url = decode if args.local else proxy
        sending = asyncio.get_running_loop().run_in_executor(sender, send_prompts, url, bodies)
        try:
            done, _ = await asyncio.wait((sending, following), return_when=asyncio.FIRST_COMPLETED)
            if following in done:
                following.result()  # why there are no more tokens
            begin_s, end_s = await sending
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    beside = [[at for at in arrivals if begin_s <= at <= end_s] for arrivals in streams]
    return _intervals(alone), [value for arrivals in beside for value in _intervals(arrivals)], target


def _prompt(args: argparse.Namespace, draw: random.Random, num_tokens: int) -> list[int]:
    return [draw.randrange(10, SIZES[args.size]["vocab"]) for _ in range(num_tokens)]


def _body(args: argparse.Namespace, seed: int) -> bytes:
    """Of one prompt."""
    prompt = _prompt(args, random.Random(f"prompt {seed}"), args.tokens)
    return json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}).encode()


def send_prompts(url: str, bodies: Sequence[bytes]) -> tuple[float, float]:
    """All at once, and when the first began and the last was answered. Runs in a process of its own: the clock is the
    machine's."""

    async def send() -> None:
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, headers=headers) as client:
            answers = await asyncio.gather(*(client.post(url + COMPLETIONS_ROUTE, content=body) for body in bodies))
        for answer in answers:
            answer.raise_for_status()

    begin_s = time.perf_counter()
    asyncio.run(send())
    return begin_s, time.perf_counter()


async def _stream(
    client: httpx.AsyncClient,
    url: str,
    prompt: list[int],
    num_tokens: int,
    letter: int,
    arrivals: list[float],
    headers: Mapping[str, str] | None = None,
) -> None:
    """Appends the time at which each token arrived."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "logit_bias": {str(letter): 100}}
    async with client.stream("POST", url + COMPLETIONS_ROUTE, json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.perf_counter())


def _intervals(arrivals: list[float]) -> list[float]:
    return [1e3 * (b - a) for a, b in itertools.pairwise(arrivals)]


def _part(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    main()
