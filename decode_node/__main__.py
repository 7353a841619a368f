"""``python -m decode_node`` = ``tandem decode``."""

from __future__ import annotations

from common.metrics.table import Role
from common.node.main import run_node

if __name__ == "__main__":
    run_node(Role.DECODE, default_port=8200)
