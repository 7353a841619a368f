"""Who begins, who waits, who is dropped: admission by itself, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.errors import InvalidRequestError, NodeUnavailableError, RequestDroppedError
from proxy.admission.key_limits import Bucket, Charge, KeyLimits, Limits
from proxy.admission.queue import AdmissionQueue, AdmissionRequest


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(bounded())


def admission_request(priority: int = 0, deadline_s: float | None = None, **more: Any) -> AdmissionRequest:
    now_s = time.monotonic()
    more.setdefault("arrival_s", now_s)
    return AdmissionRequest(priority=priority, deadline_s=None if deadline_s is None else now_s + deadline_s, **more)


@contextlib.asynccontextmanager
async def admitted(admission: AdmissionQueue, wanted: AdmissionRequest) -> AsyncIterator[Charge]:
    with admission.charged(wanted) as charge:
        async with admission.admitted(wanted, charge):
            yield charge


@dataclass
class Line:
    """An admission whose requests work until the test says so. ``began``: names in the order of their turns."""

    admission: AdmissionQueue
    began: list[str] = field(default_factory=list)
    dropped: dict[str, RequestDroppedError] = field(default_factory=dict)
    drops: list[str] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    ends: dict[str, asyncio.Event] = field(default_factory=dict)

    async def send(self, name: str, wanted: AdmissionRequest) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, wanted))
        await settle()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await settle()

    async def _run(self, name: str, wanted: AdmissionRequest) -> None:
        try:
            async with admitted(self.admission, wanted):
                self.began.append(name)
                await self.ends[name].wait()
        except RequestDroppedError as exc:
            self.dropped[name] = exc

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.admission.close()
        assert self.admission.num_running == 0
        assert self.admission.num_waiting == 0


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def line(**settings: Any) -> Line:
    drops: list[str] = []
    values: dict[str, Any] = {"max_running": 1, "max_waiting": 4, "max_wait_s": 10.0, "aging_s": 0.0, **settings}
    return Line(AdmissionQueue(**values, on_drop=drops.append), drops=drops)


@contextlib.asynccontextmanager
async def closing(subject: Line):  # type: ignore[no-untyped-def]
    try:
        yield subject
    finally:
        await subject.close()


def test_turns_when_priorities_differ_then_lowest_first_and_in_order_within() -> None:
    async def work() -> None:
        async with closing(line()) as requests:
            await requests.send("running", admission_request())
            for name, priority in (("a", 0), ("b", 0), ("low", 5), ("urgent", -3)):
                await requests.send(name, admission_request(priority))
            assert requests.admission.num_waiting == 4
            for name in ("running", "urgent", "a", "b", "low"):
                await requests.end(name)
            assert requests.began == ["running", "urgent", "a", "b", "low"]
            assert requests.drops == []

    run(work)


def test_turns_when_somebody_has_waited_long_then_it_is_before_newer_ones_of_better_priority() -> None:
    async def work() -> None:
        async with closing(line(aging_s=10.0)) as requests:
            now_s = time.monotonic()
            await requests.send("running", admission_request())
            await requests.send("old", admission_request(5, arrival_s=now_s - 60))
            await requests.send("new", admission_request(0))
            await requests.send("urgent", admission_request(-5))
            for name in ("running", "urgent", "old"):
                await requests.end(name)
            assert requests.began == ["running", "urgent", "old", "new"]

    run(work)


def test_queue_when_full_then_equal_newcomer_is_rejected_and_a_better_one_evicts_the_last() -> None:
    async def work() -> None:
        async with closing(line(max_waiting=2)) as requests:
            await requests.send("running", admission_request())
            await requests.send("a", admission_request(1))
            await requests.send("b", admission_request(1))
            await requests.send("equal", admission_request(1))
            assert requests.dropped["equal"].dropped == "rejected-queue-full"
            assert "--max-queue-size 2" in requests.dropped["equal"].message
            await requests.send("better", admission_request(0))
            assert requests.dropped["b"].dropped == "evicted-priority"
            assert requests.drops == ["rejected-queue-full", "evicted-priority"]
            for name in ("running", "better", "a"):
                await requests.end(name)
            assert requests.began == ["running", "better", "a"]

    run(work)


def test_prediction_when_a_request_was_dropped_in_its_turn_then_is_of_those_that_were_served() -> None:
    async def work() -> None:
        async with closing(line()) as requests:
            queue = requests.admission
            dropped = RequestDroppedError("it would be late", dropped="rejected-late")
            for seconds, error in ((4.0, None), (0.0, dropped), (6.0, ValueError("a mistake")), (0.0, dropped)):
                asked = admission_request()
                with queue.charged(asked) as charge:
                    await queue.enter(asked, charge)
                    queue.leave(asked, seconds, error)
            assert queue.predicted_wait_s(0) == 5.0
            assert requests.drops == ["rejected-late"] * 2

    run(work)


def test_waiting_when_the_client_leaves_then_its_place_in_the_queue_is_free_at_once() -> None:
    async def work() -> None:
        async with closing(line()) as requests:
            await requests.send("running", admission_request())
            await requests.send("gone", admission_request())
            await requests.send("next", admission_request())
            requests.tasks["gone"].cancel()
            await settle()
            assert requests.admission.num_waiting == 1
            await requests.end("running")
            assert requests.began == ["running", "next"]

    run(work)


def test_turn_when_it_comes_as_the_client_leaves_then_it_goes_to_the_next() -> None:
    async def work() -> None:
        async with closing(line()) as requests:
            await requests.send("running", admission_request())
            await requests.send("leaving", admission_request())
            await requests.send("next", admission_request())
            requests.ends["running"].set()
            while not requests.tasks["running"].done():  # its place is given on; nobody has woken up yet
                await asyncio.sleep(0)
            requests.tasks["leaving"].cancel()
            await settle()
            assert "next" in requests.began

    run(work)


def test_deadline_when_it_passes_in_the_queue_then_evicted_without_having_begun() -> None:
    async def work() -> None:
        async with closing(line()) as requests:
            await requests.send("running", admission_request())
            await requests.send("late", admission_request(deadline_s=0.05))
            await requests.tasks["late"]
            assert requests.dropped["late"].dropped == "evicted-deadline"
            assert requests.began == ["running"]

    run(work)


def test_deadline_when_it_passes_just_before_the_turn_comes_then_evicted_and_the_turn_is_the_next_ones() -> None:
    async def work() -> None:
        async with closing(line()) as requests:
            end = asyncio.Event()

            async def hold_up() -> None:
                async with admitted(requests.admission, admission_request()):
                    await end.wait()
                    time.sleep(0.15)  # noqa: ASYNC251 - the loop stands still: no timer tells that a deadline passed

            running = asyncio.create_task(hold_up())
            await settle()
            await requests.send("late", admission_request(deadline_s=0.1))
            await requests.send("next", admission_request())
            end.set()
            await running
            await settle()
            assert requests.began == ["next"]
            assert requests.dropped["late"].dropped == "evicted-deadline"
            assert "the deadline passed while the request waited for" in requests.dropped["late"].message

    run(work)


def test_deadline_when_the_turn_would_come_after_it_then_rejected_at_once_with_retry_after() -> None:
    async def work() -> None:
        async with closing(line()) as requests:
            await requests.send("slow", admission_request())
            await asyncio.sleep(0.3)
            await requests.end("slow")  # requests take 0.3 s
            await requests.send("running", admission_request())
            for index in range(4):
                await requests.send(f"waiting-{index}", admission_request())
            await requests.send("hopeless", admission_request(-1, deadline_s=0.1))
            assert requests.dropped["hopeless"].dropped == "rejected-deadline"
            assert requests.dropped["hopeless"].retry_after_s >= 2  # five turns of 0.3 s before it
            await requests.send("possible", admission_request(-1, deadline_s=5.0))
            assert "possible" not in requests.dropped

    run(work)


def test_deadline_when_the_queue_before_it_grows_then_shed_before_it_passes() -> None:
    async def work() -> None:
        async with closing(line()) as requests:
            await requests.send("slow", admission_request())
            await asyncio.sleep(0.4)
            await requests.end("slow")  # requests take 0.4 s
            await requests.send("running", admission_request())
            await requests.send("victim", admission_request(5, deadline_s=1.5))
            for index in range(3):
                await requests.send(f"better-{index}", admission_request(0))
            await requests.tasks["victim"]
            assert requests.dropped["victim"].dropped == "evicted-deadline"
            assert "its turn would come in about" in requests.dropped["victim"].message

    run(work)


def test_waiting_when_longer_than_allowed_then_evicted() -> None:
    async def work() -> None:
        async with closing(line(max_wait_s=0.05)) as requests:
            await requests.send("running", admission_request())
            await requests.send("waiting", admission_request())
            await requests.tasks["waiting"]
            assert requests.dropped["waiting"].dropped == "evicted-timeout"
            assert "--max-queue-seconds is 0.05" in requests.dropped["waiting"].message

    run(work)


def test_everybody_when_evicted_then_each_gets_the_error() -> None:
    async def work() -> None:
        admission = AdmissionQueue(max_running=1, max_waiting=4, max_wait_s=10, aging_s=0)
        async with admitted(admission, admission_request()):
            waiting = [asyncio.create_task(admitted(admission, admission_request()).__aenter__()) for _ in range(3)]
            await settle()
            admission.evict_all(NodeUnavailableError("the end"))
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert [str(each) for each in results] == ["the end"] * 3

    run(work)


def test_key_when_at_its_concurrency_then_rejected_and_others_are_not() -> None:
    async def work() -> None:
        limits = KeyLimits(Limits(max_concurrency=1), {"b": Limits(max_concurrency=2)})
        async with closing(line(max_running=8, limits=limits)) as requests:
            for name, key in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b"), ("b3", "b")):
                await requests.send(name, admission_request(key=key))
            assert requests.began == ["a1", "b1", "b2"]
            assert {error.dropped for error in requests.dropped.values()} == {"rejected-concurrency"}
            await requests.end("a1")
            await requests.send("a3", admission_request(key="a"))
            assert requests.began[-1] == "a3"

    run(work)


def test_key_when_its_requests_a_minute_are_used_then_told_when_there_is_one() -> None:
    limits = KeyLimits(Limits(requests_per_minute=2))
    for _ in range(2):
        with limits.hold(admission_request(key="key")):
            pass
    with pytest.raises(RequestDroppedError, match="requests_per_minute of 2") as caught:
        limits.hold(admission_request(key="key"))
    assert caught.value.dropped == "rejected-rate-limit"
    assert caught.value.retry_after_s == 30
    with limits.hold(admission_request(key="other key")):
        pass


def test_key_when_its_tokens_a_minute_are_used_then_rejected_and_too_large_ones_are_the_clients_fault() -> None:
    limits = KeyLimits(Limits(tokens_per_minute=100))
    some = admission_request(key="key", num_prompt_tokens=10, num_answer_tokens=50)
    with limits.hold(some):
        pass
    with pytest.raises(RequestDroppedError) as caught, limits.hold(some):
        pass
    assert 11 <= caught.value.retry_after_s <= 12  # 20 tokens at 100 a minute
    many = admission_request(key="key", num_prompt_tokens=10, num_answer_tokens=91)
    with pytest.raises(InvalidRequestError, match="may use 101 tokens"), limits.hold(many):
        pass


def test_key_when_a_request_has_used_less_or_more_than_its_charge_then_the_difference_is_settled() -> None:
    limits = KeyLimits(Limits(tokens_per_minute=100))
    most = admission_request(key="key", num_prompt_tokens=10, num_answer_tokens=90)
    with limits.hold(most) as charge:
        charge.settle(30)
    with limits.hold(admission_request(key="key", num_prompt_tokens=70)) as charge:
        charge.settle(100)
        charge.settle(0)  # once only
    with pytest.raises(RequestDroppedError) as caught, limits.hold(admission_request(key="key", num_prompt_tokens=1)):
        pass
    assert 18 <= caught.value.retry_after_s <= 19  # a debt of 30, and 1, at 100 a minute


def test_key_when_a_request_may_fill_the_context_then_charged_a_minute_at_most_and_its_prompt_must_fit() -> None:
    limits = KeyLimits(Limits(tokens_per_minute=100))

    def open_ended(num_prompt_tokens: int) -> AdmissionRequest:
        return admission_request(
            key="key", num_prompt_tokens=num_prompt_tokens, num_answer_tokens=4000, is_open_ended=True
        )

    with limits.hold(open_ended(20)) as charge:
        with pytest.raises(RequestDroppedError), limits.hold(admission_request(key="key", num_prompt_tokens=1)):
            pass
        charge.settle(25)
    with limits.hold(admission_request(key="key", num_prompt_tokens=75)):
        pass
    with pytest.raises(InvalidRequestError, match="tokens_per_minute of this API key are 100"):
        limits.hold(open_ended(101)).__enter__()


def test_key_when_a_request_is_for_several_answers_then_each_counts() -> None:
    limits = KeyLimits(Limits(max_concurrency=4), {"b": Limits(requests_per_minute=4)})
    with limits.hold(admission_request(key="a", num_answers=3)):
        with pytest.raises(RequestDroppedError, match="3 answers of this API key are in flight, this request is for 2"):
            limits.hold(admission_request(key="a", num_answers=2)).__enter__()
        with limits.hold(admission_request(key="a")):
            pass
    with limits.hold(admission_request(key="b", num_answers=3)):
        pass
    with pytest.raises(RequestDroppedError, match="requests_per_minute of 4"):
        limits.hold(admission_request(key="b", num_answers=2)).__enter__()
    for key, name in (("a", "max_concurrency"), ("b", "requests_per_minute")):
        with pytest.raises(InvalidRequestError, match=f"for 5 answers .*the {name} of this API key is 4") as caught:
            limits.hold(admission_request(key=key, num_answers=5)).__enter__()
        assert (caught.value.param, caught.value.code) == ("n", "over_request_limit")


def test_key_when_it_asks_for_a_priority_then_none_better_than_the_operator_allows() -> None:
    limits = KeyLimits(Limits(), {"vip": Limits(best_priority=-5)})
    for key, priority in ((None, -(2**31)), ("a", 0), ("a", 9), ("vip", -5)):
        with limits.hold(admission_request(priority, key=key)):
            pass
    for key, priority, best in (("a", -1, 0), ("vip", -6, -5)):
        with pytest.raises(InvalidRequestError, match=f"at least {best} .* got {priority}") as caught:
            limits.hold(admission_request(priority, key=key)).__enter__()
        assert (caught.value.param, caught.value.code) == ("priority", "priority_not_allowed")
    with pytest.raises(InvalidRequestError, match="at least 3"):
        KeyLimits(Limits(best_priority=3)).hold(admission_request(2)).__enter__()


def test_queue_when_a_tenant_asks_for_a_better_priority_then_nobody_elses_request_is_evicted() -> None:
    async def work() -> None:
        async with closing(line(max_waiting=1)) as requests:
            await requests.send("running", admission_request(key="a"))
            await requests.send("waiting", admission_request(key="a"))
            with pytest.raises(InvalidRequestError):
                requests.admission.charged(admission_request(-1, key="b"))
            assert requests.dropped == {}
            await requests.end("running")
            assert requests.began == ["running", "waiting"]

    run(work)


def test_places_when_requests_are_for_several_answers_then_each_takes_one_and_nobody_overtakes_the_first() -> None:
    async def work() -> None:
        async with closing(line(max_running=4)) as requests:
            await requests.send("three", admission_request(num_answers=3))
            await requests.send("two", admission_request(num_answers=2))
            await requests.send("one", admission_request())
            assert (requests.began, requests.admission.num_running) == (["three"], 1)
            await requests.send("urgent", admission_request(-1))
            assert requests.began == ["three", "urgent"]
            await requests.end("three")
            assert requests.began == ["three", "urgent", "two", "one"]
            await requests.send("thousand", admission_request(num_answers=1000))
            for name in ("urgent", "two"):
                await requests.end(name)
            assert "thousand" not in requests.began
            await requests.end("one")
            assert requests.began[-1] == "thousand"
            await requests.send("next", admission_request())
            assert requests.began[-1] == "thousand"

    run(work)


def test_places_when_the_first_of_the_queue_leaves_then_the_next_may_have_room() -> None:
    async def work() -> None:
        async with closing(line(max_running=2)) as requests:
            await requests.send("one", admission_request())
            await requests.send("two", admission_request(num_answers=2))
            await requests.send("another", admission_request())
            assert requests.began == ["one"]
            requests.tasks["two"].cancel()
            await settle()
            assert requests.began == ["one", "another"]

    run(work)


def test_key_when_its_request_is_dropped_from_the_queue_then_it_was_charged_nothing() -> None:
    async def work() -> None:
        limits = KeyLimits(Limits(requests_per_minute=2))
        async with closing(line(max_waiting=0, limits=limits)) as requests:
            await requests.send("running", admission_request())
            for index in range(3):
                await requests.send(f"full-{index}", admission_request())
            assert {error.dropped for error in requests.dropped.values()} == {"rejected-queue-full"}

    run(work)


def test_key_when_something_was_spent_on_a_request_that_came_to_nothing_then_it_stays_one_of_its_minute() -> None:
    limits = KeyLimits(Limits(max_concurrency=1, requests_per_minute=2, tokens_per_minute=100))
    wanted = admission_request(key="key", num_prompt_tokens=60)
    for _ in range(2):  # neither its tokens nor its place are kept
        with limits.hold(wanted) as charge:
            charge.begin()
            charge.give_back()
    with pytest.raises(RequestDroppedError, match="requests_per_minute of 2"):
        limits.hold(wanted)


def test_bucket_when_time_passes_then_it_refills_to_its_size_only() -> None:
    bucket = Bucket(60, 0.0)
    assert bucket.wait_s(60, 0.0) == 0
    bucket.take(60)
    assert bucket.wait_s(5, 1.0) == 4.0
    assert bucket.wait_s(60, 1000.0) == 0
    assert bucket.wait_s(61, 1000.0) == 1.0
