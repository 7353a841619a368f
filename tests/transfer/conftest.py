from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.transfer_memory import EndpointMemory
from tests.support.transfer_sites import Site

READER_EPOCH = 5


@pytest.fixture(params=["inprocess", "nixl"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Either transport; NIXL with the transports UCX chooses by itself."""
    site = Site(request.param)
    yield site
    site.close()


@pytest.fixture(params=["inprocess", "nixl"])
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
