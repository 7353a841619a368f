"""A fault belongs to its request: whatever raises on its behalf, it fails, and those beside it are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from common.engine.containment import MAX_FAILED_FORWARDS
from common.engine.core import EngineCore
from common.engine.model_runner import Forward
from common.engine.plan import Segment, StepPlan
from common.engine.sampling.sampler import SampleTask
from common.engine.speculation import Speculation
from common.errors import (
    DeadlineExceededError,
    EngineDeadError,
    GrammarError,
    StepMemoryError,
    TandemError,
    TransferError,
)
from common.node.runtime import NodeModel
from common.request import Request
from tests.engine.cores import collect, engine, prompt_of, request, run, tokens, used
from tests.support.models import tiered

BAD = tokens(77, 60)
BAD_ID = "bad"


class InjectedError(Exception):
    pass


Injected = AbstractContextManager[object]


def in_manager(place: str, after: int = 0) -> Callable[[EngineCore, NodeModel], Injected]:
    """``place`` of the cache manager raises for the bad request, from its call number ``after`` on."""

    def inject(core: EngineCore, model: NodeModel) -> Injected:
        kept, calls = getattr(model.manager, place), [0]
        bad_key = model.manager.prefix_keys(BAD).key_at(16)

        def faulty(subject: Any, *args: Any, **kwargs: Any) -> Any:
            if place == "lookup":
                is_bad = subject.num_tokens >= len(BAD) and subject.key_at(16) == bad_key
            else:
                is_bad = subject == f"{BAD_ID}#0"
            calls[0] += is_bad
            if is_bad and calls[0] > after:
                raise InjectedError(place)
            return kept(subject, *args, **kwargs)

        return patch.object(model.manager, place, faulty)

    return inject


def names_bad(plan: StepPlan) -> bool:
    return any(segment.request_id == f"{BAD_ID}#0" for segment in plan.segments)


def in_launch(core: EngineCore, model: NodeModel) -> Injected:
    kept = model.runner.launch

    def faulty(plan: StepPlan) -> Forward:
        forward = kept(plan)  # states are advanced in place by then
        if names_bad(plan):
            raise InjectedError("launch")
        return forward

    return patch.object(model.runner, "launch", faulty)


def in_wait(core: EngineCore, model: NodeModel) -> Injected:
    kept = model.runner.launch

    class Event:
        def synchronize(self) -> None:
            raise InjectedError("wait")

    def faulty(plan: StepPlan) -> Forward:
        forward = kept(plan)
        return replace(forward, event=Event()) if names_bad(plan) else forward

    return patch.object(model.runner, "launch", faulty)


def in_later_launch(core: EngineCore, model: NodeModel) -> Injected:
    """Only once it generates."""
    kept = model.runner.launch

    def faulty(plan: StepPlan) -> Forward:
        forward = kept(plan)
        if any(segment.request_id == f"{BAD_ID}#0" and segment.start > len(BAD) + 3 for segment in plan.segments):
            raise InjectedError("launch")
        return forward

    return patch.object(model.runner, "launch", faulty)


def in_sampler(core: EngineCore, model: NodeModel) -> Injected:
    kept = core._sampler.sample

    def faulty(logits: torch.Tensor, tasks: list[SampleTask]) -> Any:
        if any(list(task.prompt_token_ids) == BAD for task in tasks):
            raise InjectedError("sampling")
        return kept(logits, tasks)

    return patch.object(core._sampler, "sample", faulty)


PLACES: dict[str, Callable[[EngineCore, NodeModel], Injected]] = {
    "lookup": in_manager("lookup"),
    "admit": in_manager("admit"),
    "plan_saves": in_manager("plan_saves"),
    "extend": in_manager("extend"),
    "complete_step": in_manager("complete_step"),
    "complete_step while generating": in_manager("complete_step", after=5),
    "finish_prompt": in_manager("finish_prompt"),
    "launch": in_launch,
    "launch while generating": in_later_launch,
    "wait": in_wait,
    "sampling": in_sampler,
}


@pytest.mark.parametrize("place", tiered(tuple(PLACES), ("complete_step while generating", "launch")))
def test_request_when_something_raises_on_its_behalf_then_fails_alone(place: str, alone: dict[int, list[int]]) -> None:
    core, model = engine(max_num_seqs=8, kv_cache_memory=8 << 20)
    outputs: dict[str, list[int]] = {}
    errors: dict[str, Exception] = {}
    with PLACES[place](core, model):
        for seed in range(12):
            core.add_request(request(f"r{seed}", prompt_of(seed)))
            if seed == 3:
                core.add_request(request(BAD_ID, BAD))
        for step in run(core):
            assert model.manager.check() == []
            for output in step:
                if output.error is not None:
                    errors[output.request_id] = output.error
                outputs.setdefault(output.request_id, []).extend(output.token_ids)
    assert list(errors) == [BAD_ID]
    assert isinstance(errors[BAD_ID], TandemError)
    del outputs[BAD_ID]
    assert outputs == {f"r{seed}": alone[seed] for seed in range(12)}
    assert used(model) == (0, 0, 0, 0)
    core.add_request(request(BAD_ID, BAD))  # its id and its memory are free again
    assert sum(len(output.token_ids) for step in run(core) for output in step) == 12


def test_head_when_it_raises_then_that_step_has_no_drafts_and_answers_are_the_same(alone: dict[int, list[int]]) -> None:
    core, _ = engine(max_num_seqs=8, kv_cache_memory=8 << 20)
    num_calls = 0

    def head(segments: Sequence[Segment], rows: Sequence[Any], limits: Sequence[int]) -> list[list[int]]:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise torch.OutOfMemoryError("injected")
        return [[7] * limit for limit in limits]

    core._scheduler.speculation = speculation = Speculation(
        None, num_tokens=3, max_model_len=256, slot_bytes=0, adapts=False, head=head
    )
    for seed in range(4):
        core.add_request(request(f"r{seed}", prompt_of(seed)))
    assert collect(core) == {(f"r{seed}", 0): alone[seed] for seed in range(4)}
    assert num_calls > 1
    assert speculation.num_draft_tokens > 0


@pytest.mark.parametrize("place", ["launch", "complete_step", "finish_prompt", "lease"])
def test_prompt_when_its_handing_out_raises_then_nothing_is_leased(place: str) -> None:
    core, model = engine(kv_cache_memory=8 << 20)
    with PLACES.get(place, in_manager(place))(core, model):
        core.add_request(Request(BAD_ID, BAD, None))
        outputs = [output for step in run(core) for output in step]
    assert [type(output.error) for output in outputs] == [TandemError]
    assert used(model) == (0, 0, 0, 0)


def test_copies_for_a_reader_when_they_raise_then_its_lease_is_gone() -> None:
    core, model = engine(kv_cache_memory=8 << 20)
    core.add_request(request("first", BAD))
    for _ in run(core):
        pass
    with (
        patch.object(model.manager, "block_copies", lambda: {0: [(1, 2)]}),
        patch.object(model.runner, "launch", side_effect=InjectedError("copy")),
        pytest.raises(InjectedError),
    ):
        core.lease_prefix(model.manager.prefix_keys(BAD), "reader", deeper_than=0)
    assert used(model) == (0, 0, 0, 0)


@pytest.mark.parametrize("family", ["granitemoehybrid", "llama"])
@pytest.mark.parametrize("reader", ["prompt", "query"])
def test_copies_for_a_reader_when_they_raise_then_those_of_others_run_with_the_next_step(
    reader: str, family: str
) -> None:
    """A chat whose prompt ended inside a block goes on in a copy of it, which is still to be made."""
    prompt = tokens(5, 31)
    alone, _ = engine(family, kv_cache_memory=8 << 20, enable_prefix_caching=False)
    alone.add_request(request("chat", prompt))
    expected = collect(alone)["chat", 0]
    core, model = engine(family, kv_cache_memory=8 << 20, max_num_batched_tokens=128)
    core.add_request(request("cached", BAD))
    collect(core)
    kept = model.runner.launch
    refused: list[StepPlan] = []

    def faulty(plan: StepPlan) -> Forward:
        if not plan.segments and not refused:
            refused.append(plan)
            raise InjectedError("copies")
        return kept(plan)

    with patch.object(model.runner, "launch", faulty):
        core.add_request(request("chat", prompt))
        if reader == "prompt":
            core.add_request(Request("reader", tokens(6, 20), None))
        outputs = core.step()
        if reader == "query":
            with pytest.raises(InjectedError):
                core.lease_prefix(model.manager.prefix_keys(BAD), "reader", deeper_than=0)
        assert model.manager.check() == []
        outputs += [output for step in run(core) for output in step]
    assert any(refused[0].block_copies.values())
    assert [output.request_id for output in outputs if output.error is not None] == ["reader"] * (reader == "prompt")
    assert [token for output in outputs if output.request_id == "chat" for token in output.token_ids] == expected
    assert used(model) == (0, 0, 0, 0)


def test_engine_when_every_forward_raises_then_is_dead_and_says_why() -> None:
    core, model = engine(max_num_seqs=2 * MAX_FAILED_FORWARDS)
    for number in range(MAX_FAILED_FORWARDS):
        core.add_request(request(f"r{number}", tokens(number, 20)))
    with (
        patch.object(model.runner, "launch", side_effect=InjectedError("broken device")),
        pytest.raises(EngineDeadError, match=f"{MAX_FAILED_FORWARDS} forwards in a row raised: broken device"),
    ):
        list(run(core))


def test_engine_when_its_device_cannot_go_on_then_is_dead_at_once() -> None:
    core, model = engine()
    core.add_request(request("r", tokens(1, 20)))
    with (
        patch.object(model.runner, "launch", side_effect=InjectedError("one kernel")),
        patch.object(model.runner, "synchronize", side_effect=InjectedError("unspecified launch failure")),
        pytest.raises(EngineDeadError, match="unspecified launch failure"),
    ):
        core.step()


def test_engine_when_a_failed_request_cannot_be_ended_then_is_dead() -> None:
    core, model = engine()
    core.add_request(request(BAD_ID, BAD))
    core.step()
    with (
        in_manager("complete_step")(core, model),
        in_manager("free")(core, model),
        pytest.raises(EngineDeadError, match="could not be ended"),
    ):
        core.step()


@pytest.mark.parametrize(
    ("error", "is_checked"),
    [
        (GrammarError("a conflict"), False),
        (DeadlineExceededError("late"), False),
        (TransferError("an image"), False),
        (StepMemoryError("no slot"), True),
        (InjectedError("sampling"), True),
    ],
    ids=["grammar", "deadline", "transfer", "step memory", "fault"],
)
def test_cache_when_a_request_fails_then_is_checked_unless_it_was_refused(error: Exception, is_checked: bool) -> None:
    core, model = engine()
    core.add_request(request(BAD_ID, BAD))
    with (
        patch.object(core._sampler, "sample", side_effect=error),
        patch.object(model.manager, "check", return_value=[]) as check,
    ):
        outputs = [output for step in run(core) for output in step]
    assert [isinstance(output.error, TandemError) for output in outputs] == [True]
    assert check.called == is_checked
    assert used(model) == (0, 0, 0, 0)


def test_engine_when_a_fault_left_the_cache_inconsistent_then_is_dead() -> None:
    core, model = engine()
    core.add_request(request(BAD_ID, BAD))
    core.step()
    with (
        in_manager("complete_step")(core, model),
        patch.object(model.manager, "check", lambda: ["block 7 is held by nobody"]),
        pytest.raises(EngineDeadError, match="block 7"),
    ):
        core.step()
