"""Damage on demand, for the negative controls of the identity tests: a transferred state or block is zeroed before use.

Only there when the process was started with ``TANDEM_TEST_HOOKS=1``. A control proves that a test would notice: an
output that does not depend on what was transferred proves nothing about the transfer.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest

from common.api.fields import invalid
from common.api.http import read_json_object
from common.kv_cache.manager import PullPlan
from common.node.node import Node

TEST_HOOKS_VARIABLE = "TANDEM_TEST_HOOKS"
TARGETS = ("state", "block")


def add_test_hooks(app: FastAPI, node: Node) -> None:
    """``POST /internal/v1/test/damage {"target": "state"|"block", "index": 0}`` damages what the next pull brings."""

    @app.post("/internal/v1/test/damage")
    async def damage(http: HttpRequest) -> dict[str, Any]:
        body = await read_json_object(http)
        target, index = body.get("target"), body.get("index", 0)
        if target not in TARGETS:
            invalid("target", target, f"one of {', '.join(TARGETS)}")

        def after_read(plan: PullPlan) -> None:
            node.source.after_read = None
            if target == "state":
                node.model.storage.zero_slot(plan.slot_id)
            else:
                node.model.storage.zero_block(plan.block_pairs[index][1])

        node.source.after_read = after_read
        return {"armed": target}
