"""Names whose addresses are nodes: several with the same address, and what an operator says meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proxy.node_http.client import NodeClient
from proxy.nodes.discovery import Discovery, DnsTarget
from proxy.nodes.node import NodeRole
from proxy.nodes.pool import NodePool

ADDRESS, URL = "10.0.0.1", "http://10.0.0.1:8200"


class Names:
    """Two names of decode nodes, asked one at a time."""

    def __init__(self) -> None:
        self.answers: dict[str, set[str]] = {"one": {ADDRESS}, "two": {ADDRESS}}
        self.pool = NodePool(
            (), (), create_client=lambda url: NodeClient(url, connect_timeout_s=1.0), poll_interval_s=60.0, headers={}
        )
        self.targets = {name: DnsTarget(f"dns+http://{name}:8200", NodeRole.DECODE) for name in self.answers}
        self.discovery = Discovery(self.pool, list(self.targets.values()), interval_s=60.0, resolve=self._resolve)

    async def _resolve(self, host: str, port: int) -> set[str]:
        return self.answers[host]

    async def ask(self, name: str, *addresses: str) -> None:
        self.answers[name] = set(addresses)
        await self.discovery.resolve_once(self.targets[name])


def run(work: Callable[[Names], Awaitable[None]]) -> None:
    async def with_names() -> None:
        names = Names()
        try:
            await work(names)
        finally:
            await names.pool.close()

    asyncio.run(with_names())


@pytest.mark.parametrize("first", ["one", "two"])
def test_address_when_two_names_have_it_then_its_node_leaves_with_the_last_of_them(first: str) -> None:
    last = "two" if first == "one" else "one"

    async def work(names: Names) -> None:
        for name in ("one", "two"):
            await names.ask(name, ADDRESS)
        await names.ask(first)
        node = names.pool.find(URL)
        assert node is not None
        assert (node.hold_reason, node.is_leaving) == (None, False)
        await names.ask(last)
        assert names.pool.find(URL) is None
        await names.ask(first, ADDRESS)
        assert names.pool.find(URL) is not None

    run(work)


def test_node_when_an_operator_drains_it_then_the_first_answer_of_another_name_does_not_take_it_back() -> None:
    async def work(names: Names) -> None:
        await names.ask("one", ADDRESS)
        node = names.pool.find(URL)
        assert node is not None
        names.pool.drain(node, "drained by the operator")
        await names.ask("two", ADDRESS)
        assert node.hold_reason == "drained by the operator"

    run(work)


def test_node_when_an_operator_removed_it_then_the_first_answer_of_another_name_does_not_bring_it_back() -> None:
    async def work(names: Names) -> None:
        await names.ask("one", ADDRESS)
        node = names.pool.find(URL)
        assert node is not None
        names.pool.remove(node, "removed by the operator")
        await names.ask("two", ADDRESS)
        assert names.pool.find(URL) is None
        for name in ("one", "two"):
            await names.ask(name)
        await names.ask("two", ADDRESS)
        assert names.pool.find(URL) is not None

    run(work)


def test_node_when_its_address_comes_back_while_it_drains_for_that_then_is_used_again() -> None:
    async def work(names: Names) -> None:
        await names.ask("one", ADDRESS)
        node = names.pool.find(URL)
        assert node is not None
        with node.in_flight():
            await names.ask("one")
            assert node.is_leaving
            await names.ask("two", ADDRESS)
            assert (node.hold_reason, node.is_leaving) == (None, False)
        await names.ask("two")
        assert names.pool.find(URL) is None

    run(work)
