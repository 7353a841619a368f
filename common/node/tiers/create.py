"""A node's tiers as its flags name them: what cannot work is refused here, by flag, value and reason."""

from __future__ import annotations

import contextlib
import math

from common.config.node import NodeConfig
from common.config.tiers import TIER_KINDS, TierSpec
from common.engine.core import EngineCore
from common.errors import ConfigError
from common.kv_cache.tiers.break_even import BreakEven
from common.kv_cache.tiers.tier import TierSettings, tier_settings
from common.metrics.metrics import Metrics
from common.node.engine_thread import EngineThread
from common.node.runtime import NodeModel, layout_fingerprint
from common.node.tiers.node_tier import Closable, NodeTier
from common.node.tiers.node_tiers import NodeTiers
from common.node.tiers.prefix_objects import PrefixObjects
from common.tiers.folder import ObjectFolder, open_folder
from common.tiers.folder_use import FolderRoom, FolderUse
from common.tiers.folder_watch import FolderWatch
from common.tiers.host_memory import HostMemory
from common.tiers.mooncake import MooncakeStore, MooncakeWatch, connect
from common.tiers.object_header import MAX_TAIL_TOKENS
from common.tiers.secrets import derived_secret, folder_secret

OPTION = "--kv-tier"
READ_TIMEOUT_S = 10.0
"""Longest time of reading a prefix, where --kv-transfer-timeout-seconds is longer: computing it is an alternative."""


def create_tiers(
    config: NodeConfig,
    model: NodeModel,
    cluster_key: str | None,
    *,
    core: EngineCore,
    engine: EngineThread,
    metrics: Metrics,
) -> NodeTiers | None:
    """None: no flag names one. Raises ConfigError."""
    if not config.kv_tier:
        return None
    _check(config, model)
    manager, storage = model.manager, model.storage
    objects = PrefixObjects(storage, manager.generations, layout_fingerprint(model), model.loaded.dtype)
    fastest_first = sorted(config.kv_tier, key=lambda spec: TIER_KINDS.index(spec.kind))
    tiers = [_node_tier(spec, config, model, cluster_key, objects) for spec in fastest_first]
    return NodeTiers(
        tiers,
        manager=manager,
        core=core,
        engine=engine,
        objects=objects,
        read_timeout_s=min(READ_TIMEOUT_S, config.kv_transfer_timeout_seconds),
        step_tokens=config.max_num_batched_tokens,
        metrics=metrics,
    )


def _check(config: NodeConfig, model: NodeModel) -> None:
    cache = model.cache_config
    if not cache.caches_states:
        raise ConfigError(
            f"{OPTION} {config.kv_tier[0]}: --mamba-cache-mode none keeps no states, so there is nothing to write",
            param=OPTION,
        )
    if cache.block_size > MAX_TAIL_TOKENS + 1:
        raise ConfigError(
            f"--block-size {cache.block_size} is above the maximum of {MAX_TAIL_TOKENS + 1} that {OPTION} can keep",
            param="--block-size",
        )


def _node_tier(
    spec: TierSpec, config: NodeConfig, model: NodeModel, cluster_key: str | None, objects: PrefixObjects
) -> NodeTier:
    rates = BreakEven(0.0, 0.0, math.inf)
    settings = tier_settings(spec.kind, spec.size_bytes, rates, config.kv_tier_min_return, config.kv_tier_write_rate)
    outlook = model.manager.outlook
    if spec.kind == "host":
        return NodeTier(settings, HostMemory(), outlook)
    if spec.kind == "mooncake":
        return _mooncake_tier(spec, settings, model, derived_secret(cluster_key or ""), objects)
    folder = open_folder(spec.path)
    try:
        use = FolderUse(folder)
        room = FolderRoom(folder, spec.size_bytes)
        secret = derived_secret(cluster_key) if cluster_key is not None else folder_secret(folder)
    except OSError as exc:
        raise ConfigError(f"{OPTION} {spec}: {exc.strerror}", param=OPTION) from exc
    store = ObjectFolder(folder, secret, is_shared=settings.is_shared, alone_until=use.alone_until, room=room)
    return NodeTier(settings, store, outlook, FolderWatch(store, objects.fingerprint), _closing(use, room))


def _mooncake_tier(
    spec: TierSpec, settings: TierSettings, model: NodeModel, secret: bytes, objects: PrefixObjects
) -> NodeTier:
    client = connect(spec.path, spec.admin_port, spec.lent_bytes, objects.largest_bytes)
    store = MooncakeStore(client, str(spec), secret)
    watch = MooncakeWatch(store, spec.path.rpartition(":")[0], spec.admin_port, objects.fingerprint)
    return NodeTier(settings, store, model.manager.outlook, watch, store)


def _closing(*parts: Closable) -> Closable:
    stack = contextlib.ExitStack()
    for each in parts:
        stack.callback(each.close)
    return stack
