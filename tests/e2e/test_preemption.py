"""More sequences than the decode node has memory for: it takes memory back, computes again, and nobody notices."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import complete, info, metric, together, wait_settled
from tests.support.models import checkpoint
from tests.support.reference import Reference, random_tokens
from tests.support.service import Node, Service, start_node, start_proxy, wait_ready

NUM_REQUESTS = 6
PROMPT_TOKENS, NUM_TOKENS = 100, 156
NUM_BLOCKS = 44
"""6 sequences end with 16 blocks each: less than half of them fit."""
LONG_TOKENS = 350
"""Sequences that end with 29 blocks: no two of them fit, so that any two which overlap will do, however busy the
machine is when their clients come."""


@pytest.fixture(scope="module")
def small(service: Service) -> Iterator[tuple[Node, Node]]:
    """A proxy, and the small decode node that it puts next to the shared prefill node."""
    sizes = info(service.decode[0])
    memory = (NUM_BLOCKS + 1) * sizes["block_bytes"] + (NUM_REQUESTS + 2) * sizes["slot_bytes"]
    flags = dict(zip(NODE_FLAGS[::2], NODE_FLAGS[1::2], strict=True))
    flags |= {"--kv-cache-memory": str(memory), "--max-model-len": "512", "--max-num-seqs": str(NUM_REQUESTS)}
    with tempfile.TemporaryDirectory(prefix="tandem-preemption-") as folder:
        started = []
        try:
            decode = start_node(
                "decode", checkpoint(FAMILY), Path(folder), *(w for item in flags.items() for w in item)
            )
            started.append(decode)
            wait_ready(decode)
            proxy = start_proxy(service.prefill, [decode], Path(folder))
            started.append(proxy)
            wait_ready(proxy)
            yield proxy, decode
        finally:
            for node in reversed(started):
                node.process.stop()


@pytest.mark.full  # as in tests/engine/test_core.py
def test_answers_when_memory_runs_out_then_sequences_are_preempted_and_equal_stock(
    service: Service, small: tuple[Node, Node], reference: Reference
) -> None:
    proxy, decode = small
    assert info(decode)["num_blocks"] == NUM_BLOCKS + 1
    start = decode.check_cache()
    prompts = [random_tokens(PROMPT_TOKENS, seed=1600 + index) for index in range(NUM_REQUESTS)]
    answers = together([lambda p=prompt: complete(proxy.url, p, LONG_TOKENS) for prompt in prompts])
    assert metric(decode, "preemptions_total") > 0
    reference.generate(prompts, LONG_TOKENS)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.trace["placement"] == "remote"
        greedy = reference.greedy(prompt, LONG_TOKENS)
        assert greedy.mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance) is None
    wait_settled(service.prefill[0], decode)
    end = decode.check_cache()
    for pool in ("blocks", "slots"):
        assert end[pool]["free"] + end[pool]["cached"] == sum(start[pool].values())


@pytest.mark.full
def test_seeded_forks_when_memory_runs_out_then_give_the_answers_that_they_give_with_room(
    service: Service, small: tuple[Node, Node]
) -> None:
    proxy, decode = small
    prompts = [random_tokens(PROMPT_TOKENS, seed=1620 + index) for index in range(3)]
    fields = {"n": 3, "seed": 11, "temperature": 1.0}
    before = metric(decode, "preemptions_total")
    answers = together([lambda p=prompt: complete(proxy.url, p, NUM_TOKENS, **fields) for prompt in prompts])
    assert metric(decode, "preemptions_total") > before
    for prompt, answer in zip(prompts, answers, strict=True):
        with_room = complete(service.url, prompt, NUM_TOKENS, **fields)
        for choice in range(3):
            assert answer.token_ids(choice) == with_room.token_ids(choice)
            assert answer.logprobs(choice) == pytest.approx(with_room.logprobs(choice), abs=1e-3)
    wait_settled(service.prefill[0], decode)
