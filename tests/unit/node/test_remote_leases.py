"""Leases held at peers: renewed in time, whatever another holder, or whoever wrote a manifest, does."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import TransferError
from common.node.pull.remote_leases import MIN_RENEWAL_INTERVAL_S, RELEASE_TRIES, RemoteLeases
from common.telemetry.context import enter_request

GOOD, SILENT, BROKEN = "http://good", "http://silent", "http://broken"
LEASE_S = 3.0
"""Renewed six times as often, so that a busy machine is in time too."""


class FakePeers:
    """Takes posts: one peer answers, one does not within its timeout, one cannot be reached."""

    def __init__(self) -> None:
        self.made_s = time.monotonic()
        self.renewals: list[tuple[str, float, tuple[str, ...]]] = []
        self.releases: list[tuple[str, tuple[str, ...], bool]] = []
        self.request_ids: list[str | None] = []

    async def post(
        self, url: str, path: str, body: dict[str, Any], timeout_s: float, request_id: str | None = None
    ) -> dict[str, Any]:
        self.request_ids.append(request_id)
        if path.endswith("/renew"):
            self.renewals.append((url, time.monotonic(), tuple(body["lease_ids"])))
            if url == SILENT:
                await asyncio.Event().wait()
        else:
            self.releases.append((url, tuple(body["lease_ids"]), body["may_come"]))
        if url == SILENT:
            await asyncio.sleep(timeout_s)
        if url != GOOD:
            raise TransferError(f"{url} does not answer", code="peer_unreachable")
        return {}

    def times(self, url: str) -> list[float]:
        return [time_s for each, time_s, _ in self.renewals if each == url]


async def renewals_until(is_enough: Callable[[FakePeers], bool], *held: tuple[str, str, float]) -> FakePeers:
    peers = FakePeers()
    leases = RemoteLeases(peers)  # type: ignore[arg-type]
    leases.start()
    for lease in held:
        leases.hold(*lease)
    async with asyncio.timeout(20):
        while not is_enough(peers):
            await asyncio.sleep(0.002)
    await leases.close()
    return peers


@pytest.mark.asyncio
async def test_lease_when_another_holder_does_not_answer_then_is_still_renewed_in_time() -> None:
    peers = await renewals_until(
        lambda peers: min(len(peers.times(GOOD)), len(peers.times(BROKEN))) >= 4,
        *(("a", SILENT, LEASE_S), ("b", GOOD, LEASE_S), ("c", BROKEN, LEASE_S)),
    )
    assert max(after - before for before, after in itertools.pairwise(peers.times(GOOD))) < LEASE_S
    assert len(peers.times(SILENT)) == 1  # never two calls to one holder at once


@pytest.mark.asyncio
async def test_leases_at_one_holder_when_due_together_then_are_one_call() -> None:
    peers = await renewals_until(lambda peers: len(peers.renewals) >= 4, ("a", GOOD, 0.6), ("b", GOOD, 0.6))
    assert {lease_ids for _, _, lease_ids in peers.renewals} == {("a", "b")}


@pytest.mark.asyncio
async def test_lease_when_it_claims_to_last_for_nothing_then_is_not_renewed_without_a_pause() -> None:
    peers = await renewals_until(lambda peers: len(peers.renewals) >= 20, ("a", GOOD, 1e-12))
    # Of all until then: one that a busy machine has held up may be close to the next.
    for number, time_s in enumerate(peers.times(GOOD)):
        assert time_s - peers.made_s > 0.9 * number * MIN_RENEWAL_INTERVAL_S


@pytest.mark.asyncio
async def test_leases_when_given_up_together_then_each_holder_hears_it_in_one_call_of_each_kind() -> None:
    peers = FakePeers()
    leases = RemoteLeases(peers)  # type: ignore[arg-type]
    for lease_id, url in (("a", GOOD), ("b", BROKEN), ("c", GOOD), ("d", GOOD)):
        leases.hold(lease_id, url, 60.0)
    leases.release("a")
    leases.release("b")
    leases.call_off("e", GOOD)
    leases.release("c")
    await asyncio.sleep(0.01)
    leases.release("d")
    await leases.close()
    assert sorted(peers.releases) == [
        *[(BROKEN, ("b",), False)] * RELEASE_TRIES,
        (GOOD, ("a", "c"), False),
        (GOOD, ("d",), False),
        (GOOD, ("e",), True),
    ]


@pytest.mark.asyncio
async def test_release_when_it_is_for_one_request_then_has_its_id_and_none_when_it_is_for_several() -> None:
    peers = FakePeers()
    leases = RemoteLeases(peers)  # type: ignore[arg-type]

    def hold(request_id: str, *lease_ids: str) -> None:
        enter_request(request_id)
        for lease_id in lease_ids:
            leases.hold(lease_id, GOOD, 60.0)

    for request_id, lease_ids in (("first", "abc"), ("second", "d")):
        contextvars.copy_context().run(hold, request_id, *lease_ids)
    for together in ("ab", "cd"):
        for lease_id in together:
            leases.release(lease_id)
        await asyncio.sleep(0.01)
    await leases.close()
    assert peers.releases == [(GOOD, ("a", "b"), False), (GOOD, ("c", "d"), False)]
    assert peers.request_ids == ["first", None]
