"""Policies by name."""

from __future__ import annotations

from common.errors import ConfigError
from proxy.placement.cost import Cost
from proxy.placement.least_loaded import LeastLoaded
from proxy.placement.policy import PlacementPolicy
from proxy.placement.power_of_two import PowerOfTwo
from proxy.placement.prefix_aware import PrefixAware
from proxy.placement.round_robin import RoundRobin


def create_policy(name: str, option: str = "--policy") -> PlacementPolicy:
    """Raises ConfigError when there is no such policy."""
    for policy in (Cost, PrefixAware, LeastLoaded, PowerOfTwo, RoundRobin):
        if policy.name == name:
            return policy()
    raise ConfigError(f"{option} {name} is not a placement policy", param=option)
