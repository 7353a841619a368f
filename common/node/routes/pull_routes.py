"""What concerns prefixes that travel: handshake, liveness, pull, manifests and leases, which nodes call on each other,
and handing over streams, which the proxy calls. All need the cluster key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from common.errors import InvalidRequestError, TandemError
from common.kv_cache.manager import KVCacheManager
from common.node.engine_thread import EngineThread
from common.node.lend.manifest_builder import ManifestBuilder
from common.node.lend.prefix_holder import PrefixHolder
from common.node.lend.rendezvous import RendezvousTable, TooManyRendezvousError, UnknownPullError
from common.node.peers.liveness import BEAT_S
from common.openai.errors import error_response
from common.server.disconnect import run_until_disconnect
from common.server.drain import Drain
from common.server.json_body import read_json_object, run_for_body
from common.wire.fields import Fields, shown
from common.wire.headers import LEG_FAILED, LEG_HEADER
from common.wire.pull import ManifestCheck, RendezvousQuery, check_answer, nothing_new_answer, parse_query
from common.wire.resume import HandOver
from common.wire.routes import (
    HAND_OVER_ROUTE,
    LEASE_RELEASE_ROUTE,
    LEASE_RENEW_ROUTE,
    LIVENESS_ROUTE,
    MANIFEST_CHECK_ROUTE,
    PULL_ROUTE,
    TRANSFER_ROUTE,
)

MAX_LEASES_PER_CALL = 10_000
"""Lease ids that one call may name: more than a reader can hold, and a bound on what one call costs."""


def add_pull_routes(
    app: FastAPI,
    *,
    engine_id: str,
    lease_seconds: float,
    announcement: Callable[[], bytes],
    engine: EngineThread,
    manager: KVCacheManager,
    rendezvous: RendezvousTable,
    holder: PrefixHolder,
    manifests: ManifestBuilder,
    drain: Drain,
) -> None:
    vocab_size = manager.config.geometry.vocab_size
    life = {"engine_id": engine_id, "epoch": str(manager.generations.epoch)}

    @app.get(TRANSFER_ROUTE)
    async def transfer() -> Response:
        # In a thread: it waits while a read is being posted or the agent is made again.
        return Response(await asyncio.to_thread(announcement), media_type="application/json")

    @app.get(LIVENESS_ROUTE)
    async def liveness() -> StreamingResponse:
        return StreamingResponse(_beats(life, drain.stopped), media_type="application/x-ndjson")

    @app.post(PULL_ROUTE)
    async def pull(http: HttpRequest) -> Response:
        body = await read_json_object(http)
        query = await run_for_body(http, lambda: parse_query(body, vocab_size=vocab_size))
        if isinstance(query, RendezvousQuery):
            return await run_until_disconnect(http, _follow(rendezvous, query))
        return JSONResponse(await holder.answer(query))

    @app.post(HAND_OVER_ROUTE)
    async def hand_over(http: HttpRequest) -> dict[str, Any]:
        asked = HandOver.from_body(await read_json_object(http))
        return {"num_tokens": await holder.hand_over(asked.stream_id, asked.lease_id)}

    @app.post(MANIFEST_CHECK_ROUTE)
    async def check_manifest(http: HttpRequest) -> dict[str, Any]:
        return check_answer(manifests.is_mine(ManifestCheck.from_body(await read_json_object(http))))

    @app.post(LEASE_RENEW_ROUTE)
    async def renew(http: HttpRequest) -> dict[str, Any]:
        """Extends each lease by a full period from now, never shortens it; names those that are gone."""
        lease_ids = _lease_ids(await read_json_object(http))
        deadline_s = time.monotonic() + lease_seconds
        return {"unknown": [lease_id for lease_id in lease_ids if not manager.leases.renew(lease_id, deadline_s)]}

    @app.post(LEASE_RELEASE_ROUTE)
    async def release(http: HttpRequest) -> dict[str, Any]:
        """Ends leases, and legs whose prompt was to be leased under such an id; names those that are neither. With
        ``may_come`` also legs that are not here yet."""
        body = await read_json_object(http)
        lease_ids, may_come = _lease_ids(body), Fields(body).boolean("may_come")
        called_off = {each for each in lease_ids if rendezvous.release(each, may_come=may_come)}
        unknown = await engine.call(lambda: [each for each in lease_ids if not manager.release_lease(each)])
        return {"unknown": [lease_id for lease_id in unknown if lease_id not in called_off]}


async def _follow(rendezvous: RendezvousTable, query: RendezvousQuery) -> Response:
    """The long poll of the rendezvous form. A header tells an error of the leg from one of the query."""
    try:
        found = await rendezvous.wait(query.id, query.after, query.wait_seconds, query.have)
    except (UnknownPullError, TooManyRendezvousError):
        raise
    except TandemError as exc:
        response = error_response(exc)
        response.headers[LEG_HEADER] = LEG_FAILED
        return response
    return JSONResponse(nothing_new_answer(query.after) if found is None else found.to_params())


async def _beats(life: Mapping[str, str], stopped: asyncio.Event) -> AsyncIterator[str]:
    """A line each ``BEAT_S`` until the reader leaves or the process stops serving."""
    beat = 0
    while not stopped.is_set():
        yield json.dumps({**life, "beat": beat}) + "\n"
        beat += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await stopped.wait()


def _lease_ids(body: Mapping[str, Any]) -> list[str]:
    value = body.get("lease_ids")
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidRequestError(f"lease_ids must be a list of strings, got {shown(value)}", param="lease_ids")
    if len(value) > MAX_LEASES_PER_CALL:
        raise InvalidRequestError(
            f"lease_ids must hold at most {MAX_LEASES_PER_CALL} ids, got {len(value)}", param="lease_ids"
        )
    return value
