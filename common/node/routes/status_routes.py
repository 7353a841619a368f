"""What a node says about itself: probes, metrics and version to everybody; identity, load and cache to its cluster."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from common.node.node import Node
from common.node.routes.load import load_report
from common.server import drain
from common.server.versions import installed_versions
from common.text.tokenizer import TextCodec
from common.wire.routes import (
    CACHE_CHECK_ROUTE,
    HEALTH_ROUTE,
    INFO_ROUTE,
    LOAD_ROUTE,
    METRICS_ROUTE,
    READY_ROUTE,
    VERSION_ROUTE,
)


def add_probe_routes(app: FastAPI, node: Node) -> None:
    """``/health``, ``/ready``, ``/metrics``, ``/version``."""

    @app.get(HEALTH_ROUTE)
    async def health() -> JSONResponse:
        if node.death is not None:
            return JSONResponse({"status": "dead", "reason": node.death}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get(READY_ROUTE)
    async def ready() -> JSONResponse:
        if node.death is not None:
            return JSONResponse({"status": "not ready", "reason": node.death}, status_code=503)
        if node.drain.is_draining:
            return JSONResponse({"status": drain.STATUS, "reason": drain.STATUS}, status_code=503)
        return JSONResponse({"status": "ready"})

    @app.get(METRICS_ROUTE)
    async def metrics() -> Response:
        await node.refresh_stats()
        body, content_type = node.metrics.render()
        return Response(body, media_type=content_type)

    @app.get(VERSION_ROUTE)
    async def version() -> dict[str, str | None]:
        return installed_versions()


def add_info_routes(app: FastAPI, node: Node, codec: TextCodec | None) -> None:
    """``/internal/v1/info``, ``/internal/v1/load``, ``/internal/v1/cache/check``; they need the cluster key."""
    manager, layout = node.model.manager, node.model.storage.layout

    @app.get(INFO_ROUTE)
    async def info() -> dict[str, Any]:
        cache = node.model.cache_config
        return {
            "role": node.role.value,
            "name": node.name,
            "engine_id": node.engine_id,
            "epoch": str(manager.generations.epoch),
            "pull": True,
            "resume": True,
            "answers": None if codec is None else codec.answer_format.describe(),
            "host": node.advertised_host,
            "port": node.config.port,
            "model": node.model_name,
            "max_model_len": node.model.max_model_len,
            "fingerprint": node.agents.fingerprint,
            "model_fingerprint": node.model.loaded.fingerprint,
            "tensor_parallel_size": node.model.loaded.num_ranks,
            "block_size": cache.block_size,
            "num_blocks": next(iter(cache.num_blocks), 1),
            "num_slots": cache.num_slots,
            "block_bytes": next(iter(layout.group_block_bytes), 0),
            "slot_bytes": layout.slot_bytes,
            "groups": [
                {"label": group.label, "window": group.window, "num_blocks": num_blocks, "block_bytes": num_bytes}
                for group, num_blocks, num_bytes in zip(
                    cache.geometry.attention_groups,
                    cache.num_blocks,
                    layout.group_block_bytes,
                    strict=False,
                )
            ],
            "max_num_seqs": node.config.max_num_seqs,
            "running": node.core.num_running,
            "waiting": node.admission.num_waiting,
            "load": load_report(node),
        }

    @app.get(LOAD_ROUTE)
    async def load() -> dict[str, Any]:
        return load_report(node)

    @app.get(CACHE_CHECK_ROUTE)
    async def check() -> dict[str, Any]:
        """Violated invariants (none: ``ok``) and where every block, slot and lease is, between two steps."""
        violations, stats = await node.engine.call(lambda: (manager.check(), manager.stats()))
        return {
            "ok": not violations,
            "violations": violations,
            "blocks": dict(stats.blocks),
            "slots": dict(stats.slots),
            "leases": stats.leases_active,
            "sequences": stats.num_sequences,
        }
