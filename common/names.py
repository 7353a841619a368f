"""What names of nodes and hosts look like in all that processes of the service say to each other.

Whoever reads a message holds its sender to this, so that a node's flags are held to it at its start already.
"""

from __future__ import annotations

import re

# Names (of engines, requests, leases, rendezvous), and hosts with IPv6 in brackets.
WORD = re.compile(r"[A-Za-z0-9._:\-]{1,256}")
HOST = re.compile(r"[A-Za-z0-9._:\-\[\]%]{1,253}")

LIFE_BYTES = 4
"""Random bytes of an engine's name, which is that of its node, a dash and these in hex."""
MAX_NODE_NAME_CHARS = 256 - 1 - 2 * LIFE_BYTES
"""So that the name of an engine is a ``WORD``."""
