"""Two engines on devices whose memory is late (``tests.support.late_device``): nothing is told before it is true.

Each test has its control: the same on a device whose events nobody waits for, where the answer is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.request import Request
from tests.engine.cores import request
from tests.support.late_device import LateRunner, late_device
from tests.support.models import tiered
from tests.support.pair import Pair
from tests.support.reference import Reference, random_tokens, reference

FAMILIES = tiered(("granitemoehybrid", "qwen3_5", "gemma3", "mamba2"), ("granitemoehybrid",))
NUM_TOKENS = 6


class Late:
    """A pair on late devices, and stock."""

    def __init__(self, family: str, *, waits: bool, **flags: Any) -> None:
        with late_device(waits=waits):
            self.pair = Pair(family, max_num_batched_tokens=48, **flags)
        self.reference: Reference = reference(family)
        self.waits = waits

    def hold(self) -> None:
        """From now on the control's memory appears only with its next step."""
        for side in (self.pair.prefill, self.pair.decode):
            runner: Any = side.model.runner
            assert isinstance(runner, LateRunner)
            runner.is_held = not self.waits

    def is_right(self, prompt: list[int], answer: Any) -> bool:
        greedy = self.reference.greedy(prompt, NUM_TOKENS)
        return greedy.mismatch(answer.token_ids, answer.logprobs, self.reference.tolerance) is None


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[True, False], ids=["waits", "control"])
def late(request: pytest.FixtureRequest, family: str) -> Iterator[Late]:
    late = Late(family, waits=request.param)
    late.hold()
    yield late
    late.pair.close()


def test_prompts_when_they_are_handed_out_then_the_reader_gets_what_the_device_wrote(late: Late) -> None:
    for length in (37, 90, 150):
        prompt = random_tokens(length, seed=length)
        assert late.is_right(prompt, late.pair.ask({f"{length}": prompt}, NUM_TOKENS)[f"{length}"]) == late.waits


def test_prompt_when_its_blocks_are_read_as_they_are_finished_then_they_are(late: Late) -> None:
    prompt = random_tokens(200, seed=31)
    answer = late.pair.ask_at_once("pipelined", prompt, NUM_TOKENS)
    assert late.is_right(prompt, answer) == late.waits


def test_second_turn_when_it_goes_on_from_late_memory_then_is_right(late: Late) -> None:
    first = random_tokens(90, seed=41)
    answer = late.pair.ask({"first": first}, NUM_TOKENS)["first"]
    second = [*first, *answer.token_ids, *random_tokens(20, seed=42)]
    assert late.is_right(second, late.pair.ask({"second": second}, NUM_TOKENS)["second"]) == late.waits


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_memory_when_its_step_is_aborted_then_a_pull_gets_it_only_after_the_device_is_done(waits: bool) -> None:
    late = Late("granitemoehybrid", waits=waits, enable_prefix_caching=False)
    try:
        pair, prompt = late.pair, random_tokens(40, seed=51)
        handed_out = pair.hand_out({"pulled": prompt})
        pair.prefill.model.runner.synchronize()
        late.hold()
        pair.decode.core.add_request(request("aborted", random_tokens(48, seed=52)))
        pair.decode.step()
        pair.decode.core.abort("aborted")
        answer = pair.take_in(handed_out, NUM_TOKENS)["pulled"]
        assert late.is_right(prompt, answer) == waits
    finally:
        pair.close()


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_prefix_when_it_is_leased_with_a_copied_tail_then_the_copy_is_there(waits: bool) -> None:
    late = Late("granitemoehybrid", waits=waits)
    try:
        side, prompt = late.pair.prefill, random_tokens(70, seed=61)
        # One block holds the tails of both positions, and it can have the tag of one only.
        side.core.add_request(Request("computed", prompt, None, semantic_boundaries=(67,)))
        while side.core.has_work():
            side.step()
        side.model.runner.synchronize()
        side.model.storage.block_arenas[0][6:] = 0  # all but the prompt's own five blocks
        late.hold()
        keys = side.model.manager.prefix_keys(prompt[:69])
        lease = side.core.lease_prefix(keys, "reader", deeper_than=0)
        assert lease is not None
        assert lease.num_tokens == 67
        found = side.model.storage.digest_block(lease.tables[0][-1], 3)
        side.model.runner.synchronize()
        assert (found == side.model.storage.digest_block(lease.tables[0][-1], 3)) == waits
    finally:
        late.pair.close()
