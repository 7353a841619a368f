"""The FastAPI app of a node: what a prefill node and a decode node share, and where they differ.

``create_node_app`` builds one ``Node`` and puts the routes round it; its lifespan starts and ends the node, so two apps
can live in one process. The model is loaded before (it may take minutes and may fail); the app serves at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from fastapi import FastAPI

from common.config.key_file import read_key_file
from common.config.node import NodeConfig
from common.images.rules import ImageLimits
from common.metrics.table import Role
from common.node.generation_config import read_sampling_defaults
from common.node.lend.prefill_leg import PrefillLeg
from common.node.lend.prefix_holder import PrefixHolder
from common.node.node import Node
from common.node.pull.handoff import HandoffReader
from common.node.pull.sources import PrefixSources
from common.node.routes.event_route import add_event_route
from common.node.routes.pull_routes import add_pull_routes
from common.node.routes.status_routes import add_info_routes, add_probe_routes
from common.node.routes.test_hooks import add_test_hooks
from common.node.routes.text_routes import add_text_routes
from common.node.routes.tokenizer_route import add_tokenizer_route
from common.node.runtime import NodeModel, has_test_hooks, read_cluster_key
from common.node.serving.images import PromptImages
from common.node.serving.prompt_jobs import PromptReader
from common.node.serving.serving import Serving
from common.openai.errors import install_error_handlers
from common.server import drain
from common.server.app import ServerApp, add_docs_routes
from common.server.gate import install_middleware
from common.text.answers.detection import Overrides
from common.text.tokenizer import TextCodec
from common.text.tokenizer_document import plain_backend
from common.wire.routes import CHAT_ROUTE, COMPLETIONS_ROUTE

logger = logging.getLogger(__name__)


def create_node_app(config: NodeConfig, model: NodeModel, role: Role) -> FastAPI:
    """An app for ``model``. A prefill node runs prefill legs, a decode node reads their handoffs; both do all the rest.

    Raises:
        ConfigError: a key file cannot be read.
        TransferError: the transport cannot be opened, or refuses the node's memory.
    """
    api_keys = read_key_file(config.api_key_file, "--api-key-file") if config.api_key_file else ()
    cluster_key = read_cluster_key(config)
    node = Node(config, model, role, cluster_key)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        node.start()
        try:
            yield
        finally:
            await node.close()
            images.close()

    app = ServerApp(title=f"Tandem {role.value} node", lifespan=lifespan)
    install_error_handlers(app)
    install_middleware(app, max_body_bytes=config.max_body_bytes, api_keys=api_keys, cluster_key=cluster_key)
    drain.add_drain(app, node.drain, has_cluster_key=cluster_key is not None)
    loaded = model.loaded
    codec = None
    if loaded.tokenizer is not None:
        codec = TextCodec(
            loaded.tokenizer,
            vocab_size=loaded.geometry.vocab_size,
            max_model_len=model.max_model_len,
            backend=plain_backend(loaded.tokenizer),
            trusts_templates=config.trust_request_chat_template,
            answers=Overrides(config.tool_call_parser, config.reasoning_parser),
            image_rules=loaded.image_rules,
        )
        answers = codec.answer_format.describe()
        logger.info("answers tool_calls=%s reasoning=%s", answers["tool_calls"], answers["reasoning"])
    handoffs = _create_handoff_reader(node) if role is Role.DECODE else None
    limits = ImageLimits.of(
        config.limit_mm_per_prompt, max_pixels=config.max_image_pixels, max_bytes=config.max_image_bytes
    )
    images = PromptImages(loaded, limits, node.engine, node.core.num_local_tokens)
    prompts = PromptReader(
        codec,
        handoffs,
        images,
        cache_config=model.cache_config,
        max_model_len=model.max_model_len,
        metrics=node.metrics,
        defaults=read_sampling_defaults(config.generation_config, loaded.folder),
    )
    serving = _create_serving(node, prompts, handoffs)
    app.add_api_route(COMPLETIONS_ROUTE, serving.completions, methods=["POST"])
    app.add_api_route(CHAT_ROUTE, serving.chat, methods=["POST"])
    add_text_routes(app, prompts, model_name=node.model_name, max_model_len=model.max_model_len)
    add_docs_routes(app)
    add_probe_routes(app, node)
    add_info_routes(app, node, codec)
    _add_peer_routes(app, node)
    add_tokenizer_route(
        app,
        codec,
        cache_config=model.cache_config,
        fingerprint=node.agents.fingerprint,
        max_model_len=model.max_model_len,
    )
    if has_test_hooks():
        add_test_hooks(app, node.peer_reader, node.agents.backends, model.storages)
    return app


def _create_handoff_reader(node: Node) -> HandoffReader:
    return HandoffReader(
        manager=node.model.manager,
        engine=node.engine,
        peers=node.peers,
        leases=node.remote_leases,
        loaded=node.model.loaded,
        metrics=node.metrics,
        fingerprint=node.agents.fingerprint,
        fails_when_lost=node.config.kv_load_failure_policy == "fail",
    )


def _create_serving(node: Node, prompts: PromptReader, handoffs: HandoffReader | None) -> Serving:
    manager = node.model.manager
    prefill_leg = None
    if node.role is Role.PREFILL:
        prefill_leg = PrefillLeg(
            node.name,
            manager=manager,
            engine=node.engine,
            rendezvous=node.rendezvous,
            manifests=node.manifests,
        )
    sources = PrefixSources(
        manager=manager,
        core=node.core,
        engine=node.engine,
        peers=node.peers,
        leases=node.remote_leases,
        loaded=node.model.loaded,
        metrics=node.metrics,
        fingerprint=node.agents.fingerprint,
    )
    return Serving(
        node.name,
        node.model_name,
        eos_token_ids=frozenset(node.model.loaded.eos_token_ids),
        prompts=prompts,
        admission=node.admission,
        engine=node.engine,
        rendezvous=node.rendezvous,
        sources=sources,
        prefill_leg=prefill_leg,
        handoffs=handoffs,
        grammars=node.grammars,
        metrics=node.metrics,
        tracer=node.tracer,
    )


def _add_peer_routes(app: FastAPI, node: Node) -> None:
    manager = node.model.manager
    holder = PrefixHolder(
        manager=manager,
        core=node.core,
        engine=node.engine,
        rendezvous=node.rendezvous,
        manifests=node.manifests,
        max_model_len=node.model.max_model_len,
    )
    add_pull_routes(
        app,
        engine_id=node.engine_id,
        lease_seconds=node.config.kv_lease_seconds,
        announcement=node.agents.metadata,
        engine=node.engine,
        manager=manager,
        rendezvous=node.rendezvous,
        holder=holder,
        manifests=node.manifests,
        drain=node.drain,
    )
    add_event_route(app, manager, node.engine, node.tiers)
