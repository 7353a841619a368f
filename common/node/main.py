"""From a command line to a serving node: 1 flags, 2 the port, 3 NIXL's plugins, 4 the model, 5 serve until a signal.

The port is taken before the model is loaded: a port in use is an error at once, not after minutes. For the same reason
NIXL is asked for its plugins then, and torch and transformers are imported only after the flags were checked. What
start and load leave behind, some 400,000 objects, is kept from the garbage collector: going through them takes it
0.24 s, in which no request is answered.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from typing import NoReturn

from common.config.node import NodeConfig, parse_node_config, with_default_name
from common.metrics.table import Role
from common.server.garbage import keep_collections_short
from common.server.serve import bind_socket, end_on_signals, end_process, raise_file_limit, run_app, run_main
from common.telemetry.create import check_tracing
from common.telemetry.logs import configure_logging
from common.tiers.folder import open_folder

FILES_PER_REQUEST = 3
"""Connections of its client, to the node that it is pulled from, and of the node that reads it."""
SPARE_FILES = 512
"""Open files for all but requests: weights, the transport, objects of tiers, probes and feeds."""


def run_node(role: Role, *, default_port: int) -> NoReturn:
    """The whole program of a node of ``role``: reads the command line, serves, ends the process."""

    def main() -> int:
        end_on_signals()
        config = parse_node_config(sys.argv[1:], os.environ, role=role.value, default_port=default_port)
        _name_in_logs(config, role)
        config.warn_if_exposed()
        check_tracing(config.otlp_traces_endpoint)
        raise_file_limit(FILES_PER_REQUEST * (config.max_num_seqs + config.max_queue) + SPARE_FILES, flag="--max-queue")
        sock = bind_socket(config.host, config.port)
        config = with_default_name(dataclasses.replace(config, port=sock.getsockname()[1]), role.value)
        _name_in_logs(config, role)
        gc.disable()
        try:
            from common.transfer.nixl.agent import check_plugins

            check_plugins(config.nixl_backends)
            for tier in config.kv_tier:
                if tier.is_folder:
                    open_folder(tier.path)
            from common.node.app import create_node_app
            from common.node.runtime import load_node_model

            # Decode waits for the weights to come from memory, so they are kept compact there; expanding them costs
            # time beside the matrix products of a prompt.
            # Images are a prefill node's business alone: no stream waits for one, and no memory is kept twice for it.
            model = load_node_model(config, compact_weights=role is Role.DECODE, with_images=role is Role.PREFILL)
            app = create_node_app(config, model, role)
            keep_collections_short()
        finally:
            gc.enable()
        return run_app(app, sock, log_level=config.log_level)

    end_process(run_main(main, program=f"tandem {role.value}"))


def _name_in_logs(config: NodeConfig, role: Role) -> None:
    """Called again when the port is bound, of which the name may be made."""
    configure_logging(config.log_level, config.log_format, role=role.value, node=config.node_name or role.value)
