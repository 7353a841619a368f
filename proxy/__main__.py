"""``python -m proxy``: read the flags, take the port, serve until a signal."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys

from common.config.command_line import parse_config
from common.config.proxy import ProxyConfig
from common.server.serve import Tls, bind_socket, end_process, raise_file_limit, run_app, run_main
from common.telemetry.create import check_tracing
from common.telemetry.logs import configure_logging
from proxy.app import create_app

NODE_CONNECTIONS = 2
"""Of a request that is worked on, beside its client's: one to a node of each kind."""
SPARE_FILES = 512
"""Polls, event streams, logs, libraries, and connections that only ask for /health or /metrics."""
GC_THRESHOLDS = (20_000, 20, 50)


def main() -> int:
    config = parse_config(ProxyConfig, sys.argv[1:], os.environ, prog="tandem proxy")
    configure_logging(config.log_level, config.log_format, role="proxy", node="proxy")
    check_tracing(config.otlp_traces_endpoint)
    tls = Tls(config.ssl_certfile, config.ssl_keyfile) if config.ssl_certfile else None
    if tls is not None:
        tls.check()
    num_requests = config.max_concurrency + config.max_queue_size
    num_wanted = num_requests + NODE_CONNECTIONS * config.max_concurrency + SPARE_FILES
    num_files = min(num_wanted, raise_file_limit(num_wanted, flag="--max-concurrency"))
    # Where files are short, clients' connections are what there is less of: a node's is needed for each request.
    max_connections = max(num_files // 3, num_requests + SPARE_FILES // 2 - (num_wanted - num_files))
    sock = bind_socket(config.host, config.port)
    config = dataclasses.replace(config, port=sock.getsockname()[1])
    app = create_app(config)
    # What is there now stays: collections need not look at it again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    return run_app(app, sock, log_level=config.log_level, tls=tls, max_connections=max_connections)


if __name__ == "__main__":
    end_process(run_main(main, program="tandem proxy"))
