"""The feed between a node's real route, over a real cache, and the index: whatever happens to the node, the index ends
up with what the node has."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from common.kv_cache.manager import KVCacheManager
from common.node.routes.event_route import add_event_route
from common.openai.errors import install_error_handlers
from common.wire.cache_events import MAX_KEYS, CacheNews
from common.wire.routes import CACHE_EVENTS_ROUTE
from proxy.node_http.client import NodeClient
from proxy.nodes.node import Node, NodeInfo, NodeRole
from proxy.prefix_index import event_feed
from proxy.prefix_index.coverage import Coverage
from proxy.prefix_index.event_feed import EventFeeds
from proxy.prefix_index.index import PrefixIndex
from proxy.prefix_index.prompt_keys import PromptKeys
from tests.support.http_server import AppServer, serving
from tests.unit.kv_cache.turns import run_turn
from tests.unit.kv_cache.world import make_config

A, B, C = (list(range(start, start + 30)) for start in (100, 200, 300))


def new_manager(**fields: Any) -> KVCacheManager:
    return KVCacheManager(make_config(events=True, **fields))


class Engine:
    async def call(self, function: Callable[[], Any]) -> Any:
        return function()


@dataclass
class CacheNode:
    """A node of which only the cache and its route are real. ``trouble``: answers that come before its own."""

    manager: KVCacheManager = field(default_factory=new_manager)
    trouble: list[Response] = field(default_factory=list)
    queries: list[dict[str, str]] = field(default_factory=list)
    is_frozen: bool = False

    def app(self) -> FastAPI:
        app = FastAPI()
        install_error_handlers(app)

        @app.middleware("http")
        async def first(request: Request, call_next: Any) -> Response:
            self.queries.append(dict(request.query_params))
            while self.is_frozen:
                await asyncio.sleep(0.01)
            return self.trouble.pop(0) if self.trouble else await call_next(request)

        add_event_route(app, self.manager, Engine())  # type: ignore[arg-type]
        return app


@dataclass
class Site:
    """``feeds`` follow ``node`` into ``index``; ``record`` is the pool's record of it."""

    node: CacheNode
    index: PrefixIndex
    record: Node
    server: AppServer
    feeds: EventFeeds = field(init=False)
    num_snapshots: int = 0

    def inc(self, name: str) -> None:
        assert name == "prefix_index_snapshots_total"
        self.num_snapshots += 1

    def restart(self, manager: KVCacheManager) -> None:
        """The node ends and begins anew, at the same address."""
        port = self.server.port
        self.server.stop()
        self.node.manager = manager
        self.server = AppServer(self.node.app(), port)

    @property
    def url(self) -> str:
        return self.record.url

    def found(self, token_ids: Sequence[int]) -> Coverage:
        return self.index.lookup(PromptKeys.of_prompt(b"test model", 4, token_ids)).get(self.url, Coverage(0, 0))

    async def settles(self, *prompts: Sequence[int], timeout_s: float = 10.0) -> None:
        """Until the index says of each prompt what the node would find."""
        manager = self.node.manager
        wanted = []
        for prompt in prompts:
            hit = manager.lookup(manager.prefix_keys(prompt), len(prompt))
            wanted.append(hit.num_tokens)
        async with asyncio.timeout(timeout_s):
            while [self.found(prompt).state_tokens for prompt in prompts] != wanted:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def following(node: CacheNode, keep_s: float = 30.0, max_entries: int = 10_000) -> AsyncIterator[Site]:
    server = AppServer(node.app())
    client = NodeClient(server.url, connect_timeout_s=2.0)
    record = Node(server.url, NodeRole.DECODE, client, info=NodeInfo(pull=True, epoch="1"))
    index = PrefixIndex(max_entries)
    site = Site(node, index, record, server)
    site.feeds = EventFeeds(index, site, {}, keep_s=keep_s)  # type: ignore[arg-type]
    site.feeds.node_up(record)
    try:
        yield site
    finally:
        await site.feeds.close()
        await client.close()
        site.server.stop()


@pytest.mark.asyncio
async def test_feed_when_a_node_caches_and_evicts_then_the_index_follows() -> None:
    node = CacheNode(new_manager(num_blocks=16, num_slots=6))
    run_turn(node.manager, A)
    async with following(node) as site:
        await site.settles(A)
        assert site.found(A) == Coverage(30, 30)  # the whole prompt, tail and last row too
        run_turn(node.manager, B, boundaries=[18])
        await site.settles(A, B, B[:20])
        assert site.found(B[:20]).state_tokens == 18
        run_turn(node.manager, C)
        await site.settles(A, B, C)
        assert site.found(A).state_tokens == 0, "evicted for C"
        assert site.num_snapshots == 1


@pytest.mark.asyncio
async def test_feed_when_events_were_missed_then_a_snapshot_tells_the_rest() -> None:
    node = CacheNode()
    assert node.manager.events is not None
    node.manager.events._events = deque(maxlen=2)
    async with following(node) as site:
        await _until(lambda: site.num_snapshots == 1)
        for prompt in (A, B, C):
            run_turn(node.manager, prompt)
        await site.settles(A, B, C)
        assert site.found(C).state_tokens == 30
        assert site.num_snapshots == 2


@pytest.mark.asyncio
async def test_feed_when_a_node_lives_anew_then_what_it_had_is_forgotten() -> None:
    node = CacheNode()
    run_turn(node.manager, A)
    async with following(node) as site:
        await site.settles(A)
        manager = new_manager()
        run_turn(manager, B)
        await asyncio.to_thread(site.restart, manager)
        await site.settles(A, B)
        assert site.found(A).state_tokens == 0
        assert site.found(B).state_tokens == 30


@pytest.mark.asyncio
async def test_feed_when_a_node_answers_nonsense_or_not_at_all_then_it_is_asked_again() -> None:
    node = CacheNode()
    node.trouble = [
        Response(status_code=500),
        Response("no json"),
        JSONResponse({"epoch": "1", "last": -1, "block_size": 4}),
        JSONResponse({"epoch": "1", "last": 1, "block_size": 4, "changes": [["+", "attention", "0011"]]}),
    ]
    run_turn(node.manager, A)
    async with following(node) as site:
        await site.settles(A, timeout_s=20)
        assert not node.trouble
        node.is_frozen = True
        run_turn(node.manager, B)
        await asyncio.sleep(0.1)
        assert site.found(A).state_tokens == 30, "kept while it is silent"
        node.is_frozen = False
        await site.settles(A, B)


@pytest.mark.asyncio
async def test_feed_when_a_node_is_down_for_long_or_removed_then_its_entries_go_and_come_back_with_it() -> None:
    node = CacheNode()
    run_turn(node.manager, A)
    async with following(node, keep_s=0.2) as site:
        await site.settles(A)
        node.trouble = [Response(status_code=503)] * 3
        await _until(lambda: site.index.num_entries(site.url) == 0)
        await site.settles(A)
        site.feeds.node_gone(site.record)
        assert site.index.num_entries(site.url) == 0
        num_queries = len(node.queries)
        await asyncio.sleep(0.3)
        assert len(node.queries) <= num_queries + 1, "nobody asks a node that was removed"


@pytest.mark.asyncio
async def test_feed_when_a_node_has_no_such_route_then_it_is_asked_once_a_life_and_assumed_to_keep_prompts() -> None:
    node = CacheNode(trouble=[Response(status_code=404)])
    run_turn(node.manager, A)
    async with following(node) as site:
        await _until(lambda: not node.trouble)
        await asyncio.sleep(0.4)
        assert len(node.queries) == 1
        site.index.observe(site.url, PromptKeys.of_prompt(b"test model", 4, B))
        assert site.found(B) == Coverage(28, 28)
        site.feeds.node_gone(site.record)
        site.feeds.node_up(site.record)
        await site.settles(A, B)
        assert site.found(B).attention_tokens == 0, "now it tells by itself"


@pytest.mark.asyncio
async def test_feed_when_somebody_drops_the_node_then_it_begins_with_a_snapshot_again() -> None:
    node = CacheNode()
    async with following(node) as site:
        run_turn(node.manager, A)
        await _until(lambda: site.num_snapshots == 1)
        await site.settles(A)
        site.index.drop(site.url)
        run_turn(node.manager, B)
        await site.settles(A, B)
        assert site.found(A).state_tokens == 30


@pytest.mark.asyncio
async def test_feed_when_the_node_has_more_than_the_index_may_hold_then_the_beginnings_of_prompts_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_feed, "THREAD_BYTES", 1000)
    node = CacheNode(new_manager(num_blocks=5000, num_slots=30, state=False))
    prompts = [[number] * 4000 for number in range(4)]
    for prompt in prompts:
        run_turn(node.manager, prompt)
    async with following(node, max_entries=1200) as site:
        await _until(lambda: site.num_snapshots == 1)
        assert site.index.num_entries(site.url) <= 1200
        assert [site.found(prompt).attention_tokens // 100 for prompt in prompts] == [11, 11, 11, 11]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


# --- the route by itself ----------------------------------------------------------------------------------------------


def test_route_when_there_is_much_news_then_it_comes_in_bounded_parts() -> None:
    node = CacheNode(new_manager(num_blocks=3 * MAX_KEYS))
    with serving(node.app()) as server, httpx.Client(base_url=server.url) as client:
        first = CacheNews.from_json(client.get(CACHE_EVENTS_ROUTE).json())
        assert (first.is_snapshot, first.last, first.changes) == (True, 0, ())
        for number in range(10):
            run_turn(node.manager, [number] * MAX_KEYS, budget=200)
        last, sizes = 0, []
        while not sizes or sizes[-1]:
            answer = client.get(CACHE_EVENTS_ROUTE, params={"since": last, "epoch": first.epoch})
            news = CacheNews.from_json(answer.json())
            assert not news.is_snapshot
            assert news.last > last or not news.changes
            sizes.append(sum(len(change.keys) for change in news.changes))
            last = news.last
        assert sum(sizes) == 10 * (MAX_KEYS // 4 + 1)
        assert max(sizes) < MAX_KEYS + 100
        assert len(sizes) > 2


@pytest.mark.parametrize("query", ["since=x", "since=-1", "since=1&limit=1e3", "since=" + "9" * 30])
def test_route_when_a_number_is_none_then_400_names_it(query: str) -> None:
    with serving(CacheNode().app()) as server:
        answer = httpx.get(f"{server.url}{CACHE_EVENTS_ROUTE}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in query


def test_route_when_asked_with_another_life_or_a_number_to_come_then_it_is_a_snapshot() -> None:
    node = CacheNode()
    run_turn(node.manager, A)
    with serving(node.app()) as server, httpx.Client(base_url=server.url) as client:
        epoch = client.get(CACHE_EVENTS_ROUTE).json()["epoch"]
        for query in ({"since": 1, "epoch": "5"}, {"since": 1}, {"since": 99, "epoch": epoch}):
            answer = client.get(CACHE_EVENTS_ROUTE, params=query).json()
            assert answer["snapshot"], query
            assert len(answer["changes"]) == 2
