"""``python -m tests.support.late_node``: a node on a late device; its role is the first argument."""

from __future__ import annotations

import sys
from typing import NoReturn

from common.metrics.table import Role
from common.node.main import run_node
from tests.support.late_device import wanted_device

DEFAULT_PORTS = {Role.PREFILL: 8100, Role.DECODE: 8200}


def run_late_node(role: Role) -> NoReturn:
    with wanted_device():
        run_node(role, default_port=DEFAULT_PORTS[role])


if __name__ == "__main__":
    run_late_node(Role(sys.argv.pop(1)))
