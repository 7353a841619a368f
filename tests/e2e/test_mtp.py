"""Drafts of the model's own head in real processes: a prefill node computes what the head keeps of a prompt, it moves
with the blocks and the state, and the decode node's first drafts are as right as if it had computed the prompt itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import NODE_FLAGS
from tests.support.client import Answer, complete, info, metric, payload_bytes, wait_settled
from tests.support.drafting_node import ANSWERS_VARIABLE
from tests.support.models import checkpoint
from tests.support.mtp import checkpoint_with_mtp, num_accepted
from tests.support.reference import Reference, random_tokens, reference
from tests.support.service import Service

DRAFTS = ("--speculative-config", '{"method": "mtp"}')
PROGRAM = "tests.support.drafting_node"
PROMPT_TOKENS, NUM_TOKENS, NUM_DRAFTS = 300, 30, 3
FAMILIES = [pytest.param(family, marks=pytest.mark.full) for family in ("qwen3_5", "nemotron_h")]

pytestmark = pytest.mark.full


@dataclass(frozen=True)
class Site:
    service: Service
    reference: Reference
    prompt: list[int]
    follow: list[int]

    def check(self, prompt: list[int], answer: Answer) -> None:
        greedy = self.reference.greedy(prompt, NUM_TOKENS)
        assert greedy.mismatch(answer.token_ids(), answer.logprobs(), self.reference.tolerance) is None
        steps = num_accepted(len(prompt), len(prompt) + NUM_TOKENS, NUM_DRAFTS)
        assert answer.trace["draft_tokens"] == sum(drafted for drafted, _ in steps)
        assert answer.trace["accepted_tokens"] == sum(right for _, right in steps)


@pytest.fixture(scope="module", params=FAMILIES)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    stock = reference(request.param)
    prompt = random_tokens(PROMPT_TOKENS, seed=1)
    answer = stock.greedy(prompt, NUM_TOKENS).token_ids
    follow = [*prompt, *answer, *random_tokens(9, seed=2)]
    texts = [(len(each), [*each, *stock.greedy(each, NUM_TOKENS).token_ids]) for each in (prompt, follow)]
    with tempfile.TemporaryDirectory(prefix="tandem-mtp-") as folder:
        model = checkpoint_with_mtp(request.param, Path(folder) / "model", texts)
        flags = (*NODE_FLAGS, *DRAFTS)
        with Service(
            model,
            prefill_flags=flags,
            decode_flags=flags,
            environment={ANSWERS_VARIABLE: str(Path(folder) / "none")},
            program=PROGRAM,
        ) as running:
            yield Site(running, stock, prompt, follow)


def test_drafts_when_the_prompt_came_from_a_prefill_node_then_are_right_where_they_were_made_to_be(site: Site) -> None:
    node = site.service.decode[0]
    before = metric(node, "prompt_tokens_total", source="computed")
    cold = complete(site.service.url, site.prompt, NUM_TOKENS)
    site.check(site.prompt, cold)
    moved = [-(-PROMPT_TOKENS // 16)]
    assert cold.trace["transferred_blocks"] == sum(moved)
    assert cold.trace["transferred_bytes"] == payload_bytes(node, moved, 1)
    repeated = complete(site.service.url, site.prompt, NUM_TOKENS)
    site.check(site.prompt, repeated)
    assert (repeated.cached_tokens, repeated.trace["transferred_bytes"]) == (PROMPT_TOKENS, 0)
    assert metric(node, "prompt_tokens_total", source="computed") == before
    second = complete(site.service.url, site.follow, NUM_TOKENS)
    site.check(site.follow, second)
    assert second.cached_tokens == PROMPT_TOKENS + NUM_TOKENS - 1
    wait_settled(*site.service.prefill, *site.service.decode)


def test_bytes_when_the_head_is_served_then_are_those_of_one_more_layer(site: Site) -> None:
    """K/V of one more layer of attention; the state has one row more."""
    with Service(checkpoint(site.reference.family), prefill_flags=NODE_FLAGS, decode_flags=NODE_FLAGS) as without:
        plain, sizes = info(without.decode[0]), info(site.service.decode[0])
    (before,), (after,) = ([group["block_bytes"] for group in each["groups"]] for each in (plain, sizes))
    num_layers = {"qwen3_5": 1, "nemotron_h": 2}[site.reference.family]
    assert after == before // num_layers * (num_layers + 1)
    assert sizes["slot_bytes"] - plain["slot_bytes"] == 64 * 4
