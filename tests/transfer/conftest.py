from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.transfer.jobs import PullStatus
from common.transfer.regions import Peer
from tests.support.transfer_memory import EndpointMemory
from tests.support.transfer_rigs import EPOCH, Rig, Rigs
from tests.support.transfer_sites import Holder, Site

READER_EPOCH = 5


@pytest.fixture(params=["inprocess", "faulty", "nixl"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Each backend: in-process, the same below a fault injector that injects none, NIXL with what UCX chooses."""
    site = Site(request.param)
    yield site
    site.close()


@pytest.fixture(params=[*(pytest.param(fake, marks=pytest.mark.full) for fake in ("inprocess", "faulty")), "nixl"])
def freezable_site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A transport over which a frozen holder keeps a read in flight: TCP. Over shared memory the reader copies by
    itself."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    site = Site(request.param)
    yield site
    site.close()


@pytest.fixture
def memory() -> EndpointMemory:
    return EndpointMemory(epoch=READER_EPOCH, seed=1)


@pytest.fixture
def rigs(site: Site) -> Iterator[Rigs]:
    """Closed before the site's backends are (fixtures end in reverse order)."""
    rigs = Rigs()
    yield rigs
    rigs.close()


@pytest.fixture
def freezable_rigs(freezable_site: Site) -> Iterator[Rigs]:
    rigs = Rigs()
    yield rigs
    rigs.close()


@pytest.fixture
def holder(site: Site) -> Holder:
    return site.holder(epoch=EPOCH)


@pytest.fixture
def rig(site: Site, rigs: Rigs, memory: EndpointMemory) -> Rig:
    return rigs(site.backend(memory))


@pytest.fixture
def frozen(freezable_site: Site, freezable_rigs: Rigs, memory: EndpointMemory) -> tuple[Holder, Rig, Peer]:
    """Connected before it was frozen."""
    holder = freezable_site.holder(epoch=EPOCH)
    rig = freezable_rigs(freezable_site.backend(memory))
    peer = rig.backend.add_peer(holder.metadata)
    assert rig.pull(peer, [(1, 1)]).status is PullStatus.OK
    holder.freeze()
    return holder, rig, peer
