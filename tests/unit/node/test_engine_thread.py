"""The bridge between asyncio and the engine thread, on a real engine with a tiny model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from common.config.node import NodeConfig
from common.engine.model_runner import Forward, ModelRunner
from common.engine.plan import StepPlan
from common.errors import (
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    NodeUnavailableError,
    TandemError,
)
from common.node.engine_thread import EngineThread
from common.node.runtime import NodeModel, create_core, load_node_model
from common.request import Request, SamplingParams
from tests.support.models import checkpoint

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def model() -> NodeModel:
    config = NodeConfig(
        model=str(checkpoint("granitemoehybrid")), dtype="float32", device="cpu", kv_cache_memory=32 << 20
    )
    return load_node_model(config)


@pytest_asyncio.fixture
async def engine(model: NodeModel) -> AsyncIterator[EngineThread]:
    config = NodeConfig(model="-", max_num_seqs=8)
    thread = EngineThread(create_core(config, model))
    thread.start()
    yield thread
    await asyncio.to_thread(thread.close)
    assert not thread.is_alive


def request(name: str, num_tokens: int = 20, **fields: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return Request(name, list(range(20, 60)), params, **fields)


async def token_ids(engine: EngineThread, each: Request) -> list[int]:
    return [token for output in [o async for o in engine.generate(each)] for token in output.token_ids]


async def wait_idle(engine: EngineThread, model: NodeModel) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await engine.call(model.manager.stats)).num_sequences:
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_thread_when_it_starts_then_enters_the_device_before_the_first_step(model: NodeModel) -> None:
    order: list[tuple[str, str]] = []
    core = create_core(NodeConfig(model="-"), model)
    step = core.step

    def note(what: str) -> None:
        order.append((what, threading.current_thread().name))

    core.step = lambda: (note("step"), step())[1]  # type: ignore[method-assign]
    thread = EngineThread(core, lambda: note("enter"))
    thread.start()
    await token_ids(thread, request("entered", num_tokens=2))
    await asyncio.to_thread(thread.close)
    assert order[:2] == [("enter", "engine"), ("step", "engine")]
    assert [what for what, _ in order].count("enter") == 1


@pytest.mark.asyncio
async def test_call_when_cancelled_just_as_its_result_arrives_then_the_cancellation_is_not_lost(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose client left in that moment would run to its end."""
    monkeypatch.setattr(engine, "post", lambda command: command())  # the result is on its way from the first moment
    num_cancelled = 0
    for num_turns in range(10):
        call = asyncio.create_task(engine.call(lambda: "result"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if call.cancel():
            num_cancelled += 1
            await asyncio.gather(call, return_exceptions=True)
            assert call.cancelled(), f"lost after {num_turns} turns of the loop"
    assert 2 <= num_cancelled < 10


@pytest.mark.asyncio
async def test_call_when_the_engine_is_in_a_long_step_then_a_deadline_is_exceeded_and_nothing_is_run(
    engine: EngineThread,
) -> None:
    goes_on, ran = threading.Event(), []  # type: tuple[threading.Event, list[str]]
    engine.post(lambda: goes_on.wait(DEADLINE_S))
    with pytest.raises(DeadlineExceededError) as caught:
        await engine.call(lambda: ran.append("late"), timeout_s=0.05)
    goes_on.set()
    assert (caught.value.status, caught.value.code) == (504, "deadline_exceeded")
    await engine.call(lambda: ran.append("now"), timeout_s=DEADLINE_S)
    assert ran == ["now"]


@pytest.mark.asyncio
async def test_generate_when_several_run_at_once_gives_each_its_own_tokens(
    engine: EngineThread, model: NodeModel
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        alone = await token_ids(engine, request("alone"))
        together = await asyncio.gather(*(token_ids(engine, request(f"r{i}")) for i in range(6)))
    assert len(alone) == 20
    assert together == [alone] * 6
    await wait_idle(engine, model)


@pytest.mark.asyncio
async def test_leg_when_it_begins_then_its_reader_hears_before_the_step_is_computed(
    engine: EngineThread, model: NodeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, launch = threading.Event(), ModelRunner.launch

    def wait_for_the_reader(self: ModelRunner, plan: StepPlan) -> Forward:
        assert heard.wait(DEADLINE_S), "the reader hears too late"
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", wait_for_the_reader)
    leg = Request("leg", list(range(60, 100)), None, wants_progress=True)
    outputs = []
    async with asyncio.timeout(2 * DEADLINE_S):
        async for output in engine.generate(leg):
            outputs.append(output)
            heard.set()
    assert outputs[0].progress is not None
    assert outputs[0].progress.num_tokens == 0
    assert outputs[-1].handoff is not None
    await engine.call(lambda: model.manager.release_lease("leg"))
    await wait_idle(engine, model)


@pytest.mark.asyncio
async def test_generate_when_its_reader_leaves_aborts_the_request(engine: EngineThread, model: NodeModel) -> None:
    outputs = engine.generate(request("r", num_tokens=4000))
    async with asyncio.timeout(DEADLINE_S):
        await anext(outputs)
        assert (await engine.call(model.manager.stats)).num_sequences == 1
        await outputs.aclose()  # type: ignore[attr-defined]
    await wait_idle(engine, model)
    assert model.manager.check() == []


@pytest.mark.asyncio
async def test_finish_when_a_reader_has_enough_ends_the_continuation_and_keeps_its_state(
    engine: EngineThread, model: NodeModel
) -> None:
    reasons = []
    async with asyncio.timeout(DEADLINE_S):
        async for output in engine.generate(request("r", num_tokens=4000)):
            reasons.append(output.finish_reason)
            engine.finish("r", 0)
    assert [reason.value for reason in reasons if reason is not None] == ["stop"]
    await wait_idle(engine, model)
    assert model.manager.stats().checkpoints_saved["donated"] >= 1


@pytest.mark.asyncio
async def test_command_when_it_raises_reports_to_its_caller_and_the_engine_goes_on(engine: EngineThread) -> None:
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda: 1 / 0)
        engine.post(lambda: 1 / 0)
        assert len(await token_ids(engine, request("after"))) == 20


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [InvalidRequestError("request id r is in use"), RuntimeError("broken")])
async def test_request_when_it_cannot_be_added_then_its_caller_is_told(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(each: Request) -> None:
        raise error

    async with asyncio.timeout(DEADLINE_S):
        with monkeypatch.context() as patched:
            patched.setattr(engine._core, "add_request", refuse)
            with pytest.raises(TandemError) as raised:
                await token_ids(engine, request("r"))
        assert (raised.value is error) == isinstance(error, TandemError)
        assert len(await token_ids(engine, request("r"))) == 20


@pytest.mark.asyncio
async def test_forward_when_it_raises_fails_the_running_requests_only(engine: EngineThread, model: NodeModel) -> None:
    forward = model.runner.launch

    def fail_once(plan: StepPlan) -> Forward:
        if plan.segments:
            model.runner.launch = forward  # type: ignore[method-assign]
            raise RuntimeError("broken forward")
        return forward(plan)

    model.runner.launch = fail_once  # type: ignore[method-assign]
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TandemError):
            await token_ids(engine, request("fails"))
        assert len(await token_ids(engine, request("works"))) == 20
    await wait_idle(engine, model)


@pytest.mark.asyncio
@pytest.mark.parametrize("place", ["step", "has_work", "next_deadline_s"])
async def test_thread_when_the_engine_dies_then_all_who_wait_and_all_who_come_are_told(
    model: NodeModel, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    core = create_core(NodeConfig(model="-"), model)
    thread = EngineThread(core)
    thread.start()
    is_dying, is_dead = threading.Event(), threading.Event()

    def die() -> None:
        is_dying.set()
        is_dead.wait(DEADLINE_S)  # until there are callers whose commands will never run
        raise EngineDeadError("the device is gone")

    waiting: list[asyncio.Task[Any]] = [asyncio.create_task(token_ids(thread, request("r", num_tokens=100_000)))]
    async with asyncio.timeout(DEADLINE_S):
        while not (await thread.call(model.manager.stats)).num_sequences:
            await asyncio.sleep(0.01)
        if place == "next_deadline_s":  # asked for when there is nothing to do
            await thread.call(lambda: core.abort("r"))
        monkeypatch.setattr(core, place, die)
        await asyncio.to_thread(is_dying.wait, DEADLINE_S)
        waiting.append(asyncio.create_task(thread.call(model.manager.stats)))
        await asyncio.sleep(0)
        is_dead.set()
        for each in waiting:
            with pytest.raises(NodeUnavailableError):
                await each
        for late in (token_ids(thread, request("late")), thread.call(model.manager.stats)):
            with pytest.raises(NodeUnavailableError):
                await late
    assert thread.death == "the device is gone"
    await asyncio.to_thread(thread.close)
    if place != "next_deadline_s":
        model.manager.free("r#0", donate=False)


@pytest.mark.asyncio
async def test_thread_when_the_engine_hangs_and_is_given_up_then_all_are_told_although_it_runs(
    model: NodeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = create_core(NodeConfig(model="-"), model)
    thread = EngineThread(core)
    goes_on = threading.Event()
    step = core.step

    def hang() -> Any:
        goes_on.wait(DEADLINE_S)
        return step()

    monkeypatch.setattr(core, "step", hang)
    thread.start()
    async with asyncio.timeout(DEADLINE_S):
        waiting = asyncio.create_task(thread.call(model.manager.stats))
        await asyncio.sleep(0)
        thread.give_up("it hangs")
        for each in (waiting, token_ids(thread, request("late"))):
            with pytest.raises(NodeUnavailableError):
                await each
    assert thread.is_alive
    assert thread.death == "it hangs"
    goes_on.set()
    await asyncio.to_thread(thread.close)


@pytest.mark.asyncio
async def test_close_when_a_request_waits_fails_it(model: NodeModel) -> None:
    thread = EngineThread(create_core(NodeConfig(model="-"), model))
    thread.start()
    reader = asyncio.create_task(token_ids(thread, request("r", num_tokens=100_000)))
    async with asyncio.timeout(DEADLINE_S):
        while not (await thread.call(model.manager.stats)).num_sequences:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(thread.close)
        with pytest.raises(NodeUnavailableError):
            await reader
        with pytest.raises(NodeUnavailableError):
            await token_ids(thread, request("late"))
    model.manager.free("r#0", donate=False)
