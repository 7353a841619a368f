"""The poll that follows a rendezvous: what it asks, what ends it, and that the holder hears of every way out once; and
that nothing of a finished manifest counts before its holder has confirmed it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from common.errors import PrefillLegFailedError, PrefillLegRejectedError, TransferError
from common.node.pull.manifest_stream import (
    FixedManifestStream,
    ManifestStream,
    ReadablePrefix,
    RendezvousManifestStream,
)
from common.openai.errors import error_response
from common.wire.headers import LEG_FAILED, LEG_HEADER
from common.wire.manifest import Manifest, ManifestShape, PartialManifest
from tests.unit.node.conftest import Reader, Served
from tests.unit.node.holder import BLOCK_SIZE, ENGINE_ID

pytestmark = pytest.mark.asyncio
WAIT_S = 20.0
SHAPE = ManifestShape(num_block_groups=1, has_state=True)


def part(num_tokens: int) -> PartialManifest:
    ids = (tuple(range(1, num_tokens // BLOCK_SIZE + 1)),)
    return PartialManifest(ENGINE_ID, 77, "00ff", BLOCK_SIZE, num_tokens, ids, ids, 30.0)


def manifest(num_tokens: int) -> Manifest:
    ids = (tuple(range(1, -(-num_tokens // BLOCK_SIZE) + 1)),)
    return Manifest(
        ENGINE_ID, "r", "127.0.0.1", 1, num_tokens, BLOCK_SIZE, ids, ids, 77, "00ff", "r", 30.0, bytes(32), slot_id=1
    )


def read(each: Manifest | PartialManifest) -> ReadablePrefix:
    """As ``ReadablePrefix.of``, without a model."""
    if each.num_tokens == 13:
        raise TransferError("another prompt", code="wrong_content")
    is_final = isinstance(each, Manifest)
    return ReadablePrefix(each.engine_id, each.epoch, each.num_tokens, each.block_ids, each.generations, is_final, 0.0)


@pytest_asyncio.fixture
async def stream(reader: Reader, served: Served) -> AsyncIterator[RendezvousManifestStream]:
    await reader.peers.meet(served.url)
    made = RendezvousManifestStream(reader.peers, reader.leases, served.url, "r", SHAPE, read)
    made.start()
    yield made
    made.close()
    await asyncio.sleep(0.02)  # the poll that was cancelled closes its connection


async def beyond(stream: ManifestStream, num_tokens: int) -> ReadablePrefix:
    return await asyncio.wait_for(stream.beyond(num_tokens), WAIT_S)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def afters(served: Served) -> list[Any]:
    return [query["after"] for query in served.holder.queries]


async def test_poll_when_parts_come_then_asks_beyond_each_and_ends_with_the_final_one(
    stream: RendezvousManifestStream, served: Served
) -> None:
    served.holder.answers += [part(8).to_params()]
    assert (await beyond(stream, 0)).num_tokens == 8
    assert stream.final is None
    served.holder.answers += [{"final": False, "remote_num_tokens": 8}, part(16).to_params()]
    assert (await beyond(stream, 8)).num_tokens == 16
    served.holder.answers += [manifest(18).to_params()]
    final = await beyond(stream, 16)
    assert (final.is_final, final.num_tokens, final.slot_id) == (True, 18, 0)
    assert stream.final == final
    assert (await beyond(stream, 100)) == final
    assert afters(served) == [0, 8, 8, 16]
    stream.close()
    stream.close()
    await until(lambda: served.holder.released)
    await asyncio.sleep(0.05)
    assert served.holder.released == ["r"]


async def test_poll_when_answers_say_what_is_new_then_they_are_put_together(
    stream: RendezvousManifestStream, served: Served
) -> None:
    for known, num_tokens in ((0, 8), (8, 16), (16, 24)):
        served.holder.answers += [part(num_tokens).beyond(known // BLOCK_SIZE).to_params()]
        prefix = await beyond(stream, known)
        assert (prefix.num_tokens, prefix.block_ids) == (num_tokens, part(num_tokens).block_ids)
        assert prefix.block_generations == part(num_tokens).generations
    served.holder.answers += [part(28).to_params()]  # all of it, as after an answer that got lost
    assert (await beyond(stream, 24)).block_ids == part(28).block_ids
    await until(lambda: len(served.holder.queries) == 5)
    assert [query["have"] for query in served.holder.queries] == afters(served) == [0, 8, 16, 24, 28]


async def test_poll_when_an_answer_leaves_out_what_was_never_told_then_it_is_no_manifest(
    stream: RendezvousManifestStream, served: Served
) -> None:
    served.holder.answers += [part(8).to_params(), part(24).beyond(4).to_params()]
    await beyond(stream, 0)
    with pytest.raises(TransferError, match="tandem_first_block") as caught:
        await beyond(stream, 8)
    assert caught.value.code == "bad_manifest"


async def test_close_when_nothing_is_final_then_the_leg_is_called_off(
    stream: RendezvousManifestStream, served: Served
) -> None:
    served.holder.answers += [part(8).to_params()]
    await beyond(stream, 0)
    stream.close()
    await until(lambda: served.holder.released == ["r"])
    with pytest.raises(TransferError) as caught:
        await beyond(stream, 8)
    assert caught.value.code == "cancelled"


async def test_poll_when_the_leg_failed_then_says_so_and_there_is_nothing_to_call_off(
    stream: RendezvousManifestStream, served: Served
) -> None:
    served.holder.answers += [(500, {LEG_HEADER: "failed"}, {"error": {"message": "oops", "code": "x"}})]
    with pytest.raises(PrefillLegFailedError) as caught:
        await beyond(stream, 0)
    assert (caught.value.status, caught.value.code) == (502, "leg_failed")
    stream.close()
    await asyncio.sleep(0.05)
    assert served.holder.released == []


@pytest.mark.parametrize(("retry_after", "seconds"), [("3", 3), ("Wed, 21 Oct 2026 07:28:00 GMT", 1)])
async def test_poll_when_the_leg_was_refused_then_the_refusal_is_the_clients_to_hear(
    stream: RendezvousManifestStream, served: Served, retry_after: str, seconds: int
) -> None:
    error = {"message": "257 wait", "code": "queue_full", "type": "rate_limit_error", "param": None}
    served.holder.answers += [(429, {LEG_HEADER: "failed", "Retry-After": retry_after}, {"error": error})]
    with pytest.raises(PrefillLegRejectedError) as caught:
        await beyond(stream, 0)
    rejected = caught.value
    assert (rejected.status, rejected.code, rejected.type, rejected.retry_after_s) == (
        429,
        "queue_full",
        "rate_limit_error",
        seconds,
    )
    relayed = error_response(rejected)
    assert (relayed.status_code, relayed.headers[LEG_HEADER], relayed.headers["Retry-After"]) == (
        429,
        LEG_FAILED,
        str(seconds),
    )


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((404, {}, {"error": {"message": "no leg", "code": "unknown_pull"}}), "unknown_pull"),
        ((499, {LEG_HEADER: "failed"}, {}), "leg_aborted"),
        ((401, {}, {"error": {"message": "key", "code": "invalid_cluster_key"}}), "transfer_failed"),
        ({"final": False, "remote_num_tokens": 7}, "bad_manifest"),
        ({"final": True, "remote_num_tokens": 5}, "bad_manifest"),
        (manifest(13).to_params(), "wrong_content"),
    ],
)
async def test_poll_when_the_answer_is_of_no_use_then_fails_with_a_code(
    stream: RendezvousManifestStream, served: Served, answer: Any, code: str
) -> None:
    served.holder.answers += [answer]
    with pytest.raises(TransferError) as caught:
        await beyond(stream, 0)
    assert caught.value.code == code


async def test_final_manifest_when_it_is_not_usable_then_its_lease_is_released_all_the_same(
    stream: RendezvousManifestStream, served: Served
) -> None:
    served.holder.answers += [manifest(13).to_params()]
    with pytest.raises(TransferError):
        await beyond(stream, 0)
    stream.close()
    await until(lambda: served.holder.released == ["r"])


async def test_poll_when_the_peer_is_lost_then_ends_at_once(stream: RendezvousManifestStream, served: Served) -> None:
    await until(lambda: served.holder.queries)
    served.holder.is_over = True
    with pytest.raises(TransferError) as caught:
        await beyond(stream, 0)
    assert caught.value.code == "peer_lost"


async def test_finished_manifest_when_its_holder_confirms_it_then_counts_from_there_on(reader: Reader) -> None:
    stream = FixedManifestStream(read(manifest(18)), reader.leases, "r")
    asked, answered = asyncio.Event(), asyncio.Event()

    async def check() -> None:
        asked.set()
        await answered.wait()

    assert stream.final is not None  # from the holder itself
    await stream.confirmed()
    stream.confirm(check())
    assert (await beyond(stream, 0)).num_tokens == 18  # is read meanwhile
    await asked.wait()
    assert stream.final is None
    waiting = asyncio.create_task(stream.confirmed())
    answered.set()
    await asyncio.wait_for(waiting, WAIT_S)
    stream.close()
    assert stream.final is not None


async def test_finished_manifest_when_its_holder_does_not_know_it_then_never_counts(reader: Reader) -> None:
    stream = FixedManifestStream(read(manifest(18)), reader.leases, "r")

    async def check() -> None:
        raise TransferError("not mine", code="unproven_manifest")

    stream.confirm(check())
    for _ in range(2):
        with pytest.raises(TransferError, match="not mine"):
            await asyncio.wait_for(stream.confirmed(), WAIT_S)
    assert stream.final is None


async def test_finished_manifest_when_closed_before_its_holder_has_answered_then_whoever_waits_is_told(
    reader: Reader,
) -> None:
    stream = FixedManifestStream(read(manifest(18)), reader.leases, "r")
    stream.confirm(asyncio.sleep(WAIT_S))
    waiting = asyncio.create_task(stream.confirmed())
    await asyncio.sleep(0)
    stream.close()
    with pytest.raises(TransferError) as caught:
        await asyncio.wait_for(waiting, WAIT_S)
    assert caught.value.code == "cancelled"
    assert stream.final is None
