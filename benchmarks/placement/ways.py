"""Remote prefill or the decode node's own, each forced and left to the proxy: what the choice is worth.

*suffix*: a conversation whose first 2,000 tokens are on the decode node goes on with 40 more: time to its first token.
*cold*: a new prompt of 3,000 tokens comes while streams run: the gaps between their tokens until its own first one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from common.wire.headers import PLACEMENT_HEADER, TRACE_HEADER
from common.wire.routes import COMPLETIONS_ROUTE

WAYS = ("auto", "local", "remote")
SETTLE_S = 1.5
"""For the nodes' events and loads to arrive."""
BEGIN_TIMEOUT_S = 30.0


@dataclass
class Way:
    """Of one way: seconds by request, or by gap; ``placed`` are the placements that the answers name."""

    values_s: list[float] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return 1000 * statistics.median(self.values_s)

    @property
    def p99_ms(self) -> float:
        ordered = sorted(self.values_s)
        return 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


@dataclass
class Stream:
    """One streamed completion as it came: a time for each event with a token."""

    times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    placement: str = ""


async def measure_suffix(
    url: str, *, prefix: int = 2000, suffix: int = 40, rounds: int = 7, vocab_size: int, seed: int = 3
) -> dict[str, Way]:
    draw = random.Random(seed)
    ways = {way: Way() for way in WAYS}
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for round_index in range(rounds + 1):
            for way in draw.sample(WAYS, len(WAYS)):
                prompt = tokens(draw, prefix, vocab_size)
                first = await stream(client, prompt, 8, "remote")
                await asyncio.sleep(SETTLE_S)
                prompt += [*first.token_ids, *tokens(draw, suffix, vocab_size)]
                started_s = time.perf_counter()
                answer = await stream(client, prompt, 2, way)
                if round_index:  # the first round warms up
                    ways[way].values_s.append(answer.times_s[0] - started_s)
                    ways[way].placed.append(answer.placement)
    return ways


async def measure_cold(
    url: str,
    *,
    prompt: int = 3000,
    streams: int = 8,
    stream_tokens: int = 2_000,
    rounds: int = 4,
    vocab_size: int,
    seed: int = 4,
) -> dict[str, Way]:
    draw = random.Random(seed)
    ways = {way: Way() for way in WAYS}
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for round_index in range(rounds + 1):
            for way in draw.sample(WAYS, len(WAYS)):
                received = [Stream() for _ in range(streams)]
                running = [
                    asyncio.create_task(stream(client, tokens(draw, 24, vocab_size), stream_tokens, "remote", each))
                    for each in received
                ]
                await asyncio.sleep(SETTLE_S)
                await _wait_begun(received)
                started_s = time.perf_counter()
                answer = await stream(client, tokens(draw, prompt, vocab_size), 2, way)
                ended_s = answer.times_s[0]
                is_covered = not any(task.done() for task in running)
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                if not is_covered:
                    raise RuntimeError("the streams ended before the prompt was computed: make them longer")
                if round_index:
                    ways[way].placed.append(answer.placement)
                    for each in received:
                        ways[way].values_s += _gaps(each.times_s, started_s, ended_s)
    return ways


async def _wait_begun(streams: Sequence[Stream]) -> None:
    deadline_s = time.perf_counter() + BEGIN_TIMEOUT_S
    while not all(each.times_s for each in streams):
        if time.perf_counter() > deadline_s:
            raise RuntimeError(f"the streams have not begun within {BEGIN_TIMEOUT_S:.0f} s")
        await asyncio.sleep(0.1)


def _gaps(times_s: Sequence[float], start_s: float, end_s: float) -> list[float]:
    """Between events, of those gaps that overlap the span."""
    return [after - before for before, after in itertools.pairwise(times_s) if after > start_s and before < end_s]


async def stream(
    client: httpx.AsyncClient, prompt: Sequence[int], num_tokens: int, way: str, into: Stream | None = None
) -> Stream:
    into = into if into is not None else Stream()
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    headers = {TRACE_HEADER: "1", PLACEMENT_HEADER: way}
    async with client.stream("POST", COMPLETIONS_ROUTE, json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            token_ids = [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
            if token_ids:
                into.times_s.append(time.perf_counter())
                into.token_ids += token_ids
            if "tandem" in event:
                into.placement = event["tandem"]["placement"]
    return into


def tokens(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(10, vocab_size) for _ in range(count)]
