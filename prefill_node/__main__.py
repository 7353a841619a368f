"""``python -m prefill_node`` = ``tandem prefill``."""

import sys

from common.node.main import run_node
from prefill_node.app import create_app

DEFAULT_PORT = 8100

if __name__ == "__main__":
    sys.exit(run_node("prefill", DEFAULT_PORT, create_app))
