"""What the engine is told of a request's target for its first token, when its prompt took a while to arrive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

from common.node.pull.handoff import HandoffResult
from common.node.serving.prompt_jobs import PromptJob
from common.node.serving.serving import Serving
from common.request import Request, SamplingParams

PROMPT_S = 0.05
"""Until the prefill node has computed the prompt; both legs are sent at once."""


class Node:
    """What ``Serving`` has beside it: a peer that takes ``PROMPT_S``, and an engine that keeps what it is asked."""

    images = None

    def __init__(self) -> None:
        self.asked: list[Request] = []

    @contextlib.asynccontextmanager
    async def read(self, *args: Any) -> AsyncIterator[HandoffResult]:
        await asyncio.sleep(PROMPT_S)
        yield HandoffResult()

    @contextlib.asynccontextmanager
    async def waiting_for_peer(self) -> AsyncIterator[None]:
        yield

    async def generate(self, request: Request) -> AsyncIterator[None]:
        self.asked.append(request)
        return
        yield


def asked_of_the_engine(due_s: float | None) -> Request:
    node, nothing = Node(), cast(Any, None)
    given = cast(Any, node)
    serving = Serving(
        "node",
        "model",
        eos_token_ids=frozenset(),
        prompts=given,
        admission=given,
        engine=given,
        rendezvous=nothing,
        sources=nothing,
        prefill_leg=None,
        handoffs=given,
        grammars=nothing,
        metrics=nothing,
        tracer=nothing,
    )
    job = PromptJob(
        0, "request", [1, 2, 3], (), SamplingParams(), given, [], first_token_due_s=due_s, itl_target_s=0.02
    )
    request: Any = SimpleNamespace(cache_salt=None, priority=0, output=SimpleNamespace(n=1))

    async def run() -> None:
        async for _ in serving._outputs(request, job):
            raise AssertionError("this engine answers nothing")

    asyncio.run(run())
    return node.asked[0]


def test_target_when_the_prompt_was_waited_for_then_the_engine_has_what_is_left_of_it() -> None:
    due_s = time.monotonic() + 10.0
    request = asked_of_the_engine(due_s)
    assert request.ttft_target_s is not None
    assert request.ttft_target_s <= 10.0 - PROMPT_S
    assert abs(request.arrival_s + request.ttft_target_s - due_s) < 1e-6


def test_target_when_there_is_none_then_the_engine_has_none() -> None:
    assert asked_of_the_engine(None).ttft_target_s is None
