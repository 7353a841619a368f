"""What a decode leg brings along of a prefill leg, at a holder that answers as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import DeadlineExceededError
from common.kv_cache.manager import KVCacheManager
from common.metrics.metrics import Metrics
from common.metrics.table import Role
from common.node.pull.handoff import HandoffReader
from common.wire.handoff import Rendezvous
from tests.unit.kv_cache.world import make_config
from tests.unit.node.conftest import Reader, Served
from tests.unit.node.test_manifest_stream import WAIT_S, part, until

pytestmark = pytest.mark.asyncio
PROMPT = list(range(18))
FINGERPRINT = "00ff"

Function = Callable[[], Any]


async def at_once(function: Function) -> Any:
    return function()


async def in_a_long_step(function: Function) -> Any:
    raise DeadlineExceededError("the engine was in a step")


def handoffs(reader: Reader, call: Callable[[Function], Any] = at_once) -> HandoffReader:
    """``call``: the engine's."""
    engine: Any = SimpleNamespace(call=call)
    loaded: Any = None
    return HandoffReader(
        manager=KVCacheManager(make_config()),
        engine=engine,
        peers=reader.peers,
        leases=reader.leases,
        loaded=loaded,
        metrics=Metrics(Role.DECODE),
        fingerprint=FINGERPRINT,
        fails_when_lost=True,
    )


async def test_rendezvous_when_the_engine_is_in_a_long_step_then_nothing_is_known_here_and_all_is_pulled(
    reader: Reader, served: Served
) -> None:
    served.holder.answers += [part(8).to_params()]
    rendezvous = Rendezvous("127.0.0.1", served.server.port, "r")
    reading = handoffs(reader, in_a_long_step).read(rendezvous, PROMPT, None)
    async with asyncio.timeout(WAIT_S), reading as result:
        assert result.prefix is not None
        assert (result.prefix.lease_id, result.prefix.num_tokens) == ("r", len(PROMPT))
        assert not result.is_lost
    await until(lambda: served.holder.released == ["r"])
