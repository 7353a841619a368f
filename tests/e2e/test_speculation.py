"""Speculative decoding in real processes: transformers' own answers, however many drafts are right; cold, repeated, on
turn two, preempted, and when a stream moves to another decode node in the middle of its drafts.

Drafts are of known answers, 7 of 10 tokens right, and the state after a wrong one is computed again
(``tests.support.drafting_node``); what drafters guess by themselves is seen with the built-in model.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.e2e.test_identity import OTHERS
from tests.e2e.test_migration import Stream
from tests.support.client import Answer, complete, info, metric, together, wait_settled
from tests.support.drafting_node import ANSWERS_VARIABLE, write_answers
from tests.support.hangup import wait_until
from tests.support.models import DEMO, checkpoint
from tests.support.reference import Reference, random_tokens, reference
from tests.support.restart import start_again
from tests.support.service import Service, start_node, start_proxy, wait_ready

DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 7}')
PROGRAM = "tests.support.drafting_node"
NUM_TOKENS = 40
NUM_REQUESTS = 5


@dataclass(frozen=True)
class Site:
    """``answers``: the file from which the decode nodes draft."""

    service: Service
    reference: Reference
    answers: Path

    def know(self, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS) -> None:
        found = [[*prompt, *self.reference.greedy(prompt, num_tokens).token_ids] for prompt in prompts]
        write_answers(self.answers, found)

    def check(self, prompt: Sequence[int], answer: Answer, num_tokens: int = NUM_TOKENS) -> None:
        greedy = self.reference.greedy(prompt, num_tokens)
        assert greedy.mismatch(answer.token_ids(), answer.logprobs(), self.reference.tolerance) is None

    def accepted(self) -> float:
        return sum(metric(node, "spec_decode_num_accepted_tokens_total") for node in self.service.decode)


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=pytest.mark.full) for family in (FAMILY, *OTHERS) if family != DEMO],
)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="tandem-drafts-") as folder:
        answers = Path(folder) / "answers"
        with Service(
            checkpoint(request.param),
            prefill_flags=NODE_FLAGS,
            decode_flags=(*NODE_FLAGS, *DRAFTS),
            proxy_flags=("--migration-limit", "2"),
            num_decode=2,
            environment={ANSWERS_VARIABLE: str(answers)},
            program=PROGRAM,
        ) as running:
            yield Site(running, reference(request.param), answers)


def test_answers_when_new_repeated_and_on_turn_two_then_equal_stock_with_drafts(site: Site) -> None:
    prompts = [random_tokens(length, seed=length + 60) for length in (1, 17, 100, 300)]
    site.know(prompts)
    before = site.accepted()
    for _ in range(2):
        answers = together([lambda p=prompt: complete(site.service.url, p, NUM_TOKENS) for prompt in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            site.check(prompt, answer)
    assert all(answer.cached_tokens == len(prompt) for prompt, answer in zip(prompts, answers, strict=True))
    follows = [[*p, *site.reference.greedy(p, NUM_TOKENS).token_ids, *random_tokens(9, 70)] for p in prompts]
    site.know(follows)
    for prompt, follow in zip(prompts, follows, strict=True):
        answer = complete(site.service.url, follow, NUM_TOKENS)
        site.check(follow, answer)
        assert answer.cached_tokens == len(prompt) + NUM_TOKENS - 1
        assert answer.trace["accepted_tokens"] <= answer.trace["draft_tokens"] > 0
    assert site.accepted() - before > 12 * NUM_TOKENS / 4
    wait_settled(*site.service.prefill, *site.service.decode)


def test_seeded_answers_when_drafts_are_run_then_equal_those_of_a_node_without(site: Site) -> None:
    """The prefill node, asked by itself, drafts nothing."""
    prompts = [random_tokens(40 + index, seed=80 + index) for index in range(3)]
    fields: dict[str, Any] = {"temperature": 0.8, "seed": 3, "presence_penalty": 0.5, "min_p": 0.02, "n": 2}
    expected = [complete(site.service.prefill[0].url, prompt, NUM_TOKENS, **fields) for prompt in prompts]
    wholes = [[*p, *each.token_ids(choice)] for p, each in zip(prompts, expected, strict=True) for choice in range(2)]
    write_answers(site.answers, wholes)
    before = site.accepted()
    found = together([lambda p=prompt: complete(site.service.url, p, NUM_TOKENS, **fields) for prompt in prompts])
    for answer, other in zip(found, expected, strict=True):
        for choice in range(2):
            assert answer.token_ids(choice) == other.token_ids(choice)
            assert answer.logprobs(choice) == pytest.approx(other.logprobs(choice), abs=5e-3)
    assert site.accepted() - before > 30
    wait_settled(*site.service.prefill, *site.service.decode)


def test_answers_when_memory_runs_out_then_sequences_are_preempted_between_drafts_and_equal_stock(site: Site) -> None:
    sizes = info(site.service.decode[0])
    num_tokens, num_blocks = 200, 24
    memory = 4096 + sum((num_blocks + 1) * group["block_bytes"] for group in sizes["groups"])
    memory += (2 * NUM_REQUESTS + 3) * sizes["slot_bytes"]
    flags = dict(zip(NODE_FLAGS[::2], NODE_FLAGS[1::2], strict=True))
    flags |= {"--kv-cache-memory": str(memory), "--max-model-len": "320", "--max-num-seqs": str(NUM_REQUESTS)}
    prompts = [random_tokens(60, seed=90 + index) for index in range(NUM_REQUESTS)]
    site.know(prompts, num_tokens)
    with tempfile.TemporaryDirectory(prefix="tandem-drafts-") as folder:
        started = []
        try:
            small = start_node(
                *("decode", site.service.model, Path(folder), *(w for item in flags.items() for w in item), *DRAFTS),
                program=(PROGRAM, "decode"),
                **{ANSWERS_VARIABLE: str(site.answers)},
            )
            started.append(small)
            wait_ready(small)
            proxy = start_proxy(site.service.prefill, [small], Path(folder))
            started.append(proxy)
            wait_ready(proxy)
            answers = together([lambda p=prompt: complete(proxy.url, p, num_tokens) for prompt in prompts])
            for prompt, answer in zip(prompts, answers, strict=True):
                site.check(prompt, answer, num_tokens)
            assert metric(small, "spec_decode_num_accepted_tokens_total") > 50
            if sizes["groups"]:
                assert metric(small, "preemptions_total") > 0
            wait_settled(*site.service.prefill, small)
        finally:
            for node in reversed(started):
                node.process.stop()


def test_streams_when_their_decode_node_dies_between_drafts_then_go_on_and_equal_stock(site: Site) -> None:
    num_tokens = 300
    prompts = [random_tokens(30 + 7 * index, seed=100 + index) for index in range(4)]
    site.know(prompts, num_tokens)
    victim = site.service.decode[0]

    def strike() -> None:
        name = "spec_decode_num_accepted_tokens_total"
        enough = metric(victim, name) + 20
        wait_until(lambda: metric(victim, name) >= enough, "drafts to be accepted", 60)
        victim.process.kill()

    striker = threading.Thread(target=strike)
    striker.start()
    before = metric(site.service.proxy, "proxy_migrations_total", outcome="resumed")
    streams = together([lambda p=prompt: stream(site, p, num_tokens) for prompt in prompts])
    striker.join()
    assert metric(site.service.proxy, "proxy_migrations_total", outcome="resumed") > before
    for prompt, token_ids in zip(prompts, streams, strict=True):
        assert token_ids == site.reference.greedy(prompt, num_tokens).token_ids
    wait_settled(*site.service.prefill, site.service.decode[1])
    start_again(site.service, victim)


def stream(site: Site, prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens of a stream."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    got = Stream(body).run(site.service.url)
    assert got.error is None, got.error
    return got.token_ids
