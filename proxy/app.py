"""The proxy as an ASGI app.

``create_app`` reads key files and builds routes; clients, node records and polling tasks live from the start of the
lifespan to its end, so several proxies can run in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from common.api.errors import install_error_handlers
from common.api.http import CLUSTER_KEY_HEADER, install_middleware, read_json_object
from common.api.versions import installed_versions
from common.config import ProxyConfig, read_key_file
from proxy.event_feed import EventFeeds
from proxy.forward import forward
from proxy.generate import GenerateService, forwarded_headers
from proxy.leases import LeaseReleaser
from proxy.nodes import KEEP_ALIVE_S, NodePool
from proxy.observe import ProxyMetrics
from proxy.orchestrator import Orchestrator
from proxy.placer import Placer
from proxy.prefix_index import PrefixIndex
from proxy.tokenise import Tokenisation


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes use; made by the lifespan."""

    pool: NodePool
    metrics: ProxyMetrics
    generate: GenerateService
    index: PrefixIndex
    node_headers: Mapping[str, str]


def create_app(config: ProxyConfig) -> FastAPI:
    """The proxy for ``config``. Raises ConfigError for key files that cannot be read."""
    api_keys = read_key_file(config.api_key_file, "--api-key-file") if config.api_key_file else ()
    cluster_keys = read_key_file(config.cluster_key_file, "--cluster-key-file") if config.cluster_key_file else ()
    node_headers = {CLUSTER_KEY_HEADER: cluster_keys[0]} if cluster_keys else {}

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        pool = NodePool(
            config.prefill,
            config.decode,
            create_client=lambda url: _create_client(url, config),
            poll_interval_s=config.health_interval_seconds,
            headers=node_headers,
        )
        index = PrefixIndex(config.prefix_index_entries)
        metrics = ProxyMetrics(pool, index, config.max_concurrency)
        feeds = EventFeeds(pool, index, metrics, node_headers)
        tokenisation = Tokenisation(pool, metrics, node_headers)
        releaser = LeaseReleaser(node_headers)
        placer = Placer(config, pool, index, on_start=metrics.observe_start)
        orchestrator = Orchestrator(config, pool, placer, releaser, metrics, node_headers)
        generate = GenerateService(pool, tokenisation, orchestrator, metrics)
        app.state.service = Service(pool, metrics, generate, index, node_headers)
        pool.start()
        feeds.start()
        tokenisation.start()
        try:
            yield
        finally:
            await tokenisation.close()
            await feeds.close()
            await releaser.close()
            await pool.close()

    app = FastAPI(title="Tandem proxy", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    install_middleware(
        app,
        max_body_bytes=config.max_body_bytes,
        api_keys=api_keys,
        cluster_key=cluster_keys[0] if cluster_keys else None,
    )
    _add_openai_routes(app)
    _add_operator_routes(app)
    return app


def _add_openai_routes(app: FastAPI) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _service(request).generate.completions(request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _service(request).generate.chat(request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return await _forward(request)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        await read_json_object(request)
        return await _forward(request)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        await read_json_object(request)
        return await _forward(request)


def _add_operator_routes(app: FastAPI) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready(request: Request) -> Response:
        reasons = _service(request).pool.reasons()
        if reasons:
            return JSONResponse({"status": "not_ready", "reasons": reasons}, status_code=503)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        content, content_type = _service(request).metrics.render()
        return Response(content, media_type=content_type)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        return installed_versions()


async def _forward(request: Request) -> Response:
    service = _service(request)
    headers = {**forwarded_headers(request), **service.node_headers}
    return await forward(service.pool, request.method, request.url.path, headers=headers, content=await request.body())


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _create_client(url: str, config: ProxyConfig) -> httpx.AsyncClient:
    # No limit on connections: admission bounds them, and a request must never wait for the pool.
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=config.max_concurrency, keepalive_expiry=KEEP_ALIVE_S
    )
    timeout = httpx.Timeout(config.prefill_timeout_seconds, connect=config.connect_timeout_seconds)
    # Bytes pass through as the node made them, so it must not compress.
    headers = {"accept-encoding": "identity", "user-agent": "tandem-proxy"}
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, headers=headers, trust_env=False)
