"""``python -m proxy``: read the flags, take the port, serve until a signal."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import sys

from common.config.command_line import parse_config
from common.config.proxy import ProxyConfig
from common.server.garbage import keep_collections_short
from common.server.serve import Tls, bind_socket, end_on_signals, end_process, raise_file_limit, run_app, run_main
from common.telemetry.create import check_tracing
from common.telemetry.logs import configure_logging
from proxy.app import create_app

NODE_CONNECTIONS = 2
"""Connections of a running request besides its client's: one to a prefill node, one to a decode node."""
SPARE_FILES = 512
"""Open files for all but requests: health probes, event feeds, logs, libraries, and clients that only read /health or
/metrics."""
MMAP_BYTES = 256 * 2**10
"""Size from which a block of memory is the system's again as soon as it is freed. glibc raises its limit to the largest
block that was freed, and keeps what bodies of megabytes then leave in each thread's heap."""
_M_MMAP_THRESHOLD = -3  # malloc.h


def give_large_blocks_back() -> None:
    """For the rest of the process. Does nothing where malloc is not glibc's."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)


def main() -> int:
    end_on_signals()
    give_large_blocks_back()
    config = parse_config(ProxyConfig, sys.argv[1:], os.environ, prog="tandem proxy")
    configure_logging(config.log_level, config.log_format, role="proxy", node="proxy")
    config.warn_if_exposed()
    check_tracing(config.otlp_traces_endpoint)
    tls = Tls(config.ssl_certfile, config.ssl_keyfile) if config.ssl_certfile else None
    if tls is not None:
        tls.check()
    num_requests = config.max_concurrency + config.max_queue_size
    num_wanted = num_requests + NODE_CONNECTIONS * config.max_concurrency + SPARE_FILES
    num_files = min(num_wanted, raise_file_limit(num_wanted, flag="--max-concurrency"))
    # When files are short, fewer clients may connect: each running request needs its connections to nodes.
    max_connections = max(num_files // 3, num_requests + SPARE_FILES // 2 - (num_wanted - num_files))
    sock = bind_socket(config.host, config.port)
    config = dataclasses.replace(config, port=sock.getsockname()[1])
    app = create_app(config)
    keep_collections_short()
    return run_app(app, sock, log_level=config.log_level, tls=tls, max_connections=max_connections)


if __name__ == "__main__":
    end_process(run_main(main, program="tandem proxy"))
