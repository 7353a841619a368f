"""Damage on demand, for tests: a transferred state or block is zeroed before use (the negative controls of the identity
tests), or a read of the transport fails.

These routes exist only when the process was started with ``TANDEM_TEST_HOOKS=1``. A control proves that a test would
notice: an output that does not depend on what was transferred proves nothing about the transfer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest

from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.node.pull.peer_reader import PeerReader
from common.server.json_body import read_json_object
from common.transfer.backend import TransferBackend
from common.transfer.testing.faulty import Fault, FaultyBackend
from common.wire.fields import invalid
from common.wire.routes import TEST_DAMAGE_ROUTE, TEST_TRANSFER_FAULT_ROUTE

TARGETS = ("state", "block", "blocks")
FAULT_FIELDS = frozenset(field.name for field in dataclasses.fields(Fault))


def add_test_hooks(
    app: FastAPI, reader: PeerReader, backends: Sequence[TransferBackend], storages: Sequence[KVStorage]
) -> None:
    """``POST /internal/v1/test/damage {"target": "state"|"block"|"blocks", "index": 0, "group": 0, "rank": 0}`` damages
    what the next pull brings to a rank: the state, or of an attention group's blocks the one at ``index``, or all;
    ``POST /internal/v1/test/transfer-fault {"kind", "seconds", "count", "on", "rank": 0}`` queues a ``Fault`` of the
    rank's reads, kind ``clear`` ends those of all ranks."""

    @app.post(TEST_DAMAGE_ROUTE)
    async def damage(http: HttpRequest) -> dict[str, Any]:
        body = await read_json_object(http)
        target, index, group_id = body.get("target"), body.get("index", 0), body.get("group", 0)
        storage = storages[body.get("rank", 0)]
        if target not in TARGETS:
            invalid("target", target, f"one of {', '.join(TARGETS)}")

        def after_read(plan: PullPlan) -> None:
            reader.after_read = None
            if target == "state":
                storage.zero_slot(plan.slot_id)
            else:
                pairs = plan.pairs[group_id]
                for _, block_id in pairs if target == "blocks" else [pairs[index]]:
                    storage.zero_block(block_id, group_id)

        reader.after_read = after_read
        return {"armed": target}

    @app.post(TEST_TRANSFER_FAULT_ROUTE)
    async def transfer_fault(http: HttpRequest) -> dict[str, Any]:
        body = await read_json_object(http)
        faulty = [backend for backend in backends if isinstance(backend, FaultyBackend)]
        assert len(faulty) == len(backends), "the hooks are on, so the node wraps its backends"
        if body.get("kind") == "clear":
            for backend in faulty:
                backend.clear()
            return {"cleared": True}
        rank = body.pop("rank", 0)
        unknown = sorted(body.keys() - FAULT_FIELDS)
        if unknown or "kind" not in body:
            invalid("transfer-fault", unknown or body, f"kind and any of {', '.join(sorted(FAULT_FIELDS))}")
        faulty[rank].inject(Fault(**body))
        return {"injected": body["kind"]}
