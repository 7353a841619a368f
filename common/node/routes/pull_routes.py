"""The routes that nodes call on each other: handshake, liveness, pull, leases. All of them need the cluster key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from common.errors import InvalidRequestError, QueueFullError, TandemError
from common.node.lend.rendezvous import UnknownPullError
from common.node.node import Node
from common.node.peers.liveness import BEAT_S
from common.node.pull.sources import answer_content
from common.openai.errors import error_response
from common.server.http import read_json_object, run_until_disconnect
from common.wire.fields import Fields
from common.wire.headers import LEG_HEADER
from common.wire.pull import RendezvousQuery, nothing_new_answer, parse_query
from common.wire.routes import LEASE_RELEASE_ROUTE, LEASE_RENEW_ROUTE, LIVENESS_ROUTE, PULL_ROUTE, TRANSFER_ROUTE

MAX_LEASES_PER_CALL = 10_000


def add_pull_routes(app: FastAPI, node: Node) -> None:
    manager = node.model.manager
    vocab_size = node.model.cache_config.geometry.vocab_size

    @app.get(TRANSFER_ROUTE)
    async def transfer() -> Response:
        # In a thread: it waits while a read is being posted or the agent is made again.
        return Response(await asyncio.to_thread(node.backend.metadata), media_type="application/json")

    @app.get(LIVENESS_ROUTE)
    async def liveness() -> StreamingResponse:
        return StreamingResponse(_beats(node), media_type="application/x-ndjson")

    @app.post(PULL_ROUTE)
    async def pull(http: HttpRequest) -> Response:
        query = parse_query(await read_json_object(http), vocab_size=vocab_size)
        if isinstance(query, RendezvousQuery):
            return await run_until_disconnect(http, _follow(node, query))
        return JSONResponse(await answer_content(node, query))

    @app.post(LEASE_RENEW_ROUTE)
    async def renew(http: HttpRequest) -> dict[str, Any]:
        """Extends each lease by a full period from now, never shortens it; names those that are gone."""
        lease_ids = _lease_ids(await read_json_object(http))
        deadline_s = time.monotonic() + node.config.kv_lease_seconds
        return {"unknown": [lease_id for lease_id in lease_ids if not manager.leases.renew(lease_id, deadline_s)]}

    @app.post(LEASE_RELEASE_ROUTE)
    async def release(http: HttpRequest) -> dict[str, Any]:
        """Ends leases, and legs whose prompt was to be leased under such an id; names those that are neither. With
        ``may_come`` also legs that are not here yet."""
        body = await read_json_object(http)
        lease_ids, may_come = _lease_ids(body), Fields(body).boolean("may_come")
        called_off = {each for each in lease_ids if node.rendezvous.release(each, may_come=may_come)}
        unknown = await node.engine.call(lambda: [each for each in lease_ids if not manager.release_lease(each)])
        return {"unknown": [lease_id for lease_id in unknown if lease_id not in called_off]}


async def _follow(node: Node, query: RendezvousQuery) -> Response:
    """The long poll of the rendezvous form. An error of the leg is told from one of the question by a header."""
    try:
        found = await node.rendezvous.wait(query.id, query.after, query.wait_seconds)
    except (UnknownPullError, QueueFullError):
        raise
    except TandemError as exc:
        response = error_response(exc)
        response.headers[LEG_HEADER] = "failed"
        return response
    return JSONResponse(nothing_new_answer(query.after) if found is None else found.to_params())


async def _beats(node: Node) -> AsyncIterator[str]:
    """A line each ``BEAT_S`` until the reader leaves or the process stops serving."""
    life = {"engine_id": node.engine_id, "epoch": str(node.model.manager.generations.epoch)}
    beat = 0
    while not node.drain.stopped.is_set():
        yield json.dumps({**life, "beat": beat}) + "\n"
        beat += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await node.drain.stopped.wait()


def _lease_ids(body: Mapping[str, Any]) -> list[str]:
    value = body.get("lease_ids")
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidRequestError(
            f"lease_ids must be a list of strings, got {json.dumps(value)[:80]}", param="lease_ids"
        )
    if len(value) > MAX_LEASES_PER_CALL:
        raise InvalidRequestError(
            f"lease_ids must hold at most {MAX_LEASES_PER_CALL} ids, got {len(value)}", param="lease_ids"
        )
    return value
