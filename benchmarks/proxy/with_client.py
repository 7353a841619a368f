"""The proxy with another client to its nodes: ``python -m benchmarks.proxy.with_client NAME`` and the proxy's flags."""

from __future__ import annotations

import sys

from benchmarks.proxy.node_clients import CLIENTS
from proxy import app
from proxy.__main__ import main

if __name__ == "__main__":
    app.NodeClient = CLIENTS[sys.argv.pop(1)]  # type: ignore[misc]
    sys.exit(main())
