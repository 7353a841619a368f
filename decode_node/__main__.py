"""``python -m decode_node`` = ``tandem decode``."""

import sys

from common.node.main import run_node
from decode_node.app import create_app

DEFAULT_PORT = 8200

if __name__ == "__main__":
    sys.exit(run_node("decode", DEFAULT_PORT, create_app))
