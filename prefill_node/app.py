"""The prefill node: computes prompts and leases the result out."""

from __future__ import annotations

from fastapi import FastAPI

from common.config.node import NodeConfig
from common.metrics.table import Role
from common.node.app import create_node_app
from common.node.runtime import NodeModel
from prefill_node.handoff import PrefillLeg


def create_app(config: NodeConfig, model: NodeModel) -> FastAPI:
    return create_node_app(config, model, Role.PREFILL, create_prefill_leg=PrefillLeg)
