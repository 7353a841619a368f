"""Interleaved sessions against a service: how much of their prompts nobody had to compute, and who did the work.

A turn's prompt is the one before, its answer and new tokens. All sessions do their first turn, in some order, then
all their second, a few at the same time: between two turns of a session come those of all others.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from common.wire.headers import TRACE_HEADER
from common.wire.routes import COMPLETIONS_ROUTE
from tests.support.service import Service

REQUEST_TIMEOUT_S = 300.0
SETTLE_S = 0.5
"""Between a session's turns at the least: a reader's time, and that of the nodes' cache events."""


@dataclass(frozen=True)
class Traffic:
    """``answer`` of the ``growth`` tokens between two prompts are generated, the rest is new."""

    num_sessions: int = 40
    num_turns: int = 6
    first: int = 300
    growth: int = 80
    answer: int = 16
    concurrency: int = 4
    vocab_size: int = 512
    seed: int = 7

    @property
    def longest(self) -> int:
        return self.first + (self.num_turns - 1) * self.growth + self.answer

    @property
    def num_prompt_tokens(self) -> int:
        turns = range(self.num_turns)
        return self.num_sessions * sum(self.first + turn * self.growth for turn in turns)

    @property
    def num_cacheable_tokens(self) -> int:
        """What one node that forgets nothing would find: the prompt before and its answer, less the last token, whose
        state is not there yet."""
        found = [self.first + turn * self.growth + self.answer - 1 for turn in range(self.num_turns - 1)]
        return self.num_sessions * sum(found)


@dataclass
class Result:
    """Sums over all requests; ``served`` counts requests by node, as the answers name them."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    served: Counter[str] = field(default_factory=Counter)
    placements: Counter[str] = field(default_factory=Counter)
    transferred_bytes: int = 0
    e2e_ms: list[float] = field(default_factory=list)

    def spread(self, names: Sequence[str]) -> float:
        """How far the busiest of ``names`` is above their mean, in requests; 0 when all served the same."""
        values = [self.served[name] for name in names]
        return max(values) * len(values) / sum(values) - 1 if sum(values) else 0.0


async def run_sessions(url: str, traffic: Traffic) -> Result:
    draw = random.Random(traffic.seed)
    result = Result()
    prompts = [_tokens(draw, traffic.first, traffic.vocab_size) for _ in range(traffic.num_sessions)]
    gate = asyncio.Semaphore(traffic.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:

        async def turn(session: int) -> None:
            async with gate:
                started_s = time.perf_counter()
                body = await _complete(client, prompts[session], traffic.answer)
                result.e2e_ms.append(1000 * (time.perf_counter() - started_s))
            count(result, body, len(prompts[session]))
            new = _tokens(draw, traffic.growth - traffic.answer, traffic.vocab_size)
            prompts[session] = [*prompts[session], *body["choices"][0]["token_ids"], *new]

        for _ in range(traffic.num_turns):
            order = draw.sample(range(traffic.num_sessions), traffic.num_sessions)
            await asyncio.gather(*(turn(session) for session in order))
            await asyncio.sleep(SETTLE_S)
    return result


def count(result: Result, body: dict[str, Any], num_prompt_tokens: int) -> None:
    trace = body["tandem"]
    result.num_prompt_tokens += num_prompt_tokens
    result.num_cached_tokens += body["usage"]["prompt_tokens_details"]["cached_tokens"]
    result.placements[trace["placement"]] += 1
    result.transferred_bytes += trace["transferred_bytes"]
    result.served[trace["decode_node"]] += 1
    if trace["prefill_node"] is not None:
        result.served[trace["prefill_node"]] += 1


async def _complete(client: httpx.AsyncClient, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    body = {
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = await client.post(COMPLETIONS_ROUTE, json=body, headers={TRACE_HEADER: "1"})
    answer.raise_for_status()
    return dict(answer.json())


def _tokens(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(10, vocab_size) for _ in range(count)]


def names(service: Service, role: str) -> list[str]:
    """As the answers name the nodes."""
    nodes = service.prefill if role == "prefill" else service.decode
    return [f"{role}-{node.url.rpartition(':')[2]}" for node in nodes]
