"""The pool's members and their states, and what listeners are told."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from common.errors import InvalidRequestError
from proxy.node_http.client import NodeClient
from proxy.nodes import node as node_module
from proxy.nodes import pool as pool_module
from proxy.nodes.health_probe import ProbeResult
from proxy.nodes.node import Node, NodeRole, NodeState
from proxy.nodes.pool import NodePool
from tests.support.http_server import AppServer, serving
from tests.unit.proxy.fake_node import FakeNode

FAST_S = 0.02


@dataclass
class Listener:
    """Remembers what it was told."""

    told: list[tuple[str, str, str | None]] = field(default_factory=list)

    def node_up(self, node: Node) -> None:
        self.told.append(("up", node.url, node.info.epoch))

    def node_gone(self, node: Node) -> None:
        self.told.append(("gone", node.url, None))


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def pool_of(*decode: str, prefill: tuple[str, ...] = ()) -> AsyncIterator[NodePool]:
    pool = NodePool(
        prefill,
        decode,
        create_client=lambda url: NodeClient(url, connect_timeout_s=2.0),
        poll_interval_s=FAST_S,
        headers={},
    )
    pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_listener_when_a_node_is_restarted_then_told_gone_and_up() -> None:
    node = FakeNode("decode-0", pull=True)
    with serving(node.app()) as server:

        async def work() -> None:
            async with pool_of(server.url) as pool:
                listener = Listener()
                pool.subscribe(listener)
                await until(lambda: listener.told == [("up", server.url, "77")])
                late = Listener()
                pool.subscribe(late)
                assert late.told == listener.told
                node.is_ready = False
                await until(lambda: pool.nodes[0].state is NodeState.SUSPECT)
                node.is_ready = True
                await until(lambda: pool.nodes[0].is_usable)
                assert len(listener.told) == 1  # the same life: nothing was lost
                node.epoch = "78"
                await until(lambda: len(listener.told) == 3)
                assert listener.told[1:] == [("gone", server.url, None), ("up", server.url, "78")]

        run(work)


def test_nodes_when_at_the_same_host_then_are_neighbours_while_they_are_up() -> None:
    nodes = [FakeNode("prefill-0", pull=True), FakeNode("decode-0", pull=True), FakeNode("decode-1")]
    with contextlib.ExitStack() as stack:
        first, second, elsewhere = (stack.enter_context(serving(node.app())) for node in nodes)
        other_name = elsewhere.url.replace("127.0.0.1", "localhost")

        async def work() -> None:
            async with pool_of(second.url, other_name, prefill=(first.url,)) as pool:
                prefill, decode, apart = pool.nodes
                await until(lambda: (prefill.neighbours, decode.neighbours) == ([decode], [prefill]))
                assert (apart.is_up, list(apart.neighbours)) == (True, [])
                for is_ready in (False, True):
                    nodes[0].is_ready = is_ready
                    await until(lambda is_ready=is_ready: bool(decode.neighbours) is is_ready)
                pool.remove(prefill, "removed by the operator")
                await until(lambda: not decode.neighbours)

        run(work)


def test_node_when_removed_with_a_leg_open_then_gone_after_it() -> None:
    node = FakeNode("decode-0")
    with serving(node.app()) as server:

        async def work() -> None:
            async with pool_of(server.url) as pool:
                listener = Listener()
                pool.subscribe(listener)
                await until(lambda: pool.usable(NodeRole.DECODE))
                [record] = pool.nodes
                with record.in_flight():
                    pool.remove(record, "removed by the operator")
                    assert pool.usable(NodeRole.DECODE) == []
                    await asyncio.sleep(5 * FAST_S)
                    assert record.state is NodeState.DRAINING
                    assert pool.nodes == [record]
                await until(lambda: not pool.nodes)
                assert record.reason == "removed"
                assert [what for what, _, _ in listener.told] == ["up", "gone"]

        run(work)


def test_node_when_drained_and_added_again_then_used_again() -> None:
    node = FakeNode("decode-0")
    with serving(node.app()) as server:

        async def work() -> None:
            async with pool_of(server.url) as pool:
                await until(lambda: pool.usable(NodeRole.DECODE))
                [record] = pool.nodes
                pool.drain(record, "maintenance")
                assert "maintenance" in pool.reasons()[0]
                await asyncio.sleep(5 * FAST_S)  # its own 200 does not bring it back
                assert record.state is NodeState.DRAINING
                assert pool.add(server.url, NodeRole.DECODE) is record
                assert (record.state, record.reason) == (NodeState.READY, "")
                node.is_draining = True
                await until(lambda: record.state is NodeState.DRAINING)
                pool.add(server.url, NodeRole.DECODE)  # what the node says of itself stays
                assert record.state is NodeState.DRAINING
                node.is_draining = False
                await until(lambda: record.is_usable)
                with pytest.raises(InvalidRequestError, match="is a decode node already"):
                    pool.add(server.url, NodeRole.PREFILL)

        run(work)


def test_node_when_its_ready_says_draining_then_draining_and_back() -> None:
    node = FakeNode("decode-0")
    with serving(node.app()) as server:

        async def work() -> None:
            async with pool_of(server.url) as pool:
                await until(lambda: pool.usable(NodeRole.DECODE))
                node.is_draining = True
                await until(lambda: pool.nodes[0].state is NodeState.DRAINING)
                assert not pool.usable(NodeRole.DECODE)
                node.is_draining = False
                await until(lambda: pool.usable(NodeRole.DECODE))

        run(work)


def test_node_when_it_says_another_role_then_refused_with_both() -> None:
    node = FakeNode("decode-0", role="prefill")
    with serving(node.app()) as server:

        async def work() -> None:
            async with pool_of(server.url) as pool:
                await until(lambda: pool.nodes[0].is_refused)
                assert "it is a prefill node, configured as a decode node" in pool.reasons()[0]

        run(work)


def test_model_when_its_node_is_silent_for_a_moment_then_another_model_stays_out() -> None:
    first, second = FakeNode("decode-0"), FakeNode("decode-1", fingerprint="beef")
    first_server, second_server = AppServer(first.app()), AppServer(second.app())

    async def work() -> None:
        async with pool_of(first_server.url) as pool:
            await until(lambda: pool.usable(NodeRole.DECODE))
            pool.add(second_server.url, NodeRole.DECODE, origin="operator")
            other = pool.find(second_server.url)
            assert other is not None
            await until(lambda: other.is_refused)
            first.is_ready = False
            await until(lambda: pool.nodes[0].state is NodeState.SUSPECT)
            await asyncio.sleep(10 * FAST_S)
            assert other.is_refused
            assert "beef" in other.reason
            assert "f00d" in other.reason

    try:
        run(work)
    finally:
        first_server.stop()
        second_server.stop()


def test_node_when_the_proxy_stood_still_during_a_probe_then_is_late_and_not_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = FakeNode("decode-0", pull=True)
    now_s = time.monotonic()

    def stall(seconds: float) -> None:
        async def missed(*args: object) -> ProbeResult:
            nonlocal now_s
            now_s += seconds
            return ProbeResult(problem="no connection within 2 s", is_silent=True)

        monkeypatch.setattr(pool_module, "probe", missed)

    with serving(node.app()) as server:

        async def work() -> None:
            pool = NodePool(
                (),
                [server.url],
                create_client=lambda url: NodeClient(url, connect_timeout_s=2.0),
                poll_interval_s=FAST_S,
                headers={},
            )
            [probed] = pool.nodes
            await pool.poll(probed)
            assert pool.usable(NodeRole.DECODE) == [probed]
            for module in (pool_module, node_module):
                monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
            stall(30.0)  # of which a probe waits 4 at most
            await pool.poll(probed)
            assert pool.usable(NodeRole.DECODE) == [probed]
            stall(4.0)
            await pool.poll(probed)
            assert pool.usable(NodeRole.DECODE) == []
            await pool.close()

        run(work)
