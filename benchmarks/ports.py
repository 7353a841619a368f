"""Ports for processes that are about to listen."""

from __future__ import annotations

import contextlib
import random
import socket

PORTS = (10_240, 32_000)
"""Below the range from which the system takes ports for outgoing connections: none of those can take one away while the
process that is to have it starts."""


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now, each another."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            port = random.randrange(*PORTS)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                ports.append(port)
    return ports
