"""Through proxy, prefill node, NIXL and decode node, every kind of model gives transformers' own tokens and
log-probabilities.

Cold, cached, resumed inside a block, alone and in a crowd; with output rows that a caller has swapped. And the
controls: with a state, a block or an early part of the prompt changed, the same comparison fails; so it would notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from common.wire.handoff import prefill_leg_params
from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support import foreign
from tests.support.client import Answer, complete, completion_body, info, payload_bytes, post, together, wait_settled
from tests.support.models import ATTENTION_FAMILIES, DEMO, RECURRENT_FAMILIES, checkpoint, tiered
from tests.support.reference import Mismatch, Reference, random_tokens, reference
from tests.support.service import Service

LENGTHS = (1, 15, 16, 17, 100, 1000, 3000)
NUM_TOKENS, FEWER_TOKENS = 48, 20
BLOCK_SIZE = 16
OTHERS = (
    *("qwen3_5", "kimi_linear", "lfm2", "jamba", "minimax", "falcon_h1", "mamba2", "llama", "gemma3", "qwen3_5_vl"),
    DEMO,
)
"""One of each other kind: gated delta, Kimi delta with latents, short convolution, Mamba-1, lightning attention, two
mixers side by side, no attention, nothing but attention, sliding windows, a vision-language wrapper, trained weights.
The engine's tests run every family in process."""
FULL_TIER = tuple(pytest.param(family, marks=pytest.mark.full) for family in OTHERS)


@dataclass(frozen=True)
class Site:
    """One family: the running service and what it is compared with."""

    family: str
    service: Service
    reference: Reference

    def ask(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS, **fields: Any) -> Answer:
        return complete(self.service.url, prompt, num_tokens, **fields)

    def mismatch(self, prompt: Sequence[int], answer: Answer, num_tokens: int = NUM_TOKENS) -> Mismatch | None:
        """How ``answer`` differs from stock's answer to ``prompt``; None: it does not."""
        greedy = self.reference.greedy(prompt, num_tokens)
        return greedy.mismatch(answer.token_ids(), answer.logprobs(), self.reference.tolerance)

    @property
    def num_states(self) -> int:
        """States that a cold handoff moves."""
        return int(self.family in (*RECURRENT_FAMILIES, DEMO))

    def moved_blocks(self, num_tokens: int) -> list[int]:
        """Blocks that a cold handoff moves, by attention group: of a sliding window those of the last one."""
        groups = info(self.service.decode[0])["groups"]
        firsts = [max(0, num_tokens - group["window"] + 1) // BLOCK_SIZE if group["window"] else 0 for group in groups]
        return [-(-num_tokens // BLOCK_SIZE) - first for first in firsts]

    def payload(self, moved_blocks: Sequence[int], num_states: int) -> int:
        return payload_bytes(self.service.decode[0], moved_blocks, num_states)

    def damage_next_pull(self, target: str, index: int = 0) -> None:
        url = self.service.decode[0].url + "/internal/v1/test/damage"
        response = httpx.post(url, json={"target": target, "index": index}, timeout=30)
        assert response.status_code == 200, response.text


@pytest.fixture(scope="module", params=[FAMILY, *FULL_TIER])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    family = str(request.param)
    if family == FAMILY:
        yield Site(family, request.getfixturevalue("service"), reference(family))
        return
    with Service(checkpoint(family), prefill_flags=NODE_FLAGS, decode_flags=NODE_FLAGS) as running:
        yield Site(family, running, reference(family))


def assert_moved_whole(site: Site, prompt: Sequence[int], answer: Answer) -> None:
    """A cold handoff: another process computed the prompt, and all that is needed to go on came over."""
    trace = answer.trace
    assert trace["placement"] == "remote"
    assert (trace["prefill_cached_tokens"], trace["decode_cached_tokens"], answer.cached_tokens) == (0, 0, 0)
    moved = site.moved_blocks(len(prompt))
    assert trace["transferred_blocks"] == sum(moved)
    assert trace["transferred_states"] == site.num_states
    assert trace["transferred_bytes"] == site.payload(moved, site.num_states)


@pytest.mark.parametrize("length", tiered(LENGTHS, (1, 16, 1000)))
def test_answer_when_the_prompt_is_new_and_when_it_is_repeated_then_equals_stock(site: Site, length: int) -> None:
    prompt = random_tokens(length, seed=length)
    cold = site.ask(prompt, cache_salt="alone")
    assert_moved_whole(site, prompt, cold)
    repeated = site.ask(prompt, cache_salt="alone")
    assert repeated.trace["placement"] == "remote"
    assert repeated.trace["transferred_bytes"] == 0
    assert repeated.cached_tokens == length
    for answer in (cold, repeated):
        assert site.mismatch(prompt, answer) is None


def test_answers_when_sixteen_prompts_come_at_once_then_equal_stock(site: Site) -> None:
    lengths = (*LENGTHS[:-1], *LENGTHS[:-1], 33, 33, 300, 300)
    prompts = [random_tokens(length, seed=length + 25 * index) for index, length in enumerate(lengths)]
    site.reference.generate(prompts, NUM_TOKENS)
    assert len(prompts) == 16
    cold = together([lambda p=prompt: site.ask(p, cache_salt="crowd") for prompt in prompts])
    for prompt, answer in zip(prompts, cold, strict=True):
        assert site.mismatch(prompt, answer) is None, f"{len(prompt)} tokens, cold"
        assert_moved_whole(site, prompt, answer)
    repeated = together([lambda p=prompt: site.ask(p, cache_salt="crowd") for prompt in prompts])
    for prompt, answer in zip(prompts, repeated, strict=True):
        assert site.mismatch(prompt, answer) is None, f"{len(prompt)} tokens, cached"
        assert (answer.cached_tokens, answer.trace["transferred_bytes"]) == (len(prompt), 0)


def test_answers_when_prefixes_are_shared_then_equal_stock(site: Site) -> None:
    origin = random_tokens(1000, seed=311)
    rest = random_tokens(300, seed=312)
    prompts = {
        "origin": origin,
        "parts on a block boundary": origin[:800] + rest[:200],
        "parts there again": origin[:800] + rest[100:],
        "parts inside a block": origin[:805] + rest[:200],
        "stops short": origin[:500],
        "stops short inside a block": origin[:507],
        "goes on from inside a block": origin[:507] + rest,
        "goes on from the end": origin + rest[:60],
        "goes on from that end": origin + rest[:61],
    }
    # Exact positions, off the block boundaries: each is the end of a prompt above.
    resumed = {"goes on from inside a block": 507, "goes on from the end": 1000, "goes on from that end": 1060}
    for name, prompt in prompts.items():
        answer = site.ask(prompt, FEWER_TOKENS, cache_salt="shared")
        assert site.mismatch(prompt, answer, FEWER_TOKENS) is None, name
        assert answer.trace["prefill_cached_tokens"] >= resumed.get(name, 0), name
    wait_settled(site.service.prefill[0], site.service.decode[0])


@pytest.mark.full  # as in test_shared_prefixes
def test_answers_when_they_share_a_prefix_at_once_then_equal_stock(site: Site) -> None:
    origin = random_tokens(170, seed=321)
    prompts = [origin[: 100 + 10 * (i % 8)] + random_tokens(1 + 7 * i, seed=330 + i) for i in range(16)]
    for _ in range(2):
        answers = together([lambda p=prompt: site.ask(p, FEWER_TOKENS, cache_salt="fan") for prompt in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            assert site.mismatch(prompt, answer, FEWER_TOKENS) is None, f"{len(prompt)} tokens"
    wait_settled(site.service.prefill[0], site.service.decode[0])


def test_control_when_the_moved_state_is_zeroed_then_the_answer_changes_after_the_first_token(site: Site) -> None:
    if not site.num_states:
        pytest.skip("a dense model moves no state")
    prompt = random_tokens(1000, seed=1000)
    site.damage_next_pull("state")
    answer = site.ask(prompt, cache_salt="control: state")
    assert_moved_whole(site, prompt, answer)
    mismatch = site.mismatch(prompt, answer)
    assert mismatch is not None
    assert mismatch.index >= 1


@pytest.mark.parametrize("index", [0, -1])
def test_control_when_one_moved_block_is_zeroed_then_the_answer_changes_after_the_first_token(
    site: Site, index: int
) -> None:
    if site.family not in ATTENTION_FAMILIES:
        pytest.skip("no attention layers, no blocks")
    prompt = random_tokens(100, seed=100)
    site.damage_next_pull("block", index)
    answer = site.ask(prompt, cache_salt=f"control: block {index}")
    assert_moved_whole(site, prompt, answer)
    mismatch = site.mismatch(prompt, answer)
    assert mismatch is not None
    assert mismatch.index >= 1


def test_control_when_the_first_tenth_of_the_prompt_is_replaced_then_the_answer_changes(site: Site) -> None:
    if site.family == "mistral":
        pytest.skip("nothing but windows: four of them do not reach back that far")
    prompt = random_tokens(1000, seed=1000)
    other = random_tokens(100, seed=341) + prompt[100:]
    answer = site.ask(other, cache_salt="control: prompt")
    assert site.mismatch(other, answer) is None
    assert site.mismatch(prompt, answer) is not None
    # Not only where the output row decides: what was moved matters too.
    greedy = site.reference.greedy(prompt, NUM_TOKENS)
    moved = greedy.token_ids[1:] != answer.token_ids()[1:] or any(
        abs(logprob - float(row[token_id])) > site.reference.tolerance
        for token_id, logprob, row in zip(
            answer.token_ids()[1:], answer.logprobs()[1:], greedy.logprobs[1:], strict=True
        )
    )
    assert moved


def test_handoffs_when_their_output_rows_are_swapped_on_the_way_then_the_first_tokens_are_their_own(
    site: Site,
) -> None:
    """The control of the row itself, with one that the holder vouches for, is in ``tests/engine/test_handoff.py``."""
    prompts = [random_tokens(100, seed=351), random_tokens(110, seed=352)]
    expected = [site.reference.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    assert expected[0].token_ids[0] != expected[1].token_ids[0]
    prefill, decode = site.service.prefill[0].url, site.service.decode[0].url
    bodies = [completion_body(prompt, NUM_TOKENS, cache_salt="swapped rows") for prompt in prompts]
    legs = [
        post(prefill, "/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": prefill_leg_params()})
        for body in bodies
    ]
    handoffs = [dict(leg["kv_transfer_params"]) for leg in legs]
    rows = [handoff["tandem_output_row"] for handoff in handoffs]
    for index, (body, handoff) in enumerate(zip(bodies, handoffs, strict=True)):
        swapped = {**handoff, "tandem_output_row": rows[1 - index]}
        for leg in ({**body, "kv_transfer_params": swapped}, body):  # and what is kept of it
            answer = Answer(post(decode, "/v1/completions", leg))
            assert expected[index].mismatch(answer.token_ids(), answer.logprobs(), site.reference.tolerance) is None
        foreign.release(prefill, handoff)


def test_memory_when_all_of_the_above_has_run_then_is_free_or_cached_on_both_nodes(site: Site) -> None:
    wait_settled(site.service.prefill[0], site.service.decode[0])
