"""``python -m decode_node`` = ``tandem decode``."""

from __future__ import annotations

from typing import Any

from common.node.main import run_node
from common.server.serve import end_process

DEFAULT_PORT = 8200


def import_app() -> Any:
    from decode_node.app import create_app

    return create_app


if __name__ == "__main__":
    end_process(run_node("decode", DEFAULT_PORT, import_app))
