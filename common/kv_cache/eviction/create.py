"""The eviction policy that a configuration names."""

from __future__ import annotations

from common.errors import ConfigError
from common.kv_cache.eviction.base import EvictionPolicy
from common.kv_cache.eviction.value_policy import ValuePolicy
from common.kv_cache.spec import KVCacheConfig


def create_policy(config: KVCacheConfig) -> EvictionPolicy:
    """``value`` values states; where none are kept (dense models, mode ``none``) it is least recently used.

    Raises ConfigError for an unknown name.
    """
    if config.eviction_policy == "value":
        return ValuePolicy(config) if config.has_state and config.caches_states else EvictionPolicy()
    if config.eviction_policy == "lru":
        return EvictionPolicy()
    raise ConfigError(f"--eviction-policy {config.eviction_policy!r} is not available", param="--eviction-policy")
