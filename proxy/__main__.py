"""``python -m proxy``: read the flags, take the port, serve until a signal."""

from __future__ import annotations

import dataclasses
import os
import sys

from common.api.serve import bind_socket, configure_logging, end_process, run_app, run_main
from common.config import ProxyConfig, parse_config
from proxy.app import create_app


def main() -> int:
    config = parse_config(ProxyConfig, sys.argv[1:], os.environ, prog="tandem proxy")
    configure_logging(config.log_level)
    sock = bind_socket(config.host, config.port)
    config = dataclasses.replace(config, port=sock.getsockname()[1])
    return run_app(create_app(config), sock, log_level=config.log_level)


if __name__ == "__main__":
    end_process(run_main(main, program="tandem proxy"))
