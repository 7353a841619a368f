"""Drafts of the model's own head in real processes: a prefill node computes what the head keeps of a prompt, it moves
with the blocks and the state, and the decode node's first drafts are as right as if it had computed the prompt itself.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import test_images
from tests.e2e.conftest import NODE_FLAGS
from tests.e2e.test_migration import Stream
from tests.support import images
from tests.support.client import Answer, complete, info, metric, payload_bytes, together, wait_settled
from tests.support.drafting_node import ANSWERS_VARIABLE
from tests.support.http_server import wait_for
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


DRAFTED = "spec_decode_num_draft_tokens_total"


def test_streams_when_their_decode_node_dies_between_drafts_of_the_head_then_go_on_and_equal_stock(
    site: Site, tmp_path: Path
) -> None:
    """Nothing was solved for so long an answer: the head is mostly wrong, and the model says so."""
    num_tokens = 300
    prompts = [random_tokens(40 + 9 * index, seed=30 + index) for index in range(3)]
    model = checkpoint_with_mtp(site.reference.family, tmp_path / "model")
    flags = (*NODE_FLAGS, *DRAFTS)
    with Service(
        model,
        prefill_flags=flags,
        decode_flags=flags,
        proxy_flags=("--migration-limit", "2"),
        num_decode=2,
        environment={ANSWERS_VARIABLE: str(tmp_path / "none")},
        program=PROGRAM,
    ) as running:
        victim, other = running.decode

        def strike() -> None:
            wait_for(lambda: metric(victim, DRAFTED) >= 60, "drafts on the node that is to die")
            victim.process.kill()

        def stream(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
            got = Stream({**body, "stream": True, "return_token_ids": True}).run(running.url)
            assert got.error is None, got.error
            return got.token_ids

        striker = threading.Thread(target=strike)
        striker.start()
        streams = together([lambda p=prompt: stream(p) for prompt in prompts])
        striker.join()
        assert metric(running.proxy, "proxy_migrations_total", outcome="resumed") > 0
        assert metric(other, DRAFTED) > 0
        for prompt, token_ids in zip(prompts, streams, strict=True):
            assert token_ids == site.reference.greedy(prompt, num_tokens).token_ids
        wait_settled(*running.prefill, other)


def test_images_when_the_head_drafts_then_answers_equal_transformers_cold_repeated_and_in_a_second_turn(
    tmp_path: Path,
) -> None:
    family = test_images.FAMILY
    model = checkpoint_with_mtp(f"{family}_vl", tmp_path / "model", source=images.image_checkpoint(family))
    flags = (*NODE_FLAGS, *DRAFTS)
    environment = {ANSWERS_VARIABLE: str(tmp_path / "none")}
    prefill_flags = (*flags, "--max-num-batched-tokens", "40")  # cuts images
    with Service(
        model, prefill_flags=prefill_flags, decode_flags=flags, environment=environment, program=PROGRAM
    ) as running:
        site = test_images.Site(running)
        first = test_images.user("What is this?", test_images.A, "And this?", test_images.B)
        cold = site.ask(first)
        site.check(cold, [test_images.A, test_images.B])
        repeated = site.ask(first)
        assert (repeated.token_ids, repeated.cached_tokens) == (cold.token_ids, len(cold.prompt_token_ids))
        second = site.ask(
            first, {"role": "assistant", "content": cold.text}, test_images.user("A third", test_images.C)
        )
        site.check(second, [test_images.A, test_images.B, test_images.C])
        assert second.cached_tokens > site.first_placeholder(second)
        assert metric(running.decode[0], DRAFTED) > 0
        wait_settled(*running.prefill, *running.decode)
