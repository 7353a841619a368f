"""``python -m prefill_node`` = ``tandem prefill``."""

from __future__ import annotations

from typing import Any

from common.node.main import run_node
from common.server.serve import end_process

DEFAULT_PORT = 8100


def import_app() -> Any:
    from prefill_node.app import create_app

    return create_app


if __name__ == "__main__":
    end_process(run_node("prefill", DEFAULT_PORT, import_app))
