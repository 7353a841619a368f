"""The FastAPI app that both nodes share: OpenAI routes, probes, and the internal routes between processes.

``create_node_app`` builds no state of its own: the ``Node`` is started in the lifespan and reached through closures, so
two apps can live in one process. The model is loaded before (it may take minutes and may fail); the app serves at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from common.config.key_file import read_key_file
from common.config.node import NodeConfig
from common.errors import InvalidRequestError
from common.metrics.metrics import Metrics
from common.metrics.table import Role
from common.node.node import Node
from common.node.pull.handoff import Intake
from common.node.routes.event_route import add_event_route
from common.node.routes.load import load_report
from common.node.routes.pull_routes import add_pull_routes
from common.node.routes.test_hooks import add_test_hooks
from common.node.routes.tokenizer_route import add_tokenizer_route
from common.node.runtime import NodeModel, has_test_hooks
from common.node.serving.serving import PrefillLeg, Serving
from common.openai import responses
from common.openai.errors import install_error_handlers
from common.openai.protocol import check_model, parse_chat
from common.server import drain
from common.server.http import install_middleware, read_json_object
from common.server.versions import build_labels, installed_versions
from common.telemetry.tracing import NO_FRAMEWORK_TELEMETRY
from common.text.tokenizer import TextCodec
from common.wire.fields import Fields
from common.wire.handoff import FIELD, prefill_leg_params
from common.wire.routes import (
    CACHE_CHECK_ROUTE,
    CHAT_ROUTE,
    COMPLETIONS_ROUTE,
    DETOKENIZE_ROUTE,
    HEALTH_ROUTE,
    INFO_ROUTE,
    LOAD_ROUTE,
    METRICS_ROUTE,
    MODELS_ROUTE,
    READY_ROUTE,
    TOKENIZE_ROUTE,
    VERSION_ROUTE,
)


def create_node_app(
    config: NodeConfig,
    model: NodeModel,
    role: Role,
    *,
    create_prefill_leg: Callable[[Node], PrefillLeg] | None = None,
    create_intake: Callable[[Node], Intake] | None = None,
) -> FastAPI:
    """An app for ``model``. A node without a prefill leg hands nothing out, one without an intake takes nothing in."""
    metrics = Metrics(role, versions=build_labels())
    node = Node(config, model, role.value, metrics)
    loaded = model.loaded
    codec = None
    if loaded.tokenizer is not None:
        codec = TextCodec(loaded.tokenizer, vocab_size=loaded.geometry.vocab_size)
    serving = Serving(
        node,
        codec,
        prefill_leg=create_prefill_leg(node) if create_prefill_leg is not None else None,
        intake=create_intake(node) if create_intake is not None else None,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await node.start()
        try:
            yield
        finally:
            await node.close()

    app = FastAPI(
        title=f"tandem {role.value} node",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        telemetry=NO_FRAMEWORK_TELEMETRY,
    )
    api_keys = read_key_file(config.api_key_file, "--api-key-file") if config.api_key_file else ()
    install_error_handlers(app)
    install_middleware(app, max_body_bytes=config.max_body_bytes, api_keys=api_keys, cluster_key=node.cluster_key)
    drain.add_drain(app, node.drain, has_cluster_key=node.cluster_key is not None)
    app.add_api_route(COMPLETIONS_ROUTE, serving.completions, methods=["POST"])
    app.add_api_route(CHAT_ROUTE, serving.chat, methods=["POST"])
    _add_public_routes(app, node, serving)
    _add_internal_routes(app, node)
    add_pull_routes(app, node)
    add_event_route(app, node)
    add_tokenizer_route(app, node, codec)
    if has_test_hooks():
        add_test_hooks(app, node)
    return app


def _add_public_routes(app: FastAPI, node: Node, serving: Serving) -> None:
    started_s = int(time.time())

    @app.get(MODELS_ROUTE)
    async def models() -> dict[str, Any]:
        return responses.models_response(
            node.served_model_name, created=started_s, max_model_len=node.model.max_model_len
        )

    @app.post(TOKENIZE_ROUTE)
    async def tokenize(http: HttpRequest) -> dict[str, Any]:
        body = await read_json_object(http)
        fields = Fields(body)
        check_model(fields.string("model"), (node.served_model_name,))
        if body.get("messages") is not None:
            # Of a chat request only what makes the prompt is known here: what it asks of the answer is ignored.
            chat = parse_chat({**body, FIELD: prefill_leg_params()})
            token_ids = await asyncio.to_thread(serving.codec.encode_chat, chat)
        else:
            prompt = fields.string("prompt")
            if prompt is None:
                raise InvalidRequestError("prompt or messages is required", param="prompt")
            add_special_tokens = fields.boolean("add_special_tokens", True)
            # In a thread: a body of 16 MiB takes seconds, in which this node would not beat and seem dead to its peers.
            token_ids = await asyncio.to_thread(serving.codec.encode, prompt, add_special_tokens=add_special_tokens)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": node.model.max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if fields.boolean("return_token_strs"):
            pieces = await asyncio.to_thread(serving.codec.pieces, token_ids)
            answer["token_strs"] = [piece.text for piece in pieces]
        return answer

    @app.post(DETOKENIZE_ROUTE)
    async def detokenize(http: HttpRequest) -> dict[str, Any]:
        fields = Fields(await read_json_object(http))
        check_model(fields.string("model"), (node.served_model_name,))
        token_ids = fields.int_list("tokens", le=serving.codec.vocab_size - 1)
        if token_ids is None:
            raise InvalidRequestError("tokens is required", param="tokens")
        return {"prompt": await asyncio.to_thread(serving.codec.decode, token_ids)}

    @app.get(HEALTH_ROUTE)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get(READY_ROUTE)
    async def ready() -> JSONResponse:
        if node.drain.is_draining:
            return JSONResponse({"status": drain.STATUS, "reason": drain.STATUS}, status_code=503)
        reason = node.not_ready_reason()
        if reason is not None:
            return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})

    @app.get(METRICS_ROUTE)
    async def metrics() -> Response:
        await node.refresh_stats()
        body, content_type = node.metrics.render()
        return Response(body, media_type=content_type)

    @app.get(VERSION_ROUTE)
    async def version() -> dict[str, str | None]:
        return installed_versions()


def _add_internal_routes(app: FastAPI, node: Node) -> None:
    manager = node.model.manager

    @app.get(INFO_ROUTE)
    async def info() -> dict[str, Any]:
        cache = node.model.cache_config
        return {
            "role": node.role,
            "name": node.name,
            "engine_id": node.engine_id,
            "epoch": str(manager.generations.epoch),
            "pull": True,
            "resume": True,
            "host": node.advertised_host,
            "port": node.config.port,
            "model": node.served_model_name,
            "max_model_len": node.model.max_model_len,
            "fingerprint": node.backend.fingerprint,
            "model_fingerprint": node.model.loaded.fingerprint,
            "block_size": cache.block_size,
            "num_blocks": next(iter(cache.num_blocks), 1),
            "num_slots": cache.num_slots,
            "block_bytes": next(iter(node.model.storage.layout.group_block_bytes), 0),
            "slot_bytes": node.model.storage.layout.slot_bytes,
            "groups": [
                {"label": group.label, "window": group.window, "num_blocks": num_blocks, "block_bytes": num_bytes}
                for group, num_blocks, num_bytes in zip(
                    cache.geometry.attention_groups,
                    cache.num_blocks,
                    node.model.storage.layout.group_block_bytes,
                    strict=False,
                )
            ],
            "max_num_seqs": node.config.max_num_seqs,
            "running": node.core.num_running,
            "waiting": node.num_waiting,
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
