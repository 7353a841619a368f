"""The parts of a node that are built once, before it serves: model, cache sizes, pools, engine core, transfer backend.

1 load and probe the model, 2 plan the pools from ``--kv-cache-memory`` or a GPU's memory, 3 allocate them
(``load_node_model``, slow), 4 register them with the transfer layer (``create_backend``), 5 the engine
(``create_core``). What cannot work raises ConfigError.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch

from common.config.key_file import read_key_file
from common.config.node import NodeConfig
from common.config.values import GIB, is_loopback_host
from common.engine.core import EngineCore
from common.engine.drafting.config import MTP, SpeculativeConfig
from common.engine.model_runner import ModelRunner
from common.engine.sampling.grammar import GrammarMasks
from common.engine.sampling.grammar_compiler import GrammarCompiler
from common.engine.sampling.sampler import Sampler
from common.engine.scheduler import Scheduler, SchedulerConfig
from common.engine.speculation import Speculation
from common.engine.tokens.grammars import StepGrammars
from common.errors import ConfigError, EngineDeadError
from common.grammar.limits import GrammarLimits
from common.kv_cache.layout import LAYOUT_VERSION, make_layout
from common.kv_cache.layout_document import NodeLayout
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.planner import CachePlan, plan_cache
from common.kv_cache.pools.generations import ENTRY_BYTES
from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.spec import KVCacheConfig
from common.models.loading.loader import LoadedModel, check_ranks, load_model
from common.models.vision.encoder import ImageEncoder
from common.names import LIFE_BYTES
from common.node.cache_warnings import cache_warnings
from common.node.device import check_environment, choose_device, thread_entry
from common.node.device_memory import pool_bytes
from common.node.digests import VERIFY_OFF
from common.node.ranks.ranks import Ranks
from common.node.ranks.runner import RankedRunner
from common.node.regions import SLOT_GENERATIONS, SLOTS, block_generations_region, block_region
from common.text.tokenizer import TextCodec
from common.text.vocabulary import grammar_tokenizer
from common.transfer.backend import TransferBackend
from common.transfer.nixl.backend import NixlBackend
from common.transfer.nixl.bindings import stay_on_loopback
from common.transfer.regions import Region
from common.transfer.testing.faulty import FaultyBackend

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = 2 * GIB
"""Bytes of the pools on a CPU without ``--kv-cache-memory``."""
MAX_MASK_THREADS = 8
"""Threads that fill masks of constrained rows beside the forward, of the cores that it leaves."""

TEST_HOOKS_VARIABLE = "TANDEM_TEST_HOOKS"
"""Environment variable; ``1`` adds the routes of ``common.node.routes.test_hooks``."""


@dataclass(slots=True)
class NodeModel:
    """The heavy, synchronous part of a node: model and pools, sized and allocated. ``storages``: the pools of each
    rank, all in memory of this process; ``storage``: those of rank 0, which it computes on."""

    loaded: LoadedModel
    cache_config: KVCacheConfig
    max_model_len: int
    manager: KVCacheManager
    storages: Sequence[KVStorage]
    runner: ModelRunner
    ranks: Ranks | None = None

    @property
    def storage(self) -> KVStorage:
        return self.storages[0]


def load_node_model(config: NodeConfig, *, compact_weights: bool = False, with_images: bool = False) -> NodeModel:
    """Steps 1 to 3; ``compact_weights`` and ``with_images`` as :func:`load_model`.

    Raises:
        ConfigError: naming what cannot work.
        EngineDeadError: one of several ranks ended meanwhile.
    """
    speculative = SpeculativeConfig.from_json(config.speculative_config)
    torch.set_num_threads(config.num_threads)
    device = choose_device(config.device)
    check_environment(device, os.environ)
    if (enter_device := thread_entry(device)) is not None:
        enter_device()
    has_head = speculative is not None and speculative.method == MTP
    ranks = _start_ranks(config, device, has_head=has_head)
    load = {
        "model": config.model,
        "dtype": config.dtype,
        "device": device,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "seed": config.seed,
        "ops_backend": config.ops_backend,
        "enforce_eager": config.enforce_eager,
        "prebuilt_ops": config.prebuilt_ops,
        "compact_weights": compact_weights,
        "with_images": with_images and ranks is None,
        "max_image_tokens": config.max_image_tokens,
        "with_mtp_head": has_head,
    }
    try:
        return _load(config, load, ranks, has_two_states=speculative is not None or config.async_scheduling)
    except BaseException as exc:
        if ranks is not None:
            death = ranks.death_soon() if isinstance(exc, RuntimeError) else None
            ranks.close()
            if death is not None:  # a rank was lost while all loaded
                raise EngineDeadError(death) from exc
        raise


def _start_ranks(config: NodeConfig, device: torch.device, *, has_head: bool) -> Ranks | None:
    """None: this process computes the model alone. What cannot work is said before a process is started."""
    size = config.tensor_parallel_size
    if size == 1:
        return None
    if device.type != "cpu" or has_head:
        why = f"--speculative-config method {MTP}" if has_head else f"--device {config.device}, which is {device} here"
        option = "--tensor-parallel-size"
        raise ConfigError(f"{option} {size} does not go with {why}", param=option)
    check_ranks(config.model, size, revision=config.revision)
    logger.info("ranks=%d: every decode step runs through the model's own code, as with --enforce-eager", size)
    if config.kv_transfer_verify != VERIFY_OFF:
        verify = config.kv_transfer_verify
        logger.warning("--kv-transfer-verify %s: a node of several ranks makes and compares no digests", verify)
    return Ranks(size)


def _load(config: NodeConfig, load: dict[str, Any], ranks: Ranks | None, *, has_two_states: bool) -> NodeModel:
    loaded = load_model(**load, group=None if ranks is None else ranks.meet(load, config))
    max_model_len = _max_model_len(config, loaded.geometry.max_position)
    plan = _plan(config, loaded, max_model_len, has_two_states=has_two_states)
    for line in str(plan.report).splitlines():
        logger.info("%s", line)
    for warning in cache_warnings(config, plan.config, plan.report):
        logger.warning("%s", warning)
    manager = KVCacheManager(plan.config)
    storage = KVStorage(plan.config, loaded.device)
    if ranks is not None:
        logger.info("pools of this size on each of %d ranks", ranks.size)
        storages = [storage, *ranks.allocate(plan.config)]
        runner: ModelRunner = RankedRunner(loaded, storage, plan.config, ranks)
        return NodeModel(loaded, plan.config, max_model_len, manager, storages, runner, ranks)
    images = ImageEncoder(loaded.tower, config.mm_encoder_cache_memory) if loaded.tower is not None else None
    runner = ModelRunner(loaded, storage, plan.config, images)
    runner.record_ahead(config.max_num_seqs)
    return NodeModel(loaded, plan.config, max_model_len, manager, [storage], runner)


def _plan(config: NodeConfig, loaded: LoadedModel, max_model_len: int, *, has_two_states: bool) -> CachePlan:
    """Sizes of the pools. Raises ConfigError, naming the flag that their memory follows from."""
    if config.kv_cache_memory is not None or loaded.device.type != "cuda":
        return _plan_in(
            config.kv_cache_memory or CPU_POOL_BYTES, config, loaded, max_model_len, has_two_states=has_two_states
        )
    memory_bytes = pool_bytes(config, loaded, max_model_len)
    try:
        return _plan_in(memory_bytes, config, loaded, max_model_len, has_two_states=has_two_states)
    except ConfigError as exc:
        if exc.param != "--kv-cache-memory":
            raise
        share = f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"
        raise ConfigError(
            f"{share} leaves {memory_bytes} bytes: {exc.message}", param="--gpu-memory-utilization"
        ) from exc


def _plan_in(
    memory_bytes: int, config: NodeConfig, loaded: LoadedModel, max_model_len: int, *, has_two_states: bool
) -> CachePlan:
    return plan_cache(
        loaded.geometry,
        kv_cache_memory_bytes=memory_bytes,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        root_key=root_key(loaded),
        enable_prefix_caching=config.enable_prefix_caching,
        mamba_cache_mode=config.mamba_cache_mode,
        eviction_policy=config.eviction_policy,
        retention_interval=config.prefix_cache_retention_interval,
        slot_share=config.state_memory_share,
        enable_events=True,
        has_two_states=has_two_states,
    )


def _max_model_len(config: NodeConfig, max_position: int) -> int:
    """``--max-model-len``, or what the model's config allows. Raises ConfigError when it allows less."""
    if config.max_model_len is None:
        if max_position == 0:
            raise ConfigError("--max-model-len is required: the model's config sets no bound", param="--max-model-len")
        return max_position
    if max_position and config.max_model_len > max_position:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is above the model's own limit of {max_position}",
            param="--max-model-len",
        )
    return config.max_model_len


def root_key(loaded: LoadedModel) -> bytes:
    """The start of every key chain: two nodes share prefixes only if model, dtype and layout are the same, and both or
    neither keep what the model's head for further tokens needs."""
    head = "" if loaded.mtp is None else "|mtp"
    identity = f"{loaded.fingerprint}|{loaded.dtype}|{LAYOUT_VERSION}{head}"
    return hashlib.blake2b(identity.encode(), digest_size=32).digest()


def layout_fingerprint(model: NodeModel) -> str:
    """Hex digest that two nodes must share before one reads the other's pools, however many ranks each has."""
    config = model.cache_config
    identity = f"{config.root_key.hex()}|{config.block_size}|{model.loaded.undivided}"
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def has_test_hooks() -> bool:
    """Whether this process lets tests damage what it transfers (``common.node.routes.test_hooks``)."""
    return os.environ.get(TEST_HOOKS_VARIABLE) == "1"


def create_backend(config: NodeConfig, model: NodeModel, engine_id: str, rank: int = 0) -> TransferBackend:
    """Step 4, once a rank: the transfer backend with the rank's pools and the node's generation tables registered; with
    test hooks, one whose reads can be made to fail. A node on loopback, whose peers are there too, is not reached from
    elsewhere by way of the transport either."""
    generations, storage = model.manager.generations, model.storages[rank]
    hosts = [config.advertise_host or config.host, *(urlsplit(peer).hostname or "" for peer in config.peers)]
    if all(map(is_loopback_host, hosts)):
        stay_on_loopback()
    backend: TransferBackend = NixlBackend(
        engine_id=engine_id,
        epoch=generations.epoch,
        fingerprint=layout_fingerprint(model),
        layout=NodeLayout(model.loaded.undivided, model.cache_config.block_size, model.loaded.num_ranks),
        backends=config.nixl_backends,
        enter_thread=thread_entry(model.loaded.device),
    )
    if has_test_hooks():
        backend = FaultyBackend(backend)
    device = str(storage.device)
    regions = []
    named = [
        (block_region(group_id), block_generations_region(group_id), arena)
        for group_id, arena in enumerate(storage.block_arenas)
    ]
    for name, table, arena in (*named, (SLOTS, SLOT_GENERATIONS, storage.slot_arena)):
        if arena.numel() == 0:
            continue
        num_units, unit_bytes = arena.shape
        regions.append(Region(name, arena.data_ptr(), num_units, unit_bytes, device=device, null_unit=True))
        regions.append(Region(table, generations.address(name), num_units, ENTRY_BYTES))
    backend.register(regions)
    return backend


def create_core(config: NodeConfig, model: NodeModel, grammars: StepGrammars | None = None) -> EngineCore:
    """``grammars``: in place of those for the checkpoint's tokenizer."""
    sees_images = model.loaded.sees_images
    is_whole = sees_images is not None and sees_images.is_whole
    limits = SchedulerConfig(config.max_num_seqs, config.max_num_batched_tokens, images_are_whole=is_whole)
    scheduler = Scheduler(limits, model.manager, speculation=create_speculation(config, model))
    return EngineCore(
        scheduler,
        model.manager,
        model.runner,
        Sampler(config.seed),
        max_model_len=model.max_model_len,
        lease_seconds=config.kv_lease_seconds,
        recompute_on_load_failure=config.kv_load_failure_policy == "recompute",
        local_prefill_limit=config.local_prefill_limit,
        async_scheduling=config.async_scheduling,
        grammars=grammars if grammars is not None else create_grammars(config, model.loaded),
    )


def create_speculation(config: NodeConfig, model: NodeModel) -> Speculation | None:
    """None: nothing is drafted."""
    speculative = SpeculativeConfig.from_json(config.speculative_config)
    if speculative is None:
        return None
    speculation = Speculation(
        speculative.create_drafter(),
        num_tokens=speculative.num_speculative_tokens,
        max_model_len=model.max_model_len,
        slot_bytes=make_layout(model.cache_config.geometry, model.cache_config.block_size).slot_bytes,
        head=model.runner.draft if speculative.method == MTP else None,
    )
    logger.info(
        "speculative decoding method=%s num_speculative_tokens=%d states=%s",
        speculative.method,
        speculative.num_speculative_tokens,
        "none" if not model.cache_config.has_state else "saved" if speculation.saves_each else "computed again",
    )
    return speculation


def create_grammars(config: NodeConfig, loaded: LoadedModel) -> StepGrammars:
    """Nothing of a vocabulary is made before the first grammar comes."""
    if loaded.tokenizer is None:
        return StepGrammars(None, None)
    vocab_size, eos_token_ids = loaded.geometry.vocab_size, frozenset(loaded.eos_token_ids)
    codec = TextCodec(loaded.tokenizer, vocab_size=vocab_size)
    compiler = GrammarCompiler(
        partial(grammar_tokenizer, codec, sorted(eos_token_ids)),
        eos_token_ids,
        wait_seconds=GrammarLimits.from_json(config.structured_outputs_config).wait_seconds,
    )
    num_idle = (os.cpu_count() or 1) - config.num_threads
    return StepGrammars(compiler, GrammarMasks(vocab_size, num_threads=max(1, min(num_idle, MAX_MASK_THREADS))))


def new_engine_id(config: NodeConfig) -> str:
    """A readable and unique name of this life of this node."""
    return f"{config.node_name}-{secrets.token_hex(LIFE_BYTES)}"


def read_cluster_key(config: NodeConfig) -> str | None:
    if config.cluster_key_file is None:
        return None
    return read_key_file(config.cluster_key_file, "--cluster-key-file")[0]
