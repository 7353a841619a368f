"""Roles that are elastic, in real processes: a decode node computes prompts that are new to it, a prefill node
generates, and no answer is another one for it."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import httpx
import pytest

from common.wire.headers import PLACEMENT_HEADER
from common.wire.routes import COMPLETIONS_ROUTE
from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import Answer, complete, completion_body, metric, together, wait_settled
from tests.support.hangup import wait_until
from tests.support.models import checkpoint
from tests.support.reference import Reference, random_tokens
from tests.support.restart import start_again
from tests.support.service import Service
from tests.support.streams import Stream, bodies, run_all, run_and_strike

pytestmark = pytest.mark.full  # who takes which work: tests/unit/proxy/placement/test_elastic.py

NUM_PROMPTS = 12
PROMPT_TOKENS = 900
"""So long that a queue of some is worth more than the 50 ms for which nobody leaves its role."""
MAX_ROUNDS = 5
"""Of as many prompts at once, until both roles have crossed: when that pays depends on how fast the machine is just
then."""
MAX_STRIKES = 5
"""Against a node, each with new streams, until it had one of them: those that began first may be done just then."""
LONG_TOKENS = 3500
"""Of streams of which two fill half a node."""
FEW_SEQUENCES = ("--max-num-seqs", "4")
LARGE_STEPS = ("--max-num-batched-tokens", "512")
"""So that what prompts take of a stream beside them is clearly more than the pause of moving it, on any machine."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """One node of each role, with room for few answers each: what does not fit on one is worth moving to the other."""
    flags = (*NODE_FLAGS, *FEW_SEQUENCES, *LARGE_STEPS)
    with Service(
        checkpoint(FAMILY),
        prefill_flags=flags,
        decode_flags=flags,
        proxy_flags=("--policy", "cost", "--migration-limit", "2"),
    ) as running:
        yield running


def num_crossed(service: Service) -> list[float]:
    return [metric(service.proxy, "proxy_elastic_placements_total", work=work) for work in ("prompt", "answer")]


def check_right(answers: Sequence[Answer], prompts: Sequence[list[int]], reference: Reference) -> None:
    for answer, prompt in zip(answers, prompts, strict=True):
        expected = reference.greedy(prompt, len(answer.token_ids()))
        mismatch = expected.mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
        assert mismatch is None, mismatch


def test_answers_when_both_roles_do_the_others_work_then_are_right_and_their_prompts_are_hits(
    service: Service, reference: Reference
) -> None:
    for seed in range(3):  # how long a node takes is known from what it has done
        complete(service.url, random_tokens(PROMPT_TOKENS, seed=8090 + seed), 40)
    for turn in range(MAX_ROUNDS):
        prompts = [random_tokens(PROMPT_TOKENS, seed=8100 + turn * NUM_PROMPTS + index) for index in range(NUM_PROMPTS)]
        reference.generate(prompts, 40)
        answers = together([partial(complete, service.url, prompt, 40) for prompt in prompts])
        check_right(answers, prompts, reference)
        wait_settled(*service.prefill, *service.decode)
        if min(num_crossed(service)) > 0:
            break
    assert min(num_crossed(service)) > 0, num_crossed(service)
    # Wherever a prompt was computed, turn two goes on from the end of turn one: one at a time, for beside others it may
    # be sooner to compute it elsewhere.
    longer = [[*prompt, *answer.token_ids(), 7, 8, 9] for prompt, answer in zip(prompts, answers, strict=True)]
    reference.generate(longer, 12)
    again = [complete(service.url, prompt, 12) for prompt in longer]
    check_right(again, longer, reference)
    for prompt, answer in zip(prompts, again, strict=True):
        assert answer.cached_tokens >= len(prompt)
    wait_settled(*service.prefill, *service.decode)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=["killed", "frozen", "drained"]
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_when_a_node_that_generates_is_gone_then_end_as_if_it_were_not(
    service: Service, role: str, number: int
) -> None:
    """The prefill node's own streams, and those of a decode node that only a prefill node can take over."""
    expected = run_all(service.url, [Stream(body) for body in bodies(7400, f"whole {role} {number}")])
    [victim] = service.prefill if role == "prefill" else service.decode
    for attempt in range(MAX_STRIKES):
        streams = [Stream(body) for body in bodies(7400, f"cut {attempt} {role} {number}")]
        crossed, moved = num_crossed(service)[1], metric(service.proxy, "proxy_migrations_total", outcome="resumed")
        run_and_strike(service, streams, victim, number)
        for stream, like in zip(streams, expected, strict=True):
            stream.assert_like(like)
        has_crossed = num_crossed(service)[1] > crossed
        has_moved = metric(service.proxy, "proxy_migrations_total", outcome="resumed") > moved
        victim.process.kill()
        start_again(service, victim)
        wait_settled(*service.prefill, *service.decode)
        # Who is asked to end serves its streams to their end.
        if has_crossed and (has_moved or number == signal.SIGTERM):
            return
    raise AssertionError("no stream was moved")


def test_streams_when_prompts_come_to_their_prefill_node_then_a_decode_node_ends_them_as_if_it_had_begun_them(
    service: Service,
) -> None:
    """They begin on the prefill node because there is no decode node then, and are slow enough beside prompts to be
    still there when there is one."""

    def streams(salt: str) -> list[Stream]:
        return [Stream({**body, "max_tokens": LONG_TOKENS}) for body in bodies(7600, salt)[1:3]]

    expected = run_all(service.url, streams("whole"))
    [decode] = service.decode
    decode.process.kill()
    wait_until(lambda: metric(service.proxy, "node_up") == 1, "the decode node to be gone")
    before = metric(service.proxy, "proxy_migrations_total", outcome="handed_over")
    moving = streams("handed over")
    clients = threading.Thread(target=run_all, args=(service.url, moving))
    restart = threading.Thread(target=start_again, args=(service, decode))
    for thread in (clients, restart):
        thread.start()
    seed = itertools.count(9000)

    def come() -> None:
        body = completion_body(random_tokens(3000, next(seed)), 1)
        headers = {} if restart.is_alive() else {PLACEMENT_HEADER: "remote"}
        httpx.post(service.url + COMPLETIONS_ROUTE, json=body, headers=headers, timeout=60).raise_for_status()

    while clients.is_alive():
        together([come] * 2)
    for thread in (clients, restart):
        thread.join()
    num_handed_over = metric(service.proxy, "proxy_migrations_total", outcome="handed_over") - before
    assert num_handed_over > 0
    # It was started meanwhile, and asks for nothing else: what came beside them was new.
    assert 0 < metric(decode, "source_queries_total", result="hit") <= num_handed_over
    for stream, like in zip(moving, expected, strict=True):
        stream.assert_like(like)
    wait_settled(*service.prefill, *service.decode)
