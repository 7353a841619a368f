"""What a node tells of its cache's contents to those who place requests (``common.wire.cache_events``)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from common.kv_cache.groups.recurrent_state import STATE_LABEL
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.observe.events import CacheEvent, CacheSnapshot, EventKind, EventLog
from common.kv_cache.tiers.stored_prefix import StoredPrefix
from common.node.engine_thread import EngineThread
from common.node.tiers.node_tiers import NodeTiers
from common.server.json_body import encode_json
from common.wire.cache_events import CHECKPOINT, MAX_KEYS, TIER_PREFIX, WAIT_S, CacheChange, CacheNews, truncate_key
from common.wire.fields import invalid
from common.wire.routes import CACHE_EVENTS_ROUTE

POLL_S = 0.02
"""Time between two checks of the log while there is no news. It is polled so that the engine has nothing to wake."""

Below = Mapping[str, Sequence[StoredPrefix]]
"""What is in a node's tiers, by kind."""

assert STATE_LABEL == CHECKPOINT


def add_event_route(
    app: FastAPI, manager: KVCacheManager, engine: EngineThread, tiers: NodeTiers | None = None
) -> None:
    @app.get(CACHE_EVENTS_ROUTE)
    async def events(http: HttpRequest) -> Response:
        """Query: ``since`` (without: a snapshot), ``epoch``, ``limit`` (blocks and checkpoints of a snapshot)."""
        since = _number(http, "since")
        limit = _number(http, "limit")
        log = manager.events
        assert log is not None, "nodes ask for events"
        if since is not None and http.query_params.get("epoch") == str(manager.generations.epoch):
            news = await _wait(log, since)
            if news is not None:
                return _answer(manager, news[1], news[0], is_snapshot=False)
        snapshot, below = await engine.call(lambda: (manager.snapshot(), tiers.stored() if tiers is not None else {}))
        return await asyncio.to_thread(_snapshot_answer, manager, snapshot, below, limit)


async def _wait(log: EventLog, since: int) -> tuple[list[CacheChange], int] | None:
    """The changes after ``since``, empty after WAIT_S, and the last one's number. None: the reader must start again."""
    deadline_s = time.monotonic() + WAIT_S
    while log.last_sequence_number == since and time.monotonic() < deadline_s:  # noqa: ASYNC110 - see POLL_S
        await asyncio.sleep(POLL_S)
    found = log.since(since)
    if found is None:
        return None
    num_keys = itertools.accumulate(len(event.keys) for event in found)
    batch = [event for event, total in zip(found, num_keys, strict=True) if total - len(event.keys) < MAX_KEYS]
    return list(changes_of(batch)), batch[-1].sequence_number if batch else since


def _snapshot_answer(manager: KVCacheManager, snapshot: CacheSnapshot, below: Below, limit: int | None) -> Response:
    changes = snapshot_changes(snapshot, limit)
    room = None if limit is None else max(0, limit - sum(len(change.keys) for change in changes))
    changes += itertools.islice(tier_changes(below), room)
    return _answer(manager, snapshot.sequence_number, changes, is_snapshot=True)


def _answer(manager: KVCacheManager, last: int, changes: list[CacheChange], *, is_snapshot: bool) -> Response:
    cache = manager.config
    news = CacheNews(
        epoch=str(manager.generations.epoch),
        last=last,
        is_snapshot=is_snapshot,
        block_size=cache.block_size,
        groups=tuple(group.label for group in cache.geometry.attention_groups),
        has_state=cache.has_state,
        changes=tuple(changes),
    )
    return Response(encode_json(news.to_json()), media_type="application/json")


def changes_of(events: Iterable[CacheEvent]) -> Iterator[CacheChange]:
    """The events in order; neighbours that say the same of the same group are one change."""
    keyed = itertools.groupby(events, key=_merge_key)
    for (is_stored, group, number), run in keyed:
        if number is None:
            yield CacheChange(is_stored, group, tuple(truncate_key(key) for event in run for key in event.keys))
            continue
        for event in run:
            yield CacheChange(
                True,
                group,
                (truncate_key(event.keys[0]),),
                truncate_key(event.parent),
                event.position,
                event.has_row,
            )


def snapshot_changes(snapshot: CacheSnapshot, limit: int | None = None) -> list[CacheChange]:
    """Everything in it as stored changes, or about ``limit`` blocks and checkpoints, those of shallow positions first.

    No event is made for each block: a node has a hundred thousand of them.
    """
    checkpoints = sorted(snapshot.checkpoints, key=lambda event: event.position)[:limit]
    share = None if limit is None else (limit - len(checkpoints)) // max(1, len(snapshot.groups))
    changes = []
    for group in snapshot.groups:
        positions, block_of = group.positions, group.block_of
        keys = sorted(block_of, key=lambda key: positions[block_of[key]])[:share]
        if keys:
            changes.append(CacheChange(True, group.label, tuple(map(truncate_key, keys))))
    return [*changes, *changes_of(checkpoints)]


def tier_changes(below: Below) -> Iterator[CacheChange]:
    """What tiers hold, as stored changes; of each tier the latest used first."""
    for kind, prefixes in below.items():
        for prefix in reversed(prefixes):
            keys = (truncate_key(prefix.key),)
            boundary = truncate_key(prefix.checkpoint.boundary_key)
            yield CacheChange(True, TIER_PREFIX + kind, keys, boundary, prefix.position, prefix.has_row)


def _merge_key(event: CacheEvent) -> tuple[bool, str, int | None]:
    is_stored = event.kind is EventKind.STORED
    return is_stored, event.group, event.position if is_stored and event.is_checkpoint else None


def _number(http: HttpRequest, name: str) -> int | None:
    text = http.query_params.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        invalid(name, text, "a number of at most 18 digits")
    return int(text)
