"""What the status page shows, put together when the page wants it: the proxy, its nodes, its last requests."""

from __future__ import annotations

import time
from typing import Any

from common.server.drain import STATUS, Drain
from common.server.versions import installed_versions
from proxy.admission.queue import AdmissionQueue
from proxy.metrics.proxy_metrics import TargetCounts
from proxy.metrics.recent_requests import RecentRequests
from proxy.nodes.contention import Contention
from proxy.nodes.node import Node, NodeState
from proxy.nodes.pool import NodePool
from proxy.placement.replicas import ReplicaAdvice
from proxy.status.figures import Fetch, NodeFigures

HELD_BACK = "held back"
"""Ready by its own account, and out of work: its breaker is open."""


class StatusBoard:
    """Puts together what the page shows: of the proxy, its nodes, its last requests."""

    def __init__(
        self,
        pool: NodePool,
        recent: RecentRequests,
        admission: AdmissionQueue,
        drain: Drain,
        targets: TargetCounts,
        replicas: ReplicaAdvice,
        max_running: int,
    ) -> None:
        self._pool = pool
        self._recent = recent
        self._admission = admission
        self._drain = drain
        self._targets = targets
        self._replicas = replicas
        self._max_running = max_running
        self._figures = NodeFigures()
        self._start_s = time.monotonic()
        self._version = installed_versions()["tandem"]

    async def to_json(self) -> dict[str, Any]:
        nodes, reasons = self._pool.nodes, self._pool.reasons()
        if self._drain.is_draining:
            reasons = [STATUS]
        await self._figures.refresh({node.url: _fetch_from(node) for node in nodes})
        return {
            "time": round(time.time(), 3),
            "version": self._version,
            "uptime_seconds": round(time.monotonic() - self._start_s, 1),
            "ready": not reasons,
            "reasons": reasons,
            "running": self._admission.num_running,
            "waiting": self._admission.num_waiting,
            "max_concurrency": self._max_running,
            "targets_kept": {name: self._targets.share(name) for name in self._targets.asked},
            "recommended_nodes": {role.value: num for role, num in self._replicas.nodes().items()},
            "nodes": [{**_describe(node), **self._figures.of(node.url)} for node in nodes],
            "requests": self._recent.to_json(),
        }

    async def close(self) -> None:
        await self._figures.close()


def _describe(node: Node) -> dict[str, Any]:
    return {
        "url": node.url,
        "name": node.name,
        "role": node.role.value,
        "state": HELD_BACK if node.state is NodeState.READY and not node.is_usable else node.state.value,
        "reason": "" if node.is_usable else node.unusable_reason,
        "model": node.info.model,
        "fingerprint": node.info.fingerprint,
        "max_model_len": node.info.max_model_len,
        "tensor_parallel_size": node.info.tensor_parallel_size,
        "in_flight": node.num_in_flight,
        "contention": _contention(node.contention),
    }


def _contention(learned: Contention) -> dict[str, float]:
    """Of its steps that only generate: alone on its machine, and what they are longer beside another node."""
    fixed_s, row_s = learned.line
    return {"seconds_per_step": fixed_s, "seconds_per_row": row_s, "contention_seconds": learned.beside_s}


def _fetch_from(node: Node) -> Fetch:
    async def fetch(path: str, timeout_s: float) -> bytes:
        answer = await node.client.request("GET", path, timeout_s=timeout_s)
        if answer.status != 200:
            raise ValueError(f"{node.url}{path} answers {answer.status}")
        return answer.body

    return fetch
