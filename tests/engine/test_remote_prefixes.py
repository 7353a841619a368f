"""Remote prefixes as one engine sees them, on a real tiny model: pulls that fail, end late or are aborted. Nothing is
read: the test answers for the source."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest

from common.engine.core import EngineCore
from common.engine.scheduling.schedule import Schedule
from common.errors import InvalidRequestError, TandemError, TransferError
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.prefix.hits import PrefixHit
from common.node.pull.engine_bridge import FinishedPull
from common.node.runtime import NodeModel
from common.request import FinishReason, Request
from tests.engine.cores import collect, engine, prompt_of, request, run, used


@dataclass
class _Remote:
    num_tokens: int
    prefix_key: bytes


class _TierPrefix:
    num_tokens = 32
    is_being_read = False

    def begin(self) -> None:
        self.is_being_read = True


class _Tiers:
    """Has 32 tokens of every prompt while it is not ``empty``."""

    is_empty = False

    def find(self, keys: PrefixKeys, num_tokens: int, hit: PrefixHit) -> _TierPrefix | None:
        return None if self.is_empty or hit.num_tokens >= 32 else _TierPrefix()


class _Source:
    """Notes what the engine asks; the test answers."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.cancelled: list[str] = []

    def start(self, seq_id: str, remote: Any, plan: Any) -> None:
        self.started.append(seq_id)

    def cancel(self, seq_id: str) -> None:
        self.cancelled.append(seq_id)

    def give_up(self, remote: Any) -> None:
        raise AssertionError("no test here waits for that long")


def remote_request(core: EngineCore, model: NodeModel, prompt: list[int]) -> tuple[Request, _Source]:
    source = _Source()
    core.pull_with(source)
    key = model.manager.prefix_keys(prompt).key_at(len(prompt))
    return request("r", prompt, remote=_Remote(len(prompt), key)), source


FAILED = FinishedPull(ok=False, terminal=True, reason="stale_generation", num_bytes=0, num_blocks=0, num_states=0)
GOOD = FinishedPull(ok=True, terminal=True)
LATE = FinishedPull(ok=False, terminal=False, reason="deadline", num_bytes=0, num_blocks=0, num_states=0)


def test_failed_pull_when_policy_is_recompute_gives_the_right_output(alone: dict[int, list[int]]) -> None:
    core, model = engine()
    remote, source = remote_request(core, model, prompt_of(5))
    core.add_request(remote)
    core.step()
    assert source.started == ["r#0"]
    core.finish_pull("r#0", FAILED)
    assert collect(core)["r", 0] == alone[5]
    assert used(model) == (0, 0, 0, 0)


def test_failed_pull_when_policy_is_fail_gives_a_typed_error() -> None:
    core, model = engine(kv_load_failure_policy="fail")
    remote, _ = remote_request(core, model, prompt_of(5))
    core.add_request(remote)
    core.step()
    core.finish_pull("r#0", FAILED)
    outputs = core.step()
    assert [type(output.error) for output in outputs] == [TransferError]
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert used(model) == (0, 0, 0, 0)


def test_late_pull_when_not_terminal_keeps_its_destination_in_quarantine(alone: dict[int, list[int]]) -> None:
    core, model = engine()
    remote, _ = remote_request(core, model, prompt_of(5))
    core.add_request(remote)
    core.step()
    core.finish_pull("r#0", LATE)
    assert collect(core)["r", 0] == alone[5]
    stats = model.manager.stats()
    assert stats.blocks["quarantined"] == 7
    assert stats.slots["quarantined"] == 1
    assert model.manager.check() == []
    core.end_quarantine("r#0")
    assert used(model) == (0, 0, 0, 0)


def test_abort_when_transferring_waits_for_the_read_and_then_frees() -> None:
    core, model = engine()
    remote, source = remote_request(core, model, prompt_of(5))
    core.add_request(remote)
    core.step()
    core.abort("r")
    assert source.cancelled == ["r#0"]
    assert used(model)[0] > 0  # still a destination
    core.finish_pull("r#0", FAILED)
    assert used(model) == (0, 0, 0, 0)
    assert model.manager.check() == []


def test_request_id_when_memory_is_still_kept_under_it_then_is_refused_until_that_is_free(
    alone: dict[int, list[int]],
) -> None:
    core, model = engine()
    remote, _ = remote_request(core, model, prompt_of(5))
    core.add_request(remote)
    core.step()
    core.abort("r")
    again = request("r", prompt_of(5))
    with pytest.raises(InvalidRequestError, match="request id r is in use"):
        core.add_request(again)
    core.finish_pull("r#0", LATE)
    with pytest.raises(InvalidRequestError, match="request id r is in use"):
        core.add_request(again)
    core.add_request(request("other", prompt_of(5)))
    assert collect(core) == {("other", 0): alone[5]}
    core.end_quarantine("r#0")
    core.add_request(again)
    assert collect(core) == {("r", 0): alone[5]}
    assert used(model) == (0, 0, 0, 0)


def test_tier_when_it_is_read_again_behind_a_forward_that_raised_then_its_memory_is_kept_until_it_was_read(
    alone: dict[int, list[int]],
) -> None:
    core, model = engine(max_num_batched_tokens=256)
    source, tiers = _Source(), _Tiers()
    core.pull_with(source, tiers)
    core.add_request(request("r", prompt_of(5)))
    core.step()
    core.finish_pull("r#0", FAILED)
    tiers.is_empty = True
    core.add_request(request("second", prompt_of(6)))
    with patch.object(model.runner, "launch", side_effect=RuntimeError("injected")):
        assert core.step() == []
    tiers.is_empty = False
    assert core.step() == []
    tiers.is_empty = True
    meanwhile = [output for _ in range(3) for output in core.step()]  # the other one does not wait for the read
    assert source.started == ["r#0", "r#0"]
    assert model.manager.is_pulled("r#0")
    assert {output.request_id for output in meanwhile} == {"second"}
    core.finish_pull("r#0", LATE)
    answers: dict[str, list[int]] = {}
    for output in chain(meanwhile, core.step(), *run(core)):
        answers.setdefault(output.request_id, []).extend(output.token_ids)
    assert answers == {"r": alone[5], "second": alone[6]}
    core.end_quarantine("r#0")
    assert used(model) == (0, 0, 0, 0)


def test_tier_when_its_reads_were_bad_then_it_is_read_again_once_the_sequence_has_lost_its_memory(
    alone: dict[int, list[int]],
) -> None:
    core, model = engine(enable_prefix_caching=False)
    source = _Source()
    core.pull_with(source, _Tiers())
    core.add_request(request("r", prompt_of(5)))
    for num_reads in (2, 4):
        for _ in range(2):
            core.step()
            core.finish_pull("r#0", FAILED)
        core.step()
        assert len(source.started) == num_reads  # now it is computed
        (sequence,) = core._scheduler.running
        if num_reads == 2:
            core._scheduler.preempt(sequence)
    assert collect(core)["r", 0] == alone[5]
    assert used(model) == (0, 0, 0, 0)


@pytest.mark.parametrize("is_good", [False, True])
def test_continuation_when_its_stop_string_matches_while_a_tier_is_read_for_it_then_ends_at_once(is_good: bool) -> None:
    core, model = engine(enable_prefix_caching=False)
    source, tiers = _Source(), _Tiers()
    tiers.is_empty = True
    core.pull_with(source, tiers)
    core.add_request(request("r", prompt_of(5)))
    (sequence,) = core._live.of_request("r")
    while sequence.num_output_tokens < 3:
        core.step()
    core._scheduler.preempt(sequence)
    tiers.is_empty = False
    core.step()
    assert source.started == ["r#0"]
    core.finish("r", 0)
    core.finish("r", 0)  # is told once
    assert [output.finish_reason for output in core.step()] == [FinishReason.STOP]
    assert source.cancelled == ["r#0"]
    assert model.manager.is_pulled("r#0")  # until the read is over
    core.abort("r")
    core.finish_pull("r#0", GOOD if is_good else FAILED)
    assert collect(core) == {}
    assert used(model) == (0, 0, 0, 0)
    assert model.manager.check() == []


def test_fault_when_a_prefix_is_still_read_then_its_memory_is_kept_until_it_was_read() -> None:
    core, model = engine()
    remote, source = remote_request(core, model, prompt_of(5))
    core.add_request(remote)
    core.step()
    fault = Schedule(failed=[(core._live["r#0"], RuntimeError("injected"))])
    with patch.object(core._scheduler, "schedule", lambda: fault):
        assert [type(output.error) for output in core.step()] == [TandemError]
    assert source.cancelled == ["r#0"]
    assert model.manager.is_pulled("r#0")
    core.finish_pull("r#0", FAILED)
    assert used(model) == (0, 0, 0, 0)


def test_prefix_of_another_prompt_when_handed_over_is_refused() -> None:
    core, model = engine()
    remote, source = remote_request(core, model, prompt_of(5))
    remote.prompt_token_ids = prompt_of(6)
    core.add_request(remote)
    outputs = core.step()
    assert [getattr(output.error, "param", None) for output in outputs] == ["kv_transfer_params.tandem_prefix_key"]
    assert source.started == []
