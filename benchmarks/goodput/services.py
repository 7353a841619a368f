"""Two nodes, each on a core of its own, in three ways: a role each; a role each that they may leave; no roles. The
proxy goes where there is time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.service import Node, Service

ELASTIC, STATIC, ALIKE = "elastic", "static", "alike"
WAYS = (ELASTIC, STATIC, ALIKE)


@contextlib.contextmanager
def start(way: str, model: Path, node_flags: Sequence[str]) -> Iterator[Service]:
    """Every way has the policy ``cost``. ``alike``: two nodes that compute prompts themselves, as engines without roles
    behind a router do."""
    flags = ["--policy", "cost", "--log-level", "warning", "--elastic" if way == ELASTIC else "--no-elastic"]
    num_prefill, num_decode = (0, 2) if way == ALIKE else (1, 1)
    with Service(
        model,
        prefill_flags=node_flags,
        decode_flags=node_flags,
        proxy_flags=flags,
        num_prefill=num_prefill,
        num_decode=num_decode,
    ) as service:
        cores = sorted(os.sched_getaffinity(0))
        for node, core in zip((*service.prefill, *service.decode), (cores[0], cores[-1]), strict=True):
            pin(node, core)
        yield service


def pin(node: Node, core: int) -> None:
    """All its threads, and those that they start."""
    for thread in Path(f"/proc/{node.process.popen.pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {core})
