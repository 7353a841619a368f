"""The decode node: pulls computed prompts, generates, streams."""

from __future__ import annotations

from fastapi import FastAPI

from common.config.node import NodeConfig
from common.metrics.table import Role
from common.node.app import create_node_app
from common.node.runtime import NodeModel
from decode_node.intake import Intake


def create_app(config: NodeConfig, model: NodeModel) -> FastAPI:
    return create_node_app(config, model, Role.DECODE, create_intake=Intake)
