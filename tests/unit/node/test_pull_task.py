"""A pull in parts: what is read when, what counts as one outcome, and who owns the destinations on each way out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from common.errors import PrefillLegAbortedError, TransferError
from common.kv_cache.keys import PrefixKeys, chain_root
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.node.pull.engine_bridge import EngineBridge
from common.node.pull.manifest_stream import ManifestStream, ReadablePrefix
from common.node.pull.prefix_reader import FinishedPull
from common.node.pull.pull_task import PullTask, RemotePrefix
from common.transfer.codes import TransferCode
from common.transfer.jobs import DoneCallback, PullJob, PullOutcome, PullReason, PullStatus, TerminalCallback
from tests.unit.node.conftest import Reader, Served
from tests.unit.node.holder import BLOCK_SIZE, BLOCKS, SLOTS, PeerHolder

pytestmark = pytest.mark.asyncio
WAIT_S = 20.0
PARTS_TIMEOUT_S, PAUSE_S = 1.8, 0.4
"""Five pauses are longer than the timeout, and one may be four times as long on a busy machine."""
NUM_TOKENS = 22  # five full blocks and a tail of two tokens
PLAN = PullPlan(NUM_TOKENS, (tuple((index, 20 + index) for index in range(6)),), slot_id=3, num_local_tokens=0)


class ScriptedStream(ManifestStream):
    """ManifestStream that a test makes one by one."""

    def __init__(self) -> None:
        self._prefix: ReadablePrefix | None = None
        self._error: TransferError | None = None
        self._changed = asyncio.Event()
        self.asked_after: list[int] = []
        self.is_closed = False
        self.confirmation: asyncio.Future[None] | None = None

    def give(self, prefix: ReadablePrefix) -> None:
        self._prefix = prefix
        self._changed.set()

    def fail(self, error: TransferError) -> None:
        self._error = error
        self._changed.set()

    @property
    def final(self) -> ReadablePrefix | None:
        return self._prefix if self._prefix is not None and self._prefix.is_final else None

    async def confirmed(self) -> None:
        if self.confirmation is not None:
            await self.confirmation

    async def beyond(self, num_tokens: int) -> ReadablePrefix:
        self.asked_after.append(num_tokens)
        while True:
            if self._error is not None:
                raise self._error
            if self._prefix is not None and (self._prefix.is_final or self._prefix.num_tokens > num_tokens):
                return self._prefix
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        self.is_closed = True


class PullRig:
    """One pull under test."""

    def __init__(self, reader: Reader, served: Served, *, plan: PullPlan = PLAN, timeout_s: float = WAIT_S) -> None:
        self.reader, self.holder = reader, served.holder
        self.keys = PrefixKeys(chain_root(bytes(32)), BLOCK_SIZE, range(NUM_TOKENS))
        self.holder.tag(self.keys, NUM_TOKENS)
        self.manifests = ScriptedStream()
        remote = RemotePrefix(served.url, "lease", self.keys.key_at(NUM_TOKENS), NUM_TOKENS, self.keys, self.manifests)
        self.checked: list[ReadablePrefix] = []
        self.check_error: TransferError | None = None
        self.num_terminal = 0
        self.pull = PullTask(
            "seq",
            remote,
            plan,
            puller=reader.puller,
            peers=reader.peers,
            timeout_s=timeout_s,
            check=self._check,
            on_terminal=self._count_terminal,
        )
        self.task = asyncio.create_task(self.pull.run())

    async def _check(self, plan: PullPlan, prefix: ReadablePrefix) -> None:
        self.checked.append(prefix)
        if self.check_error is not None:
            raise self.check_error

    def _count_terminal(self) -> None:
        self.num_terminal += 1

    async def result(self) -> FinishedPull:
        return await asyncio.wait_for(self.task, WAIT_S)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                assert not self.task.done(), self.task.result()
                await asyncio.sleep(0.002)

    def has_arrived(self, num_blocks: int) -> bool:
        """Whether the first blocks, and no others, are here."""
        here = [self.reader.memory.read(BLOCKS, 20 + i) == self.holder.memory.read(BLOCKS, 1 + i) for i in range(6)]
        return here == [True] * num_blocks + [False] * (6 - num_blocks)

    def has_read(self, num_blocks: int) -> bool:
        """Whether a part that ends there is done with: it has arrived, and the next one is asked for."""
        return self.has_arrived(num_blocks) and self.manifests.asked_after[-1:] == [num_blocks * BLOCK_SIZE]

    def has_state(self) -> bool:
        return self.reader.memory.read(SLOTS, 3) == self.holder.memory.read(SLOTS, 1)


StartPull = Callable[..., PullRig]


@pytest_asyncio.fixture
async def start_pull(reader: Reader, served: Served) -> AsyncIterator[StartPull]:
    rigs: list[PullRig] = []

    def start(**options: Any) -> PullRig:
        rigs.append(PullRig(reader, served, **options))
        return rigs[-1]

    yield start
    for each in rigs:
        each.task.cancel()


def thaw(holder: PeerHolder) -> None:
    holder.hub.thaw(holder.backend.name)


async def test_parts_when_they_come_one_by_one_then_each_is_read_before_the_next_is_known(
    start_pull: StartPull,
) -> None:
    it = start_pull()
    it.manifests.give(it.holder.prefix(8))
    await it.until(lambda: it.has_read(2))
    it.manifests.give(it.holder.prefix(16))
    await it.until(lambda: it.has_read(4))
    assert not it.has_state()
    it.manifests.give(it.holder.prefix(NUM_TOKENS, is_final=True, known_s=12.5))
    result = await it.result()
    assert result.ok
    assert it.has_arrived(6)
    assert it.has_state()
    sizes = it.holder.memory.regions
    assert result.num_bytes == 6 * sizes[BLOCKS].unit_bytes + sizes[SLOTS].unit_bytes
    assert (result.num_blocks, result.num_states, result.num_early_parts) == (6, 1, 2)
    assert (result.output_row, result.final_s, result.reason) == ("row", 12.5, "")
    assert it.manifests.asked_after == [0, 8, 16]
    assert [prefix.is_final for prefix in it.checked] == [True]


async def test_blocks_that_are_here_already_when_pulled_are_not_read(start_pull: StartPull) -> None:
    it = start_pull(plan=PullPlan(NUM_TOKENS, (((3, 23), (5, 25)),), slot_id=0, num_local_tokens=4 * BLOCK_SIZE))
    it.manifests.give(it.holder.prefix(NUM_TOKENS, is_final=True))
    result = await it.result()
    assert (result.num_blocks, result.num_states) == (2, 0)
    assert result.num_bytes == 2 * it.holder.memory.regions[BLOCKS].unit_bytes
    assert not it.has_state()


async def test_empty_plan_when_started_then_waits_for_the_end_and_its_row_and_reads_nothing(
    start_pull: StartPull,
) -> None:
    it = start_pull(plan=PullPlan(NUM_TOKENS, ((),), slot_id=0, num_local_tokens=NUM_TOKENS))
    it.manifests.give(it.holder.prefix(20))
    await it.until(lambda: it.manifests.asked_after)
    it.manifests.give(it.holder.prefix(NUM_TOKENS, is_final=True))
    result = await it.result()
    assert (result.ok, result.num_bytes, result.num_descriptors, result.output_row) == (True, 0, 0, "row")


async def test_manifest_when_its_holder_does_not_confirm_it_then_nothing_that_was_read_counts(
    start_pull: StartPull,
) -> None:
    it = start_pull()
    confirmation = it.manifests.confirmation = asyncio.get_running_loop().create_future()
    it.manifests.give(it.holder.prefix(NUM_TOKENS, is_final=True))
    await it.until(lambda: it.has_arrived(6))
    assert not it.task.done()
    confirmation.set_exception(TransferError("not mine", code="unproven_manifest"))
    result = await it.result()
    assert (result.ok, result.terminal, result.reason) == (False, True, "unproven_manifest")
    assert (result.output_row, result.num_bytes) == (None, 0)


async def test_manifest_when_nobody_confirms_it_then_cancel_and_the_timeout_end_the_wait(start_pull: StartPull) -> None:
    for timeout_s, reason in ((WAIT_S, PullReason.CANCELLED), (0.05, PullReason.DEADLINE)):
        it = start_pull(timeout_s=timeout_s, plan=PullPlan(NUM_TOKENS, ((),), slot_id=0, num_local_tokens=NUM_TOKENS))
        it.manifests.confirmation = asyncio.get_running_loop().create_future()
        it.manifests.give(it.holder.prefix(NUM_TOKENS, is_final=True))
        await it.until(lambda it=it: it.checked)  # type: ignore[misc]
        if reason == PullReason.CANCELLED:
            it.pull.cancel()
        assert (await it.result()).reason == reason


async def test_part_when_its_memory_was_reused_then_all_is_stale(start_pull: StartPull) -> None:
    it = start_pull()
    it.manifests.give(it.holder.prefix(8))
    await it.until(lambda: it.has_read(2))
    it.holder.memory.set_generation("block_generations", 4, 4711)
    it.manifests.give(it.holder.prefix(NUM_TOKENS, is_final=True))
    result = await it.result()
    assert (result.ok, result.terminal, result.reason) == (False, True, PullReason.STALE_GENERATION)
    assert result.num_bytes == 0


async def test_part_when_its_blocks_hold_another_prompt_then_is_wrong_content(start_pull: StartPull) -> None:
    it = start_pull()
    prefix = it.holder.prefix(NUM_TOKENS, is_final=True)
    swapped = prefix.block_ids[0][1::-1] + prefix.block_ids[0][2:]
    values = tuple(1000 + each for each in swapped)
    it.manifests.give(
        ReadablePrefix(**{name: getattr(prefix, name) for name in prefix.__slots__}
              | {"block_ids": (swapped,), "block_generations": (values,)})
    )  # fmt: skip
    result = await it.result()
    assert (result.ok, result.reason) == (False, PullReason.WRONG_CONTENT)


@pytest.mark.parametrize("num_early", [0, 2])
async def test_manifests_when_they_fail_then_the_pull_fails_with_their_reason(
    start_pull: StartPull, num_early: int
) -> None:
    it = start_pull()
    if num_early:
        it.manifests.give(it.holder.prefix(num_early * BLOCK_SIZE))
        await it.until(lambda: it.has_read(num_early))
    it.manifests.fail(TransferError("the leg failed", code="leg_failed"))
    result = await it.result()
    assert (result.ok, result.terminal, result.reason) == (False, True, "leg_failed")
    assert it.checked == []


@pytest.mark.parametrize(("is_cancelled", "reason"), [(True, "cancelled"), (False, "leg_aborted")])
async def test_leg_when_its_caller_leaves_then_our_own_end_is_waited_for_a_moment(
    start_pull: StartPull, is_cancelled: bool, reason: str
) -> None:
    """A client that leaves ends both legs: what the prefill node says of it first is no failed transfer."""
    it = start_pull()
    it.manifests.fail(PrefillLegAbortedError("its caller went away"))
    await asyncio.sleep(0.05)
    assert not it.task.done()
    if is_cancelled:
        it.pull.cancel()
    result = await it.result()
    assert (result.ok, result.terminal, result.reason) == (False, True, reason)


async def test_manifests_when_none_comes_behind_the_first_then_deadline(start_pull: StartPull) -> None:
    it = start_pull(timeout_s=0.05)
    await asyncio.sleep(0.2)
    it.manifests.give(it.holder.prefix(0))
    await asyncio.sleep(0.2)
    assert not it.task.done()  # the first chunk may take longer, as long as its holder and its leg are there
    it.manifests.give(it.holder.prefix(4))
    result = await it.result()
    assert (result.ok, result.terminal, result.reason) == (False, True, PullReason.DEADLINE)


async def test_timeout_when_parts_keep_coming_then_counts_from_the_last_one(start_pull: StartPull) -> None:
    it = start_pull(timeout_s=PARTS_TIMEOUT_S)
    for num_tokens in (4, 8, 12, 16):
        await asyncio.sleep(PAUSE_S)
        it.manifests.give(it.holder.prefix(num_tokens))
    await asyncio.sleep(PAUSE_S)
    it.manifests.give(it.holder.prefix(NUM_TOKENS, is_final=True))
    assert (await it.result()).ok


@pytest.mark.parametrize("is_only_state", [False, True])
async def test_timeout_when_the_holder_computes_what_is_here_already_then_counts_from_its_last_progress(
    start_pull: StartPull, is_only_state: bool
) -> None:
    """Its blocks outlived its state here: nothing is to be read for long, and the holder is at work all the time."""
    pairs = () if is_only_state else ((5, 25),)
    it = start_pull(
        plan=PullPlan(NUM_TOKENS, (pairs,), slot_id=3, num_local_tokens=5 * BLOCK_SIZE), timeout_s=PARTS_TIMEOUT_S
    )
    for num_tokens in (4, 8, 12, 16):
        await asyncio.sleep(PAUSE_S)
        it.manifests.give(it.holder.prefix(num_tokens))
    await asyncio.sleep(PAUSE_S)
    it.manifests.give(it.holder.prefix(NUM_TOKENS, is_final=True))
    result = await it.result()
    assert (result.ok, result.num_blocks, result.num_states) == (True, len(pairs), 1)
    assert it.has_state()


async def test_prefix_when_given_up_before_its_pull_then_its_holder_is_told_from_the_event_loop(
    reader: Reader,
) -> None:
    nobody: Any = None
    bridge = EngineBridge(nobody, {})
    bridge.open()
    keys, stream = PrefixKeys(chain_root(bytes(32)), BLOCK_SIZE, range(4)), ScriptedStream()
    remote = RemotePrefix("http://127.0.0.1:1", "lease", keys.key_at(4), 4, keys, stream)
    await asyncio.to_thread(bridge.give_up, remote)  # as the engine's thread does
    await asyncio.sleep(0)
    assert stream.is_closed


class NoReader:
    """PrefixReader of pulls that cannot begin."""

    def begin(self, seq_id: str, prefix: Any, plan: PullPlan, on_terminal: Callable[[], None]) -> Any:
        raise OSError("injected")

    def ended(self, prefix: Any, result: FinishedPull) -> None:
        raise AssertionError("nothing had begun")


class Outcomes:
    """PullListener."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool, bool]] = []

    def on_outcome(self, seq_id: str, prefix: Any, result: FinishedPull) -> None:
        self.seen.append((seq_id, result.ok, result.terminal))

    def on_terminal(self, seq_id: str) -> None:
        raise AssertionError("its outcome was terminal")


async def test_pull_when_it_cannot_begin_then_has_one_failed_outcome_and_its_prefix_is_closed() -> None:
    outcomes = Outcomes()
    bridge = EngineBridge(outcomes, {RemotePrefix: NoReader()})
    bridge.open()
    keys, stream = PrefixKeys(chain_root(bytes(32)), BLOCK_SIZE, range(NUM_TOKENS)), ScriptedStream()
    remote = RemotePrefix("http://127.0.0.1:1", "lease", keys.key_at(NUM_TOKENS), NUM_TOKENS, keys, stream)
    bridge.start("r#0", remote, PLAN)
    bridge.cancel("r#0")
    await asyncio.sleep(0)
    await bridge.close()
    assert outcomes.seen == [("r#0", False, True)]
    assert stream.is_closed


async def test_check_when_it_refuses_what_arrived_then_the_pull_fails(start_pull: StartPull) -> None:
    it = start_pull()
    it.check_error = TransferError("block 2 has another digest", code=PullReason.DIGEST_MISMATCH)
    it.manifests.give(it.holder.prefix(NUM_TOKENS, is_final=True))
    result = await it.result()
    assert (result.ok, result.terminal, result.reason) == (False, True, PullReason.DIGEST_MISMATCH)


async def test_cancel_when_nothing_is_in_flight_then_ends_at_once(start_pull: StartPull) -> None:
    it = start_pull()
    await it.until(lambda: it.manifests.asked_after)
    it.pull.cancel()
    result = await it.result()
    assert (result.ok, result.terminal, result.reason) == (False, True, PullReason.CANCELLED)


async def test_handshake_when_the_transport_is_busy_then_cancel_and_the_timeout_end_the_wait(
    start_pull: StartPull, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = threading.Event()
    monkeypatch.setattr(reader.backend, "add_peer", lambda metadata: busy.wait(WAIT_S))
    try:
        for timeout_s, reason in ((WAIT_S, PullReason.CANCELLED), (0.05, PullReason.DEADLINE)):
            it = start_pull(timeout_s=timeout_s)
            it.manifests.give(it.holder.prefix(8))
            await it.until(lambda it=it: it.holder.num_handshakes or it.task.done())  # type: ignore[misc]
            if reason == PullReason.CANCELLED:
                it.pull.cancel()
            result = await it.result()
            assert (result.ok, result.terminal, result.reason) == (False, True, reason)
    finally:
        busy.set()


async def test_cancel_when_a_part_is_in_flight_then_ends_when_its_destination_is_safe(
    start_pull: StartPull, served: Served
) -> None:
    it = start_pull()
    it.holder.hub.freeze(it.holder.backend.name)
    it.manifests.give(it.holder.prefix(8))
    await it.until(lambda: it.reader.puller.num_active)
    await asyncio.sleep(0.05)  # posted by now
    it.pull.cancel()
    await asyncio.sleep(0.1)
    assert not it.task.done()
    thaw(it.holder)
    result = await it.result()
    assert (result.ok, result.terminal, result.reason) == (False, True, PullReason.CANCELLED)


async def test_peer_when_lost_between_parts_then_ends_at_once_and_nothing_is_in_quarantine(
    start_pull: StartPull,
) -> None:
    it = start_pull()
    it.manifests.give(it.holder.prefix(8))
    await it.until(lambda: it.has_read(2))
    it.holder.is_over = True  # its liveness stream ends
    result = await it.result()
    assert (result.ok, result.terminal, result.reason) == (False, True, PullReason.PEER_LOST)


async def test_peer_when_lost_during_a_part_then_its_destination_is_given_back_only_when_it_is_safe(
    start_pull: StartPull,
) -> None:
    it = start_pull()
    it.holder.hub.freeze(it.holder.backend.name)
    it.manifests.give(it.holder.prefix(8))
    await it.until(lambda: it.reader.puller.num_active)
    await asyncio.sleep(0.05)  # posted by now
    it.holder.is_over = True
    result = await it.result()
    assert (result.ok, result.terminal, result.reason) == (False, False, PullReason.PEER_LOST)
    await asyncio.sleep(0.1)
    assert it.num_terminal == 0
    thaw(it.holder)
    async with asyncio.timeout(WAIT_S):
        while not it.num_terminal:
            await asyncio.sleep(0.005)
    assert it.num_terminal == 1


async def test_part_when_it_failed_and_may_still_be_written_then_nothing_else_is_read_into_its_memory(
    start_pull: StartPull, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first read brings later would not be noticed in what a second one had proved."""
    submitted: list[str] = []

    def submit(job: PullJob, on_done: DoneCallback, on_terminal: TerminalCallback) -> None:
        submitted.append(job.pull_id)
        on_done(PullOutcome(job.pull_id, PullStatus.FAILED, False, 64, 1, 0.1, TransferCode.PEER_DISCONNECTED))

    monkeypatch.setattr(reader.puller, "submit", submit)
    it = start_pull()
    it.manifests.give(it.holder.prefix(8))
    result = await it.result()
    assert (result.ok, result.terminal, result.reason) == (False, False, TransferCode.PEER_DISCONNECTED)
    assert submitted == ["seq/part-1"]


async def test_pull_when_it_breaks_down_with_a_part_in_flight_then_its_destination_is_kept(
    start_pull: StartPull, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[str] = []
    monkeypatch.setattr(reader.puller, "submit", lambda job, *_: submitted.append(job.pull_id))
    it = start_pull()
    it.manifests.give(it.holder.prefix(8))
    await it.until(lambda: submitted)
    await asyncio.sleep(0)
    it.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await it.task
    assert it.pull.failed("broken").terminal is False


async def test_part_when_the_holder_made_its_agent_anew_then_is_read_after_a_new_handshake(
    start_pull: StartPull,
) -> None:
    it = start_pull()
    it.manifests.give(it.holder.prefix(8))
    await it.until(lambda: it.has_read(2))
    it.holder.backend.recreate()
    it.manifests.give(it.holder.prefix(NUM_TOKENS, is_final=True))
    result = await it.result()
    assert result.ok, result
    assert it.has_arrived(6)
    assert it.holder.num_handshakes == 2


async def test_part_when_the_holder_is_gone_then_one_handshake_is_tried_and_fails(
    start_pull: StartPull, served: Served
) -> None:
    it = start_pull()
    it.manifests.give(it.holder.prefix(8))
    await it.until(lambda: it.has_read(2))
    it.holder.backend.close()
    it.manifests.give(it.holder.prefix(NUM_TOKENS, is_final=True))
    result = await it.result()
    assert not result.ok
    assert result.terminal
    assert result.reason in (TransferCode.CLOSED, TransferCode.TRANSFER_FAILED, "peer_unreachable")


async def test_epoch_when_it_changes_between_parts_then_nothing_of_the_new_life_is_read(start_pull: StartPull) -> None:
    it = start_pull()
    it.manifests.give(it.holder.prefix(8))
    await it.until(lambda: it.has_read(2))
    prefix = it.holder.prefix(NUM_TOKENS, is_final=True)
    it.manifests.give(ReadablePrefix(**{name: getattr(prefix, name) for name in prefix.__slots__} | {"epoch": 78}))
    result = await it.result()
    assert (result.ok, result.terminal, result.reason) == (False, True, "peer_restarted")
    assert it.has_arrived(2)
