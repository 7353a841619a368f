"""``python -m decode_node`` = ``tandem decode``."""

from __future__ import annotations

import sys
from typing import Any

from common.node.main import run_node

DEFAULT_PORT = 8200


def import_app() -> Any:
    from decode_node.app import create_app

    return create_app


if __name__ == "__main__":
    sys.exit(run_node("decode", DEFAULT_PORT, import_app))
