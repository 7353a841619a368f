"""A prefill leg from its body to its answer, while the engine is in a long step: its reader never takes that for a leg
that does not come."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from common.engine.outputs import PhaseSeconds, RequestOutput
from common.errors import NodeUnavailableError, RequestAbortedError, TandemError
from common.kv_cache.sharing.leases import LeasedPrefix
from common.metrics.metrics import Metrics
from common.metrics.table import Role
from common.node.lend.prefill_leg import PrefillLeg
from common.node.lend.rendezvous import RendezvousTable
from common.node.serving.prompt_jobs import PromptReader
from common.node.serving.serving import Serving
from common.openai.errors import install_error_handlers
from common.request import FinishReason, Request
from common.server.gate import install_middleware
from common.telemetry.tracing import Tracer
from common.wire.handoff import prefill_leg_params
from common.wire.pull import ContentQuery
from common.wire.routes import COMPLETIONS_ROUTE
from tests.unit.node.test_sources import FIRST, PROMPT, FakeNode, manifest

pytestmark = pytest.mark.asyncio
NAME = "rendezvous-1"
LEG_WAIT_S = 0.05
STEP_S = 0.3
LONG_S = 30.0


async def has_it(url: str, query: ContentQuery) -> dict[str, Any]:
    return manifest(query)


@dataclass
class PrefillNode(FakeNode):
    """Its engine is in a step when it is called, and the leg's reader comes during that. ``is_given_up``: the reader
    leaves then too; ``death``: what the step ends with."""

    is_given_up: bool = False
    death: TandemError | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.answer = has_it
        self.computed: list[Request] = []
        self.reader: asyncio.Task[Any] | None = None
        self.table = RendezvousTable(is_in_use=lambda _: False, call_off=lambda _: None, leg_wait_s=LEG_WAIT_S)

    async def call(self, function: Any) -> Any:
        self.reader = asyncio.create_task(self.table.wait(NAME, 0, LONG_S))
        await asyncio.sleep(STEP_S)
        if self.is_given_up:
            self.table.release(NAME)
        if self.death is not None:
            raise self.death
        return function()

    async def generate(self, request: Request) -> Any:
        self.computed.append(request)
        num_tokens = len(request.prompt_token_ids)
        ids = (tuple(range(1, num_tokens // 4 + 1)),)
        key = self.manager.prefix_keys(request.prompt_token_ids).key_at(num_tokens)
        lease = LeasedPrefix(num_tokens, ids, ids, slot_id=3, slot_generation=9, key=key, output_row=None)
        yield RequestOutput(
            request.request_id, 0, [], finish_reason=FinishReason.LENGTH, handoff=lease, seconds=PhaseSeconds()
        )

    async def serve_leg(self) -> httpx.Response:
        """The answer to a prefill leg that names one source."""
        node, metrics = cast(Any, self), Metrics(Role.PREFILL)
        codec: Any = SimpleNamespace(encode_prompts=lambda request: [list(prompt) for prompt in request.prompts])
        serving = Serving(
            "node",
            "model",
            eos_token_ids=frozenset(),
            prompts=PromptReader(codec, None, cache_config=self.manager.config, max_model_len=64, metrics=metrics),
            admission=cast(Any, SimpleNamespace(check=lambda num_answers: None)),
            engine=node,
            rendezvous=self.table,
            sources=self.sources(),
            prefill_leg=PrefillLeg(
                "node", manager=self.manager, engine=node, rendezvous=self.table, manifests=self.manifests()
            ),
            handoffs=None,
            grammars=cast(Any, None),
            metrics=metrics,
            tracer=Tracer(),
        )
        app = Starlette(routes=[Route(COMPLETIONS_ROUTE, serving.completions, methods=["POST"])])
        install_error_handlers(app)
        install_middleware(app)
        body = {
            "prompt": PROMPT,
            "kv_transfer_params": prefill_leg_params(NAME),
            "tandem_sources": [{"url": FIRST.url, "epoch": str(FIRST.epoch)}],
        }
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
            return await client.post(COMPLETIONS_ROUTE, json=body)


async def test_reader_when_the_leg_waits_for_a_step_before_it_asks_a_source_then_gets_the_manifest() -> None:
    node = PrefillNode()
    answer = await node.serve_leg()
    assert answer.status_code == 200
    assert node.reader is not None
    found = await node.reader
    assert (found.lease_id, found.num_tokens) == (NAME, len(PROMPT))
    [request] = node.computed
    assert (node.asked, request.remote.url) == ([FIRST.url], FIRST.url)
    assert node.held == [], "what the source leased is given up when the leg has ended"


async def test_leg_when_called_off_before_it_is_computed_then_it_is_not() -> None:
    node = PrefillNode(is_given_up=True)
    assert (await node.serve_leg()).status_code == RequestAbortedError.status
    assert (node.computed, node.held) == ([], [])
    assert node.reader is not None
    with pytest.raises(RequestAbortedError):
        await node.reader


async def test_reader_when_the_engine_ends_before_the_leg_is_computed_then_hears_it() -> None:
    node = PrefillNode(death=NodeUnavailableError("the engine of this node has stopped"))
    assert (await node.serve_leg()).status_code == NodeUnavailableError.status
    assert node.reader is not None
    with pytest.raises(NodeUnavailableError):
        await node.reader
