"""The proxy as an ASGI app.

``create_app`` reads key files and builds routes; clients, node records and polling tasks live from the start of the
lifespan to its end, so several proxies can run in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware.cors import CORSMiddleware

from common.config.dns import Resolver
from common.config.key_file import read_key_file
from common.config.proxy import ProxyConfig
from common.grammar.checker import GrammarChecker
from common.grammar.limits import GrammarLimits
from common.images.rules import ImageLimits
from common.openai.errors import install_error_handlers
from common.openai.openapi import ENDPOINTS, Endpoint
from common.server import drain as draining
from common.server.app import ServerApp, add_docs_routes
from common.server.gate import OPEN_PATHS, Gate, GateMiddleware, api_key_digest_of
from common.server.json_body import read_json_object
from common.server.loop_lag import LoopLag
from common.server.versions import installed_versions
from common.telemetry.create import create_tracer
from common.wire.headers import CLUSTER_KEY_HEADER, DROPPED_HEADER, PROXY_HEADER, REQUEST_ID_HEADER
from common.wire.routes import (
    CHAT_ROUTE,
    COMPLETIONS_ROUTE,
    COUNT_TOKENS_ROUTE,
    DETOKENIZE_ROUTE,
    HEALTH_ROUTE,
    MESSAGES_ROUTE,
    METRICS_ROUTE,
    MODELS_ROUTE,
    READY_ROUTE,
    RESPONSES_ROUTE,
    TOKENIZE_ROUTE,
    VERSION_ROUTE,
)
from proxy.admission.key_limits import Charge, KeyLimits, read_key_limits
from proxy.admission.queue import AdmissionQueue
from proxy.dialects.messages.answer import REQUEST_ID_NAME, shape_error
from proxy.dialects.messages.body import CountTokensBody, MessagesBody
from proxy.dialects.messages.schema import MessageAnswer, TokenCount
from proxy.dialects.responses.body import ResponsesBody
from proxy.dialects.responses.schema import ResponseAnswer
from proxy.http.admin import add_node_routes
from proxy.http.count_tokens import count_tokens
from proxy.http.forward import forward
from proxy.http.front import Front
from proxy.http.generate import GenerateService, forwarded_headers
from proxy.http.image_fetcher import ImageFetcher
from proxy.http.targets import TargetRules
from proxy.http.tokenizer import PromptTokenizer
from proxy.legs.leases import LeaseReleaser
from proxy.legs.orchestrator import Orchestrator
from proxy.metrics.proxy_metrics import ProxyMetrics
from proxy.metrics.recent_requests import RecentRequests
from proxy.node_http.client import NodeClient
from proxy.nodes.breaker import Breaker
from proxy.nodes.discovery import Discovery, split_urls
from proxy.nodes.node import NodeRole
from proxy.nodes.pool import NodePool
from proxy.nodes.rates import RateTable
from proxy.pages.routes import PAGE_PATHS, add_page_routes
from proxy.placement.placer import Placer
from proxy.placement.replicas import ReplicaAdvice
from proxy.prefix_index.event_feed import EventFeeds
from proxy.prefix_index.index import PrefixIndex
from proxy.status.board import StatusBoard
from proxy.status.gauges import read_gauges
from proxy.status.routes import add_status_routes

DIALECT_ENDPOINTS = (
    Endpoint(RESPONSES_ROUTE, "createResponse", "OpenAI's Responses.", ResponsesBody, ResponseAnswer, streams=True),
    Endpoint(MESSAGES_ROUTE, "createMessage", "Anthropic's Messages.", MessagesBody, MessageAnswer, streams=True),
    Endpoint(COUNT_TOKENS_ROUTE, "countTokens", "Tokens of a message's prompt.", CountTokensBody, TokenCount),
)
PAGE_HEADERS = (REQUEST_ID_HEADER, REQUEST_ID_NAME, DROPPED_HEADER, "Retry-After")
"""Of answers, which pages of allowed origins may read."""
PATH_CHARS = "/:@!$&'()*+,;=-._~"
"""What stands for itself in a path."""


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes use; made by the lifespan."""

    pool: NodePool
    placer: Placer
    metrics: ProxyMetrics
    generate: GenerateService
    admission: AdmissionQueue
    board: StatusBoard
    index: PrefixIndex
    drain: draining.Drain
    node_headers: Mapping[str, str]


def create_app(config: ProxyConfig, *, resolve: Resolver | None = None) -> FastAPI:
    """The proxy for ``config``. Raises ConfigError for files that cannot be read. ``resolve``: instead of the system's
    resolver."""
    api_keys = read_key_file(config.api_key_file, "--api-key-file") if config.api_key_file else ()
    cluster_keys = read_key_file(config.cluster_key_file, "--cluster-key-file") if config.cluster_key_file else ()
    node_headers = {PROXY_HEADER: "1", **({CLUSTER_KEY_HEADER: cluster_keys[0]} if cluster_keys else {})}
    key_limits = read_key_limits(config.api_key_limits_file, api_keys) if config.api_key_limits_file else KeyLimits()
    limits = GrammarLimits.from_json(config.structured_outputs_config)
    image_limits = ImageLimits.of(
        config.limit_mm_per_prompt, max_pixels=config.max_image_pixels, max_bytes=config.max_image_bytes
    )
    drain = draining.Drain(
        "the proxy",
        config.drain_timeout_seconds,
        cut_off=lambda error: app.state.service.generate.cut_off(error),
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        prefill_urls, prefill_names = split_urls(config.prefill, NodeRole.PREFILL)
        decode_urls, decode_names = split_urls(config.decode, NodeRole.DECODE)
        pool = NodePool(
            prefill_urls,
            decode_urls,
            create_client=lambda url: NodeClient(url, connect_timeout_s=config.connect_timeout_seconds),
            poll_interval_s=config.health_interval_seconds,
            headers=node_headers,
            node_kind=config.node_kind,
            max_silence_s=config.node_silence_seconds,
            create_breaker=lambda url: Breaker(
                url, failures=config.breaker_failures, open_s=config.breaker_open_seconds
            ),
        )
        index = PrefixIndex(config.prefix_index_entries)
        discovery = Discovery(
            pool, [*prefill_names, *decode_names], interval_s=config.dns_interval_seconds, resolve=resolve
        )
        metrics = ProxyMetrics()
        admission = AdmissionQueue(
            max_running=config.max_concurrency,
            max_waiting=config.max_queue_size,
            max_wait_s=config.max_queue_seconds,
            aging_s=config.queue_aging_seconds,
            limits=KeyLimits(key_limits.default, key_limits.by_key),
            on_drop=metrics.count_drop,
        )
        grammars = GrammarChecker(limits, metrics.grammar_checked)
        targets = TargetRules.of(config)
        replicas = ReplicaAdvice(pool, RateTable(), targets.usual.itl_s)
        metrics.set_source(lambda: read_gauges(pool, index, admission, grammars, replicas))
        feeds = EventFeeds(index, metrics, node_headers)
        pool.subscribe(feeds)
        fetcher = ImageFetcher(
            config.allowed_media_domains,
            image_limits,
            config.image_fetch_seconds,
            max_body_bytes=config.max_body_bytes,
        )
        tokenizer = PromptTokenizer(pool, metrics, node_headers, image_limits, fetcher)
        releaser = LeaseReleaser(node_headers)
        placer = Placer(config, pool, index, on_start=metrics.observe_start)
        pool.subscribe(placer)
        orchestrator = Orchestrator(config, pool, placer, releaser, metrics, node_headers)
        tracer = create_tracer(
            config.otlp_traces_endpoint, role="proxy", name="proxy", version=installed_versions()["tandem"] or ""
        )
        recent = RecentRequests()
        board = StatusBoard(pool, recent, admission, drain, metrics.targets, replicas, config.max_concurrency)
        generate = GenerateService(
            pool, tokenizer, orchestrator, metrics, admission, drain, tracer, recent, grammars, targets
        )
        app.state.service = Service(pool, placer, metrics, generate, admission, board, index, drain, node_headers)
        lag = LoopLag(metrics.observe_lag)
        lag.start()
        pool.start()
        tokenizer.start()
        discovery.start()
        try:
            yield
        finally:
            lag.close()
            admission.close()
            await discovery.close()
            await tokenizer.close()
            await feeds.close()
            await board.close()
            await releaser.close()
            await pool.close()
            await asyncio.to_thread(grammars.close)
            await asyncio.to_thread(tracer.close)

    app = ServerApp(title="Tandem proxy", lifespan=lifespan)
    install_error_handlers(app)
    gate = Gate(
        max_body_bytes=config.max_body_bytes,
        body_timeout_s=config.body_timeout_seconds,
        api_keys=api_keys,
        cluster_key=cluster_keys[0] if cluster_keys else None,
        open_paths=OPEN_PATHS | PAGE_PATHS,
    )
    app.add_middleware(GateMiddleware, gate=gate)
    app.entry = Front(
        app.entry,
        gate,
        drain,
        {
            COMPLETIONS_ROUTE: lambda request: _service(request).generate.completions(request),
            CHAT_ROUTE: lambda request: _service(request).generate.chat(request),
            RESPONSES_ROUTE: lambda request: _service(request).generate.responses(request),
            MESSAGES_ROUTE: lambda request: _service(request).generate.messages(request),
            COUNT_TOKENS_ROUTE: _count_tokens,
        },
        error_shapes={MESSAGES_ROUTE: shape_error},
    )
    if config.allowed_origins:
        # Before the gate: a browser sends no key when it asks whether it may send one.
        app.entry = CORSMiddleware(
            app.entry,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=PAGE_HEADERS,
        )
    draining.add_drain(app, drain, has_cluster_key=bool(cluster_keys))
    add_node_routes(app, has_cluster_key=bool(cluster_keys))
    add_docs_routes(app, (*ENDPOINTS, *DIALECT_ENDPOINTS))
    _add_openai_routes(app)
    _add_operator_routes(app)
    add_page_routes(app)
    add_status_routes(app, lambda request: _service(request).board)
    return app


def _add_openai_routes(app: FastAPI) -> None:
    # POST is the front's; these say 405 to other methods.
    @app.post(COMPLETIONS_ROUTE)
    async def completions(request: Request) -> Response:
        return await _service(request).generate.completions(request)

    @app.post(CHAT_ROUTE)
    async def chat_completions(request: Request) -> Response:
        return await _service(request).generate.chat(request)

    @app.post(RESPONSES_ROUTE)
    async def responses(request: Request) -> Response:
        return await _service(request).generate.responses(request)

    @app.post(MESSAGES_ROUTE)
    async def messages(request: Request) -> Response:
        return await _service(request).generate.messages(request)

    @app.post(COUNT_TOKENS_ROUTE)
    async def count_tokens(request: Request) -> Response:
        return await _count_tokens(request)

    @app.get(MODELS_ROUTE)
    async def models(request: Request) -> Response:
        return await _forward(request)

    @app.get(MODELS_ROUTE + "/{model:path}")
    async def model(request: Request) -> Response:
        return await _forward(request)

    @app.post(TOKENIZE_ROUTE)
    async def tokenize(request: Request) -> Response:
        await read_json_object(request)
        with _let_in(request):
            return await _forward(request)

    @app.post(DETOKENIZE_ROUTE)
    async def detokenize(request: Request) -> Response:
        await read_json_object(request)
        with _let_in(request):
            return await _forward(request)


def _add_operator_routes(app: FastAPI) -> None:
    @app.get(HEALTH_ROUTE)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get(READY_ROUTE)
    async def ready(request: Request) -> Response:
        service = _service(request)
        reasons = service.pool.reasons()
        if service.drain.is_draining:
            return _not_ready(draining.STATUS, [draining.STATUS])
        if not reasons:
            return JSONResponse({"status": "ready"})
        if request.query_params.get("degraded") == "ok" and service.placer.generators():
            # Whoever is left does the other role's work: a balancer must not take that from clients.
            return JSONResponse({"status": "ready", "degraded": reasons})
        return _not_ready("not_ready", reasons)

    @app.get(METRICS_ROUTE)
    async def metrics(request: Request) -> Response:
        content, content_type = _service(request).metrics.render()
        return Response(content, media_type=content_type)

    @app.get(VERSION_ROUTE)
    async def version() -> dict[str, Any]:
        return installed_versions()


def _not_ready(status: str, reasons: Sequence[str]) -> Response:
    # ``reason`` is what nodes say too; the list is for whoever wants them one by one.
    return JSONResponse({"status": status, "reason": "; ".join(reasons), "reasons": list(reasons)}, status_code=503)


async def _forward(request: Request) -> Response:
    service = _service(request)
    # As it came: a path is decoded before it is looked up, and a name in it may be anything then.
    path = urllib.parse.quote(request.scope["path"], safe=PATH_CHARS)
    return await forward(
        service.pool,
        request.method,
        path,
        headers=forwarded_headers(request),
        own_headers=service.node_headers,
        content=await request.body(),
    )


async def _count_tokens(request: Request) -> Response:
    service = _service(request)
    with _let_in(request):
        return await count_tokens(service.pool, request, forwarded_headers(request), service.node_headers)


def _let_in(request: Request) -> Charge:
    """As ``with``, round the work for a request that generates nothing. Raises DrainingError, RequestDroppedError."""
    service = _service(request)
    service.drain.check_admission()
    return service.admission.unanswered(api_key_digest_of(request))


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
