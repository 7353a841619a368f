"""Follows what the nodes' caches hold, one task per node, into the prefix index.

1 a node comes up: its first answer is a snapshot, 2 long polls bring what came after it, 3 an answer that is a snapshot
again (events were missed, or the node has restarted) replaces everything known of it, 4 a silent node gets further
requests, at growing intervals; what it had is kept for a while, because most silences are short, and then forgotten,
5 when the pool says that a node is gone, it is forgotten at once. A node without the route is left alone until it has
restarted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from common.wire.cache_events import WAIT_S, CacheNews
from common.wire.routes import CACHE_EVENTS_ROUTE
from proxy.metrics.proxy_metrics import ProxyMetrics
from proxy.node_http.errors import NodeClientError, describe
from proxy.nodes.node import Node
from proxy.prefix_index.index import PrefixIndex
from proxy.prefix_index.node_cache import NodeCache

logger = logging.getLogger(__name__)

KEEP_S = 10.0
"""Seconds for which a silent node's entries are kept: most silences are shorter, and its cache survives them."""
ANSWER_TIMEOUT_S = WAIT_S + 10.0
"""Seconds for a whole answer, which begins when there is news or after ``WAIT_S``."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Bytes of an answer; a node whose snapshot is larger is not followed."""
PAUSE_S = 0.02
"""Seconds between an answer and the next request, so that a busy node's events come in batches."""
BACKOFF_S = (0.1, 2.0)
"""Seconds until a request that failed is sent again: at first, doubled each time, and at most."""
THREAD_BYTES = 256 * 1024
"""Larger answers are parsed off the event loop (about 3 ms of work)."""
_ANEW: Mapping[str, str] = {}
"""The position of a feed that wants a snapshot."""


class NoFeedError(Exception):
    """The node sends no events."""


class EventFeeds:
    """A listener of the pool (``proxy.nodes.pool.NodeListener``); ``close`` ends all feeds."""

    def __init__(
        self,
        index: PrefixIndex,
        metrics: ProxyMetrics,
        headers: Mapping[str, str],
        *,
        keep_s: float = KEEP_S,
    ) -> None:
        self._index = index
        self._metrics = metrics
        self._headers = dict(headers)
        self._keep_s = keep_s
        self._followed: dict[Node, asyncio.Task[None]] = {}

    def node_up(self, node: Node) -> None:
        if node.info.pull and node not in self._followed:
            self._followed[node] = asyncio.create_task(self._follow(node), name=f"events {node.url}")

    def node_gone(self, node: Node) -> None:
        self._index.drop(node.url)
        task = self._followed.pop(node, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._followed.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, node: Node) -> None:
        delay_s, position, heard_s = BACKOFF_S[0], _ANEW, time.monotonic()
        is_heard = True
        while True:
            try:
                position = await self._poll(node, position)
            except NoFeedError:
                logger.info("no cache events node=%s: it has no such route", node.url)
                return
            except Exception as exc:  # whatever a node answers, its feed goes on
                # Once per silence: a node that is away for long must not fill the log.
                if is_heard and not isinstance(exc, NodeClientError | ValueError):
                    logger.exception("cache events that cannot be read node=%s", node.url)
                level = logging.INFO if is_heard else logging.DEBUG
                logger.log(level, "no cache events node=%s: %s", node.url, describe(exc))
                is_heard = False
                if time.monotonic() - heard_s > self._keep_s:
                    self._index.drop(node.url)
                    position = _ANEW
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, BACKOFF_S[1])
                continue
            delay_s, heard_s, is_heard = BACKOFF_S[0], time.monotonic(), True
            await asyncio.sleep(PAUSE_S)

    async def _poll(self, node: Node, position: Mapping[str, str]) -> Mapping[str, str]:
        """One answer into the index; returns where the next one goes on. Raises NodeClientError and ValueError."""
        query = urllib.parse.urlencode(position or {"limit": str(self._index.max_entries)})
        answer = await node.client.request(
            "GET",
            f"{CACHE_EVENTS_ROUTE}?{query}",
            headers=self._headers,
            timeout_s=ANSWER_TIMEOUT_S,
            max_bytes=MAX_ANSWER_BYTES,
        )
        if answer.status == 404:
            raise NoFeedError
        if answer.status != 200:
            raise ValueError(f"{CACHE_EVENTS_ROUTE} answers {answer.status}")
        if len(answer.body) > THREAD_BYTES:
            news, cache = await asyncio.to_thread(_read, answer.body)
        else:
            news, cache = _read(answer.body)
        if cache is not None:
            self._index.start(node.url, cache)
            self._metrics.inc("prefix_index_snapshots_total")
            logger.info("cache snapshot node=%s epoch=%s entries=%d", node.url, news.epoch, len(cache))
        elif not all(self._index.apply(node.url, change) for change in news.changes):
            return _ANEW  # somebody dropped the node
        return {"since": str(news.last), "epoch": news.epoch, "limit": str(self._index.max_entries)}


def _read(body: bytes) -> tuple[CacheNews, NodeCache | None]:
    """An answer, and what a snapshot amounts to. Raises ValueError for what is no answer of the route."""
    value: Any = json.loads(body)
    if not isinstance(value, Mapping):
        raise ValueError(f"{CACHE_EVENTS_ROUTE} answers {type(value).__name__}")
    news = CacheNews.from_json(value)
    if not news.is_snapshot:
        return news, None
    cache = NodeCache(news.block_size, news.groups, news.has_state)
    for change in news.changes:
        cache.apply(change)
    return news, cache
