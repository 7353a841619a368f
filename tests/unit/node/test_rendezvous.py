"""Rendezvous: the leg and its reader find each other in every order, and every way out is told to whoever waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from common.errors import InvalidRequestError, QueueFullError, RequestAbortedError, TandemError
from common.node.lend import rendezvous
from common.node.lend.rendezvous import RendezvousTable, TooManyRendezvousError, UnknownPullError, refused_rendezvous
from common.node.routes.pull_routes import _follow
from common.wire.handoff import prefill_leg_params
from common.wire.headers import LEG_FAILED, LEG_HEADER
from common.wire.manifest import Manifest, PartialManifest
from common.wire.pull import RendezvousQuery

pytestmark = pytest.mark.asyncio
LONG_S = 30.0


def part(num_tokens: int) -> PartialManifest:
    num_blocks = num_tokens // 4
    ids = (tuple(range(1, num_blocks + 1)),)
    return PartialManifest("engine", 7, "00ff", 4, num_tokens, ids, ids, 30.0)


def manifest(num_tokens: int = 10) -> Manifest:
    ids = (tuple(range(1, -(-num_tokens // 4) + 1)),)
    return Manifest(
        "engine", "r", "127.0.0.1", 8100, num_tokens, 4, ids, ids, 7, "00ff", "r", 30.0, bytes(32), slot_id=1
    )


class Holder:
    """A table over a make-believe node: which ids are leased, which legs were called off."""

    def __init__(self, *, leg_wait_s: float = LONG_S) -> None:
        self.in_use: set[str] = set()
        self.called_off: list[str] = []
        self.table = RendezvousTable(
            is_in_use=lambda each: each in self.in_use,
            call_off=self.called_off.append,
            leg_wait_s=leg_wait_s,
        )


@pytest_asyncio.fixture
async def holder() -> AsyncIterator[Holder]:
    yield Holder()


async def waiting(table: RendezvousTable, after: int = 0) -> asyncio.Task[Any]:
    """A reader that waits by now."""
    task = asyncio.create_task(table.wait("r", after, LONG_S))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_reader_when_it_comes_before_the_leg_then_gets_parts_and_the_end(holder: Holder) -> None:
    reader = await waiting(holder.table)
    holder.table.open("r")
    await asyncio.sleep(0)
    assert not reader.done()
    holder.table.advance("r", part(4))
    assert await reader == part(4)
    reader = await waiting(holder.table, after=4)
    holder.table.advance("r", part(8))
    assert await reader == part(8)
    reader = await waiting(holder.table, after=8)
    assert holder.table.finish("r", manifest())
    assert await reader == manifest()


async def test_reader_when_the_leg_begins_then_hears_of_it_once(holder: Holder) -> None:
    reader = await waiting(holder.table)
    holder.table.open("r")
    holder.table.advance("r", part(0))
    assert await reader == part(0)
    reader = await waiting(holder.table)
    holder.table.advance("r", part(4))
    assert await reader == part(4)


async def test_reader_when_it_comes_late_then_is_answered_at_once_as_often_as_it_asks(holder: Holder) -> None:
    holder.table.open("r")
    holder.table.advance("r", part(8))
    assert await holder.table.wait("r", 4, LONG_S) == part(8)
    holder.table.finish("r", manifest())
    for after in (0, 8, 100):
        assert await holder.table.wait("r", after, LONG_S) == manifest()


BLOCKS_PER_STEP = 32


async def bytes_of_a_prompt(num_steps: int) -> int:
    """What a reader that follows a prompt gets, all answers together, and puts together rightly."""
    table, num_bytes = Holder().table, 0
    table.open("r")
    known: PartialManifest | None = None
    for step in range(1, num_steps + 1):
        finished = big_part(step * BLOCKS_PER_STEP)
        table.advance("r", finished)
        after = known.num_tokens if known is not None else 0
        answer = await table.wait("r", after, LONG_S, after)
        assert isinstance(answer, PartialManifest)
        body = answer.to_params()
        num_bytes += len(json.dumps(body))
        known = PartialManifest.from_params(body).joined_to(known)
        assert known == finished
    return num_bytes


def big_part(num_blocks: int) -> PartialManifest:
    ids = tuple(range(1, num_blocks + 1))
    return PartialManifest("engine", 7, "00ff", 4, 4 * num_blocks, (ids,), (tuple(2**62 + each for each in ids),), 30.0)


async def test_parts_of_a_long_prompt_when_followed_then_their_bytes_grow_with_it_and_not_with_its_square() -> None:
    short, long = await bytes_of_a_prompt(16), await bytes_of_a_prompt(128)
    assert long < 9 * short
    # Each block is named once: one manifest of everything, and what each of 128 answers says besides.
    assert long < len(json.dumps(big_part(128 * BLOCKS_PER_STEP).to_params())) + 128 * 300


async def test_reader_when_it_starts_anew_or_lost_an_answer_then_gets_everything(holder: Holder) -> None:
    holder.table.open("r")
    holder.table.advance("r", part(8))
    assert await holder.table.wait("r", 0, LONG_S, 0) == part(8)
    holder.table.advance("r", part(16))
    assert await holder.table.wait("r", 8, LONG_S, 8) == part(16).beyond(2)
    assert await holder.table.wait("r", 8, LONG_S, 8) == part(16)
    holder.table.advance("r", part(24))
    assert await holder.table.wait("r", 16, LONG_S) == part(24)
    assert await holder.table.wait("r", 0, LONG_S, 16) == part(24)
    assert await holder.table.wait("r", 16, LONG_S, 24) == part(24).beyond(6)


async def test_part_when_blocks_changed_since_it_was_told_then_all_are_named_again(holder: Holder) -> None:
    """A sequence that was preempted and computed again has other blocks, or the same ones in a later generation."""
    holder.table.open("r")
    holder.table.advance("r", part(8))
    await holder.table.wait("r", 0, LONG_S, 0)
    for changed in (
        replace(part(12), block_ids=((1, 9, 3),)),
        replace(part(16), block_ids=((1, 9, 3, 4),), generations=((1, 2, 30, 4),)),
    ):
        holder.table.advance("r", changed)
        known = changed.num_tokens - 4
        assert await holder.table.wait("r", known, LONG_S, known) == changed


async def test_part_when_a_window_has_moved_on_then_only_what_is_new_is_named(holder: Holder) -> None:
    holder.table.open("r")
    holder.table.advance("r", replace(part(12), block_ids=((0, 2, 3),), generations=((0, 2, 3),)))
    await holder.table.wait("r", 0, LONG_S, 0)
    passed = replace(part(20), block_ids=((0, 0, 3, 4, 5),), generations=((0, 0, 3, 4, 5),))
    holder.table.advance("r", passed)
    assert await holder.table.wait("r", 12, LONG_S, 12) == passed.beyond(3)


async def test_reader_when_its_time_is_over_then_hears_that_nothing_is_new(holder: Holder) -> None:
    assert await holder.table.wait("r", 0, 0.0) is None
    holder.table.open("r")
    holder.table.advance("r", part(4))
    assert await holder.table.wait("r", 4, 0.01) is None


async def test_reader_when_no_leg_comes_then_404_and_nothing_is_kept() -> None:
    holder = Holder(leg_wait_s=0.02)
    with pytest.raises(UnknownPullError) as caught:
        await holder.table.wait("r", 0, LONG_S)
    assert (caught.value.status, caught.value.code) == (404, "unknown_pull")
    assert len(holder.table) == 0


async def test_leg_when_it_fails_then_waiting_and_late_readers_get_its_error(holder: Holder) -> None:
    reader = await waiting(holder.table)
    holder.table.open("r")
    error = TandemError("the engine failed")
    holder.table.fail("r", error)
    with pytest.raises(TandemError, match="the engine failed"):
        await reader
    with pytest.raises(TandemError, match="the engine failed"):
        await holder.table.wait("r", 0, LONG_S)


async def test_leg_when_refused_before_it_began_then_its_reader_hears_at_once(holder: Holder) -> None:
    reader = await waiting(holder.table)
    holder.table.refuse("r", QueueFullError("257 requests are waiting"))
    with pytest.raises(QueueFullError):
        await reader
    holder.table.refuse("other", QueueFullError("257 requests are waiting"))
    with pytest.raises(QueueFullError):
        await holder.table.wait("other", 0, LONG_S)


async def test_leg_when_refused_because_its_node_is_full_then_its_reader_knows_that_from_a_full_table(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.table.refuse("r", QueueFullError("257 requests are waiting", retry_after_s=3))
    answer = await _follow(holder.table, RendezvousQuery("r", 0, LONG_S))
    assert (answer.status_code, answer.headers[LEG_HEADER], answer.headers["Retry-After"]) == (429, LEG_FAILED, "3")
    monkeypatch.setattr(rendezvous, "MAX_OPEN", 1)
    with pytest.raises(TooManyRendezvousError):
        await _follow(holder.table, RendezvousQuery("other", 0, LONG_S))


async def test_refusal_when_the_name_is_another_legs_then_that_one_goes_on(holder: Holder) -> None:
    holder.table.open("r")
    reader = await waiting(holder.table)
    holder.table.refuse("r", QueueFullError("a copy of the leg was refused"))
    holder.in_use.add("leased")
    holder.table.refuse("leased", QueueFullError("a copy of the leg was refused"))
    holder.table.finish("r", manifest())
    assert await reader == manifest()
    assert len(holder.table) == 1


@pytest.mark.parametrize("state", ["running", "final", "failed", "leased", "awaited and leased"])
async def test_open_when_the_name_is_in_use_then_400_names_it(holder: Holder, state: str) -> None:
    if "leased" in state:
        holder.in_use.add("r")
    else:
        holder.table.open("r")
    if state == "awaited and leased":
        await holder.table.wait("r", 0, 0.0)
    if state == "final":
        holder.table.finish("r", manifest())
    if state == "failed":
        holder.table.fail("r", TandemError("no"))
    with pytest.raises(InvalidRequestError) as caught:
        holder.table.open("r")
    assert caught.value.param == "kv_transfer_params.tandem_rendezvous"


async def test_release_when_the_leg_runs_then_it_is_called_off_and_its_end_releases_the_lease(holder: Holder) -> None:
    holder.table.open("r")
    assert holder.table.release("r")
    assert holder.called_off == ["r"]
    assert not holder.table.finish("r", manifest())
    assert len(holder.table) == 0


async def test_release_when_the_leg_is_still_to_come_then_it_does_not_begin(holder: Holder) -> None:
    await holder.table.wait("r", 0, 0.0)
    assert holder.table.release("r")
    with pytest.raises(RequestAbortedError):
        holder.table.open("r")
    assert len(holder.table) == 0
    assert holder.called_off == []


async def test_release_when_it_overtakes_leg_and_reader_then_the_leg_does_not_begin() -> None:
    holder = Holder(leg_wait_s=0.05)
    assert not holder.table.is_called_off("r")
    assert not holder.table.release("r", may_come=True)
    assert holder.table.is_called_off("r")
    with pytest.raises(RequestAbortedError):
        holder.table.open("r")
    holder.in_use.add("leased")
    for name in ("leased", "late"):
        assert not holder.table.release(name, may_come=True)
    assert len(holder.table) == 1
    async with asyncio.timeout(LONG_S):
        while len(holder.table):
            await asyncio.sleep(0.005)
    assert not holder.table.release("plain")
    assert len(holder.table) == 0


async def test_release_when_final_then_nothing_is_kept_and_when_unknown_then_false(holder: Holder) -> None:
    holder.table.open("r")
    holder.table.finish("r", manifest())
    assert holder.table.release("r")
    assert len(holder.table) == 0
    assert not holder.table.release("r")
    assert holder.called_off == []


async def test_final_when_its_lease_has_ended_then_is_forgotten(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LEASE_CHECK_S", 0.01)
    holder.table.open("r")
    holder.in_use.add("r")
    holder.table.finish("r", manifest())
    await asyncio.sleep(0.05)
    assert len(holder.table) == 1
    holder.in_use.clear()
    async with asyncio.timeout(LONG_S):
        while len(holder.table):
            await asyncio.sleep(0.005)


async def test_table_when_full_then_429_for_readers_and_legs(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_OPEN", 2)
    holder.table.open("a")
    await holder.table.wait("b", 0, 0.0)
    with pytest.raises(QueueFullError, match="limit is 2"):
        holder.table.open("c")
    holder.table.refuse("c", TandemError("no"))
    with pytest.raises(QueueFullError):
        await holder.table.wait("c", 0, LONG_S)
    assert len(holder.table) == 2


async def test_refused_rendezvous_reads_only_prefill_legs_that_name_one() -> None:
    assert refused_rendezvous({"kv_transfer_params": prefill_leg_params("abc"), "prompt": 7}) == "abc"
    decode_leg = {"do_remote_prefill": True, "tandem_rendezvous": "abc"}
    bad = {"do_remote_decode": True, "tandem_rendezvous": ["abc"]}
    for params in (None, [], "x", prefill_leg_params(), decode_leg, bad):
        assert refused_rendezvous({"kv_transfer_params": params}) is None
