"""Real decode nodes that die or freeze under streams, with migration on: nobody sees it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import metric, wait_settled
from tests.support.models import checkpoint
from tests.support.restart import start_again
from tests.support.service import Service
from tests.support.streams import NUM_STREAMS, Stream, bodies, run_all, run_and_strike

MAX_PAUSE_S = 20.0
"""Of a stream that moves: a frozen node is given up after 5 s, and the machine may be busy."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """One prefill node, two decode nodes, streams that may move twice."""
    flags = ("--migration-limit", "2")
    with Service(
        checkpoint(FAMILY), prefill_flags=NODE_FLAGS, decode_flags=NODE_FLAGS, proxy_flags=flags, num_decode=2
    ) as running:
        yield running


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_streams_when_their_decode_node_is_gone_then_end_as_if_it_were_not(service: Service, number: int) -> None:
    expected = run_all(service.url, [Stream(body) for body in bodies(7300, f"whole {number}")])
    streams = [Stream(body) for body in bodies(7300, f"cut {number}")]
    victim, other = service.decode
    before = metric(service.proxy, "proxy_migrations_total", outcome="resumed")
    run_and_strike(service, streams, victim, number)
    assert metric(service.proxy, "proxy_migrations_total", outcome="resumed") - before >= NUM_STREAMS / 10
    for stream, like in zip(streams, expected, strict=True):
        stream.assert_like(like)
    assert max(stream.pause_s for stream in streams) < MAX_PAUSE_S
    wait_settled(service.prefill[0], other)
    victim.process.kill()
    start_again(service, victim)
