"""A real proxy in front of fake nodes, all on loopback ports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from common.config.proxy import ProxyConfig
from common.wire.routes import METRICS_ROUTE, READY_ROUTE
from proxy.app import create_app
from tests.support.http_server import AppServer, wait_for
from tests.unit.proxy.fake_node import FakeNode

FAST_POLL_S = 0.05


@dataclass
class Cluster:
    """A proxy and its nodes; ``client`` talks to the proxy."""

    client: httpx.Client
    prefill: list[FakeNode]
    decode: list[FakeNode]
    servers: dict[str, AppServer] = field(default_factory=dict)
    proxy: AppServer | None = None

    def stop_node(self, node: FakeNode) -> None:
        self.servers[node.name].stop()

    def end_drain(self) -> None:
        """Drain the proxy as a signal would, to the end of its deadline."""
        assert self.proxy is not None
        drain = self.proxy.app.state.drain

        async def work() -> None:
            drain.begin("a test")
            await drain.wait()

        self.proxy.run(work())

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series of the proxy; 0 when it is not there."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.client.get(METRICS_ROUTE).text.splitlines():
            series, _, value = line.rpartition(" ")
            given, _, rest = series.partition("{")
            if given == name and wanted <= set(rest.rstrip("}").split(",")):
                return float(value)
        return 0.0


StartCluster = Callable[..., Cluster]


@pytest.fixture
def start_cluster() -> Iterator[StartCluster]:
    """``start_cluster(num_prefill, num_decode, **config)``; waits until the proxy is ready unless told not to.

    ``pull``: nodes that can follow a prompt while it is computed; ``resume``: that go on with others' answers.
    ``documents``: internal routes that they all have.
    ``more_prefill``, ``more_decode``: URLs of nodes of the test's own.
    """
    with contextlib.ExitStack() as stack:

        def start(
            num_prefill: int = 1,
            num_decode: int = 1,
            *,
            wait: bool = True,
            pull: bool = False,
            documents: Mapping[str, Any] | None = None,
            resume: bool = False,
            more_prefill: Sequence[str] = (),
            more_decode: Sequence[str] = (),
            **config: Any,
        ) -> Cluster:
            common = {"pull": pull, "resume": resume, "documents": dict(documents or {})}
            prefill = [FakeNode(f"prefill-{index}", **common) for index in range(num_prefill)]
            decode = [FakeNode(f"decode-{index}", **common) for index in range(num_decode)]
            servers = {}
            for node in [*prefill, *decode]:
                server = servers[node.name] = AppServer(node.app())
                node.port = server.port
                stack.callback(server.stop)
            for node in decode:
                node.follows = prefill
            config.setdefault("health_interval_seconds", FAST_POLL_S)
            # Most tests are about the handoff: every prompt takes it.
            config.setdefault("policy", "round_robin")
            proxy = AppServer(
                create_app(
                    ProxyConfig(
                        prefill=(*(servers[node.name].url for node in prefill), *more_prefill),
                        decode=(*(servers[node.name].url for node in decode), *more_decode),
                        **config,
                    )
                )
            )
            stack.callback(proxy.stop)
            for server in (*servers.values(), proxy):
                stack.callback(server.ask_to_stop)
            client = stack.enter_context(httpx.Client(base_url=proxy.url, timeout=20, trust_env=False))
            if wait:
                wait_for(lambda: client.get(READY_ROUTE).status_code == 200, "the proxy to be ready")
                names = [*(server.url for server in servers.values()), *more_prefill, *more_decode]
                cluster = Cluster(client, prefill, decode, servers, proxy)
                wait_for(lambda: all(cluster.metric("tandem_node_up", node=url) for url in names), "all nodes up")
            return Cluster(client, prefill, decode, servers, proxy)

        yield start
