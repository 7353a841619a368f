"""A holder as its readers see it: memory behind an in-process transfer backend, and the HTTP routes of a peer, whose
beats a test can stop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from common.kv_cache.keys import PrefixKeys
from common.kv_cache.pools.generations import content_tag
from common.node.pull.manifest_stream import ReadablePrefix
from common.server.json_body import read_json_object
from common.transfer.testing.inprocess import InProcessBackend, InProcessHub
from common.wire.headers import REQUEST_ID_HEADER
from common.wire.pull import check_answer
from common.wire.routes import (
    LEASE_RELEASE_ROUTE,
    LEASE_RENEW_ROUTE,
    LIVENESS_ROUTE,
    MANIFEST_CHECK_ROUTE,
    PULL_ROUTE,
    TRANSFER_ROUTE,
)
from tests.support.transfer_memory import BLOCK_GENERATIONS, BLOCKS, SLOT_GENERATIONS, SLOTS, EndpointMemory

ENGINE_ID = "holder"
BLOCK_SIZE = 4
SIZES: dict[str, int] = {"num_blocks": 32, "block_bytes": 64, "num_slots": 4, "slot_bytes": 128}


class PeerHolder:
    """``url`` is set by whoever serves ``app()``."""

    def __init__(self, hub: InProcessHub, *, epoch: int = 77) -> None:
        self.epoch = epoch
        self.hub = hub
        self.memory = EndpointMemory(epoch=epoch, seed=2, **SIZES)
        self.backend = InProcessBackend(hub, engine_id=ENGINE_ID, epoch=epoch)
        self.backend.register(list(self.memory.regions.values()))
        self.num_handshakes = 0
        self.beats = True
        self.is_over = False
        self.has_beats_route = True
        self.released: list[str] = []
        self.checked: list[str] = []
        self.request_ids: list[tuple[str, str | None]] = []
        self.may_check = self.is_mine = True
        self.answers: list[Any] = []
        self.queries: list[dict[str, Any]] = []

    def tag(self, keys: PrefixKeys, num_tokens: int, *, slot_id: int = 1) -> None:
        """The first blocks, and the slot, hold this prompt."""
        for index in range(-(-num_tokens // BLOCK_SIZE)):
            key = keys.key_at(min((index + 1) * BLOCK_SIZE, num_tokens))
            self.memory.set_generation(BLOCK_GENERATIONS, index + 1, 1000 + index + 1, tag=content_tag(key))
        self.memory.set_generation(SLOT_GENERATIONS, slot_id, 1000 + slot_id, tag=content_tag(keys.key_at(num_tokens)))

    def prefix(self, num_tokens: int, *, is_final: bool = False, known_s: float = 0.0) -> ReadablePrefix:
        """The first tokens of the prompt in blocks 1, 2, ..; the state in slot 1."""
        ids = tuple(range(1, -(-num_tokens // BLOCK_SIZE) + 1))
        return ReadablePrefix(
            engine_id=ENGINE_ID,
            epoch=self.epoch,
            num_tokens=num_tokens,
            block_ids=(ids,),
            block_generations=(tuple(1000 + each for each in ids),),
            is_final=is_final,
            known_s=known_s,
            slot_id=1 if is_final else 0,
            slot_generation=1001 if is_final else 0,
            output_row="row" if is_final else None,
        )

    def app(self) -> FastAPI:
        async def note_request_id(request: Request) -> None:
            self.request_ids.append((request.url.path, request.headers.get(REQUEST_ID_HEADER)))

        app = FastAPI(dependencies=[Depends(note_request_id)])

        @app.get(TRANSFER_ROUTE)
        async def transfer() -> Response:
            self.num_handshakes += 1
            return Response(self.backend.metadata())

        @app.get(LIVENESS_ROUTE)
        async def liveness() -> Response:
            if not self.has_beats_route:
                return Response(status_code=404)
            return StreamingResponse(self._beat())

        @app.post(LEASE_RELEASE_ROUTE)
        async def release(request: Request) -> dict[str, Any]:
            self.released += (await read_json_object(request))["lease_ids"]
            return {"unknown": []}

        @app.post(LEASE_RENEW_ROUTE)
        async def renew() -> dict[str, Any]:
            return {"unknown": []}

        @app.post(MANIFEST_CHECK_ROUTE)
        async def check(request: Request) -> dict[str, Any]:
            self.checked.append((await read_json_object(request))["digest"])
            while not self.may_check:
                await asyncio.sleep(0.005)
            return check_answer(self.is_mine)

        @app.post(PULL_ROUTE)
        async def pull(request: Request) -> Response:
            """Answers what the test has queued: a body, or (status, headers, body); waits while there is nothing."""
            self.queries.append(await read_json_object(request))
            while not self.answers:
                await asyncio.sleep(0.005)
            answer = self.answers.pop(0)
            if isinstance(answer, dict):
                return JSONResponse(answer)
            status, headers, body = answer
            return JSONResponse(body, status, headers)

        return app

    async def _beat(self) -> AsyncIterator[str]:
        while not self.is_over:
            if self.beats:
                yield json.dumps({"engine_id": ENGINE_ID, "epoch": str(self.epoch), "beat": 0}) + "\n"
            await asyncio.sleep(0.02)


__all__ = ["BLOCKS", "BLOCK_SIZE", "ENGINE_ID", "SIZES", "SLOTS", "PeerHolder"]
