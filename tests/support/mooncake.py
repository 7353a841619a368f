"""A real Mooncake master for tests: the binary that the package brings, on loopback ports."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.service import child_environment, free_port
from tests.support.warm import die_with_parent

START_S = 30.0


@dataclass
class Master:
    port: int
    admin_port: int
    process: subprocess.Popen[bytes]

    def tier(self, size: str = "64MiB") -> str:
        return f"mooncake:127.0.0.1:{self.port}?size={size}&admin={self.admin_port}"


@contextlib.contextmanager
def master() -> Iterator[Master]:
    import mooncake

    port, admin_port = free_port(), free_port()
    # No key is kept from eviction or removal for longer than a test waits.
    words = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--default_kv_lease_ttl=200ms", "--client_ttl=2"]
    binary = Path(mooncake.__file__).parent / "mooncake_master"
    process = subprocess.Popen(
        [str(binary), f"--rpc_port={port}", f"--metrics_port={admin_port}", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=child_environment(), preexec_fn=die_with_parent,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        for each in (port, admin_port):
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", each), 1):
                    break
                assert process.poll() is None, "the master has ended"
                assert time.monotonic() < deadline, "the master does not listen"
                time.sleep(0.05)
        yield Master(port, admin_port, process)
    finally:
        process.kill()
        process.wait()
