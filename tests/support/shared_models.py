"""Nodes' models of one process on the same weights.

A loaded model keeps nothing of a sequence, so that engines which one thread steps can have the same one. To load it
each time, and to compare it with transformers, takes longer than what most tests do with it.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

from common.config.node import NodeConfig
from common.models.loading.loader import LoadedModel, load_model
from common.node import runtime


@functools.cache
def _load_once(**arguments: Any) -> LoadedModel:
    return load_model(**arguments)


def _load(*, group: Any, **arguments: Any) -> LoadedModel:
    """A rank has its own part of a model, and a head for drafts keeps rows."""
    if group is not None or arguments["with_mtp_head"]:
        return load_model(group=group, **arguments)
    return _load_once(**arguments)


def load_node_model(config: NodeConfig) -> runtime.NodeModel:
    """As ``common.node.runtime.load_node_model``; pools, manager and runner are the caller's own."""
    with patch.object(runtime, "load_model", _load):
        return runtime.load_node_model(config)
