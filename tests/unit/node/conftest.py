"""A holder on a real loopback port, and the directory of a node that reads from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from common.node.peers.directory import PeerDirectory
from common.node.pull.remote_leases import RemoteLeases
from common.transfer.puller import Puller
from common.transfer.testing.inprocess import InProcessBackend, InProcessHub
from tests.support.http_server import AppServer
from tests.support.transfer_memory import EndpointMemory
from tests.unit.node.holder import SIZES, PeerHolder


@dataclass
class Served:
    """A holder and where it is reached."""

    holder: PeerHolder
    server: AppServer

    @property
    def url(self) -> str:
        return self.server.url


@dataclass
class Reader:
    """The reading node's side."""

    memory: EndpointMemory
    backend: InProcessBackend
    puller: Puller
    peers: PeerDirectory
    leases: RemoteLeases


@pytest.fixture
def hub() -> InProcessHub:
    return InProcessHub()


@pytest.fixture
def served(hub: InProcessHub) -> Iterator[Served]:
    holder = PeerHolder(hub)
    server = AppServer(holder.app())
    yield Served(holder, server)
    holder.is_over = True
    server.stop()
    holder.backend.close()


@pytest_asyncio.fixture
async def reader(hub: InProcessHub, served: Served) -> AsyncIterator[Reader]:
    """Ends before the holder does: its connections are its own to close."""
    memory = EndpointMemory(epoch=5, seed=9, **SIZES)
    backend = InProcessBackend(hub, engine_id="reader", epoch=5)
    backend.register(list(memory.regions.values()))
    puller = Puller(backend)
    peers = PeerDirectory(backend, (), None)
    leases = RemoteLeases(peers)
    leases.start()
    yield Reader(memory, backend, puller, peers, leases)
    await leases.close()
    await peers.close()
    puller.close()
    backend.close()
