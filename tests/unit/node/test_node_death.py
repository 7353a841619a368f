"""A node in this process whose engine or puller dies, or whose step hangs: what its probes, metrics and clients see.

That the process ends then is ``tests/unit/server/test_serve.py``'s, and all of it together ``tests/e2e``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI

from common.config.node import NodeConfig
from common.errors import EngineDeadError
from common.kv_cache.layout_document import NodeLayout
from common.metrics.table import Role
from common.node import app as node_app
from common.node import engine_thread, runtime
from common.node.node import Node
from common.server.drain import Drain
from common.transfer.backend import TransferBackend
from common.transfer.testing.inprocess import InProcessBackend, InProcessHub
from tests.support.models import checkpoint

DEADLINE_S = 30.0
BODY = {"prompt": list(range(20, 60)), "max_tokens": 16_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def config() -> NodeConfig:
    model = str(checkpoint("granitemoehybrid"))
    return NodeConfig(model=model, dtype="float32", device="cpu", kv_cache_memory=64 << 20)


@pytest.fixture(scope="module")
def model(config: NodeConfig) -> runtime.NodeModel:
    return runtime.load_node_model(config)


class Running:
    """A node's app, its node, and a client of it."""

    def __init__(self, app: FastAPI, node: Node, client: httpx.AsyncClient) -> None:
        self.node = node
        self.drain: Drain = app.state.drain
        self._client = client

    async def status(self, path: str, method: str = "GET") -> tuple[int, str]:
        answer = await self._client.request(method, path)
        return answer.status_code, answer.text

    async def complete(self) -> httpx.Response:
        return await self._client.post("/v1/completions", json=BODY)


@pytest_asyncio.fixture
async def running(
    config: NodeConfig, model: runtime.NodeModel, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    hub = InProcessHub()
    nodes: list[Node] = []

    def in_process(
        *, engine_id: str, epoch: int, fingerprint: str, layout: NodeLayout, backends: Any, enter_thread: Any
    ) -> TransferBackend:
        return InProcessBackend(hub, engine_id=engine_id, epoch=epoch, fingerprint=fingerprint, layout=layout)

    def create_node(*args: Any) -> Node:
        nodes.append(Node(*args))
        return nodes[-1]

    monkeypatch.setattr(runtime, "NixlBackend", in_process)
    monkeypatch.setattr(node_app, "Node", create_node)
    app = node_app.create_node_app(config, model, Role.DECODE)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://node", timeout=DEADLINE_S) as client,
    ):
        yield Running(app, nodes[0], client)


async def kill_engine(running: Running, monkeypatch: pytest.MonkeyPatch) -> str:
    def die() -> None:
        raise EngineDeadError("the device is gone")

    monkeypatch.setattr(running.node.core, "step", die)
    return "the device is gone"


async def kill_puller(running: Running, monkeypatch: pytest.MonkeyPatch) -> str:
    await asyncio.to_thread(running.node.agents._pullers[0].close)
    return "the transfer layer stopped"


@pytest.mark.asyncio
@pytest.mark.parametrize("kill", [kill_engine, kill_puller])
async def test_node_when_a_part_of_it_dies_then_probes_say_so_metrics_stay_and_requests_fail_typed(
    running: Running, monkeypatch: pytest.MonkeyPatch, kill: Any
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for path in ("/health", "/ready", "/metrics"):
            for method in ("GET", "HEAD"):
                assert (await running.status(path, method))[0] == 200
        waiting = asyncio.create_task(running.complete())
        while not running.node.core.num_running:
            await asyncio.sleep(0.01)
        reason = await kill(running, monkeypatch)
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_node")
        await running.drain.failed.wait()
        assert running.drain.stopped.is_set()  # peers' liveness streams end with it
        for path in ("/health", "/ready"):
            status, text = await running.status(path)
            assert status == 503
            assert reason in text
        assert (await running.status("/metrics"))[0] == 200
        refused = await running.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


@pytest.mark.asyncio
async def test_node_when_a_step_hangs_then_is_dead_and_when_it_is_only_idle_then_is_not(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 1.0
    monkeypatch.setattr(engine_thread, "MAX_IDLE_WAIT_S", limit_s / 20)
    object.__setattr__(running.node, "config", Limits(limit_s))
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.sleep(2 * limit_s)
        assert running.node.death is None
        goes_on = asyncio.Event()
        loop = asyncio.get_running_loop()
        step = running.node.core.step

        def hang() -> Any:
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(DEADLINE_S)
            return step()

        monkeypatch.setattr(running.node.core, "step", hang)
        answer = await running.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_node")
        assert '--engine-hang-seconds 1"' in (await running.status("/health"))[1]
        assert running.drain.failed.is_set()
        goes_on.set()


class Limits:
    """Of a node's configuration what is read while it runs here; shorter than the flag allows."""

    def __init__(self, engine_hang_seconds: float) -> None:
        self.engine_hang_seconds = engine_hang_seconds
