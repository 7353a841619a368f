"""From a command line to a serving node: 1 flags, 2 the port, 3 NIXL's plugins, 4 the model, 5 serve until a signal.

The port is taken before the model is loaded: a port in use is an error at once, not after minutes. For the same reason
NIXL is asked for its plugins then, and torch and transformers are imported only after the flags were checked. What
start and load leave behind, some 400,000 objects, is kept from the garbage collector: looking through them takes it
0.24 s, in which nobody is answered.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.config.node import NodeConfig, parse_node_config
from common.server.serve import bind_socket, run_app, run_main
from common.telemetry.create import check_tracing
from common.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from fastapi import FastAPI

    from common.node.runtime import NodeModel


def run_node(role: str, default_port: int, import_app: Callable[[], Callable[[NodeConfig, NodeModel], FastAPI]]) -> int:
    """Exit status of the process. ``import_app`` imports the role's app module and returns its ``create_app``."""

    def main() -> int:
        config = parse_node_config(sys.argv[1:], os.environ, role=role, default_port=default_port)
        configure_logging(config.log_level, config.log_format, role=role, node=config.node_name or role)
        check_tracing(config.otlp_traces_endpoint)
        sock = bind_socket(config.host, config.port)
        config = dataclasses.replace(config, port=sock.getsockname()[1])
        gc.disable()
        try:
            from common.transfer.nixl.agent import check_plugins

            check_plugins(config.nixl_backends)
            create_app = import_app()
            from common.node.runtime import load_node_model

            # Decode waits for the weights to come from memory; beside the products of a prompt, expanding them costs.
            model = load_node_model(config, compact_weights=role == "decode")
            app = create_app(config, model)
            gc.freeze()
        finally:
            gc.enable()
        return run_app(app, sock, log_level=config.log_level)

    return run_main(main, program=f"tandem {role}")
