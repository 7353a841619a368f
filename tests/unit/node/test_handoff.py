"""What a decode leg brings along of a prefill leg, at a holder that answers as the test says. What is not read is given
back."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import DeadlineExceededError, InvalidRequestError, TransferError
from common.kv_cache.manager import KVCacheManager
from common.metrics.metrics import Metrics
from common.metrics.table import Role
from common.node.pull.handoff import HandoffReader
from common.telemetry.context import enter_request
from common.wire.handoff import Rendezvous
from common.wire.manifest import Manifest
from common.wire.routes import LEASE_RELEASE_ROUTE, MANIFEST_CHECK_ROUTE, PULL_ROUTE
from tests.unit.kv_cache.world import make_config
from tests.unit.node.conftest import Reader, Served
from tests.unit.node.test_manifest_stream import WAIT_S, manifest, part, until

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
    config = make_config()
    engine: Any = SimpleNamespace(call=call)
    loaded: Any = SimpleNamespace(dtype=torch.float32, geometry=config.geometry)
    return HandoffReader(
        manager=KVCacheManager(config),
        engine=engine,
        peers=reader.peers,
        leases=reader.leases,
        loaded=loaded,
        metrics=Metrics(Role.DECODE),
        fingerprint=FINGERPRINT,
        fails_when_lost=True,
    )


def carried(served: Served, **changes: Any) -> Manifest:
    """As a foreign proxy brings it."""
    row = {"output_row": bytes(4 * 8), "output_row_dtype": "float32"}
    fields = {"port": served.server.port, "lease_id": "lease", "proof": "ab" * 16, **row, **changes}
    return dataclasses.replace(manifest(len(PROMPT)), **fields)


async def read(reading: HandoffReader, given: Manifest) -> None:
    async with asyncio.timeout(WAIT_S), reading.read(given, PROMPT, None):
        pass


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


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"fingerprint": "01ff"}, InvalidRequestError),  # of another model
        ({"output_row": bytes(4 * 9)}, InvalidRequestError),
        ({"epoch": 78}, TransferError),  # no peer in this life
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
async def test_manifest_when_it_cannot_be_read_then_its_holder_is_asked_and_the_lease_released(
    reader: Reader, served: Served, changes: dict[str, Any], error: type[Exception]
) -> None:
    given = carried(served, **changes)
    with pytest.raises(error):
        await read(handoffs(reader), given)
    await until(lambda: served.holder.released)
    assert (served.holder.checked, served.holder.released) == ([given.digest()], ["lease"])


async def test_manifest_when_it_is_left_before_its_holder_has_answered_then_the_lease_is_released_all_the_same(
    reader: Reader, served: Served
) -> None:
    served.holder.may_check = False
    async with asyncio.timeout(WAIT_S), handoffs(reader).read(carried(served), PROMPT, None) as result:
        await until(lambda: served.holder.checked)
        assert result.prefix is not None
        assert result.prefix.manifests.final is None
    assert served.holder.released == []
    served.holder.may_check = True
    await until(lambda: served.holder.released)
    assert served.holder.released == ["lease"]


async def test_manifest_when_its_holder_does_not_know_it_then_nothing_is_released(
    reader: Reader, served: Served
) -> None:
    """Its lease may be another's."""
    served.holder.is_mine = False
    reading = handoffs(reader)
    reading.give_back(carried(served))
    with pytest.raises(InvalidRequestError):
        await read(reading, carried(served, fingerprint="01ff"))
    await until(lambda: len(served.holder.checked) == 2)
    served.holder.is_mine = True
    reading.give_back(carried(served, lease_id="mine"))
    await until(lambda: served.holder.released)
    assert served.holder.released == ["mine"]


async def test_request_id_when_a_handoff_is_read_then_its_holder_hears_it_in_all_calls_for_that_request(
    reader: Reader, served: Served
) -> None:
    served.holder.answers += [part(8).to_params()]
    reading, rendezvous = handoffs(reader), Rendezvous("127.0.0.1", served.server.port, "r")

    async def request() -> None:
        enter_request("req-1")
        async with reading.read(rendezvous, PROMPT, None):
            pass
        async with reading.read(carried(served), PROMPT, None) as result:
            assert result.prefix is not None
            await result.prefix.manifests.confirmed()

    async with asyncio.timeout(WAIT_S):
        await asyncio.create_task(request())
    await until(lambda: len(served.holder.released) == 2)
    named = {path for path, request_id in served.holder.request_ids if request_id == "req-1"}
    assert named == {PULL_ROUTE, MANIFEST_CHECK_ROUTE, LEASE_RELEASE_ROUTE}
    assert {request_id for path, request_id in served.holder.request_ids if path in named} == {"req-1"}
