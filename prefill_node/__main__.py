"""``python -m prefill_node`` = ``tandem prefill``."""

from __future__ import annotations

from common.metrics.table import Role
from common.node.main import run_node

if __name__ == "__main__":
    run_node(Role.PREFILL, default_port=8100)
