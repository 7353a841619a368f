"""Drafters, what they are told by ``--speculative-config``, and how many of their tokens pay. No torch."""

from __future__ import annotations

import random

import pytest

from common.config.node import NodeConfig
from common.engine.drafting.allowance import Allowance, StepCost
from common.engine.drafting.config import SpeculativeConfig
from common.engine.drafting.drafter import Drafter
from common.engine.drafting.pay import Acceptance, num_paying
from common.engine.drafting.prompt_lookup import MAX_INDEXED, PromptLookup, TokenIndex
from common.engine.drafting.suffix import SuffixLookup
from common.errors import ConfigError

DRAFTERS = [lambda: PromptLookup(2, 5), lambda: SuffixLookup(2)]


def slow_lookup(token_ids: list[int], low: int, high: int, count: int) -> list[int]:
    """The same by looking everywhere: the longest match of at most ``high``, the latest of those."""
    for size in range(high, low - 1, -1):
        for place in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[place - size : place] == token_ids[-size:]:
                guess = token_ids[place:]
                return [guess[index % len(guess)] for index in range(count)]
    return []


def test_prompt_lookup_when_tokens_grow_by_some_then_finds_what_looking_everywhere_finds() -> None:
    rng = random.Random(1)
    for _ in range(20):
        drafter, token_ids = PromptLookup(2, 5), []
        while len(token_ids) < 120:
            token_ids += [rng.randrange(4) for _ in range(rng.randint(1, 6))]
            # Of a longer history only the latest places are compared.
            if len(token_ids) < 40:
                count = rng.randint(1, 7)
                assert drafter.propose(token_ids, count) == slow_lookup(token_ids, 2, 5, count)


@pytest.mark.parametrize("create", DRAFTERS, ids=["ngram", "suffix"])
def test_drafter_when_a_text_repeats_then_drafts_what_followed(create: type[Drafter]) -> None:
    text = list(range(100, 140))
    drafter = create()
    assert drafter.propose(text, 5) == []
    assert drafter.propose([*text, 7, 8, *text[:6]], 5) == text[6:11]
    assert drafter.propose([*text, 7, 8, *text[:6], 9], 5) == []


@pytest.mark.parametrize("create", DRAFTERS, ids=["ngram", "suffix"])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_drafter_when_there_is_little_then_drafts_nothing_or_tokens_of_it(create: type[Drafter], count: int) -> None:
    assert set(create().propose([5] * count, 4)) <= {5}
    assert create().propose(list(range(count)), 4) == []


@pytest.mark.parametrize("create", DRAFTERS, ids=["ngram", "suffix"])
def test_drafter_when_one_token_repeats_for_long_then_takes_a_bounded_time(create: type[Drafter]) -> None:
    drafter, token_ids = create(), [5] * 20_000
    for _ in range(4):
        assert drafter.propose(token_ids, 7) == [5] * 7
        token_ids.append(5)


def test_suffix_when_continuations_differ_then_follows_most_of_them_as_far_as_most_agree() -> None:
    common, often, once = [1, 2, 3, 4], [50, 51, 60], [50, 70, 71]
    text = [*common, *often, 9, *common, *often, 8, *common, *once, 7, *common]
    assert SuffixLookup(2).propose(text, 7) == [*often, 8]
    assert PromptLookup(2, 4).propose(text, 3) == once  # the latest
    assert (
        SuffixLookup(2).propose([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 5, 9, 1, 2], 7) == []
    )  # no token has half of the votes


def test_suffix_when_the_agreement_is_short_then_drafts_no_more_than_agree() -> None:
    text = [*range(10, 30), 5, 10, 11]
    assert SuffixLookup(2).propose(text, 7) == [12, 13]
    assert SuffixLookup(2).propose([*range(10, 30), 5, *range(10, 16)], 7) == [16, 17, 18, 19, 20, 21]


def test_index_when_a_prompt_is_long_then_takes_it_in_call_by_call() -> None:
    token_ids = [*range(1000, 1000 + 2 * MAX_INDEXED), 1000 + MAX_INDEXED, 1001 + MAX_INDEXED]
    index = TokenIndex(2)
    assert list(index.places(token_ids)) == []
    assert list(index.places(token_ids)) == [MAX_INDEXED + 2]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "needs a method: ngram or suffix or mtp"),
        ('{"method": "eagle"}', "method eagle is not built"),
        ('{"method": 3}', "method must be ngram or suffix or mtp, got 3"),
        ('{"method": "ngram", "model": "x"}', "has no model, only method, num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens must be .* from 1 to 15, got 0"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens must be .* got True"),
        ('{"method": "ngram", "prompt_lookup_max": 33}', "prompt_lookup_max must be .* from 1 to 32, got 33"),
        ('{"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}', "prompt_lookup_min 4 is above"),
    ],
)
def test_speculative_config_when_wrong_then_says_which_key_and_bound(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--speculative-config {problem}") as caught:
        SpeculativeConfig.from_json(text)
    assert caught.value.param == "--speculative-config"


def test_speculative_config_when_given_then_makes_the_methods_drafter() -> None:
    assert SpeculativeConfig.from_json(NodeConfig(model="m").speculative_config) is None
    for method, kind in (("ngram", PromptLookup), ("suffix", SuffixLookup)):
        config = SpeculativeConfig.from_json(f'{{"method": "{method}"}}')
        assert config is not None
        create = config.create_drafter()
        assert create is not None
        assert isinstance(create(), kind)
        assert config.num_speculative_tokens == 7
    head = SpeculativeConfig.from_json('{"method": "mtp"}')
    assert head is not None
    assert head.create_drafter() is None
    assert head.num_speculative_tokens == 3


def test_acceptance_when_drafts_are_right_or_wrong_then_follows_them() -> None:
    acceptance = Acceptance()
    start = acceptance.rate
    for _ in range(20):
        acceptance.observe(7, 7)
    assert acceptance.rate > 0.97 > start
    for _ in range(40):
        acceptance.observe(7, 0)
    assert acceptance.rate < 0.1
    held_back = [acceptance.hold_back() for _ in range(128)]
    assert sum(held_back) == 2  # one token now and then, so that what changes is seen
    acceptance.observe(1, 1)
    assert acceptance.rate > 0.15  # which pays in a small batch


class Steps:
    """Steps that take ``row`` of a step longer with each row more than ``num_free``; drafts are right by chance."""

    def __init__(self, num_sequences: int, row: float, share: float, num_free: int = 0) -> None:
        self.allowance, self.num_sequences, self.row, self.share = Allowance(), num_sequences, row, share
        self.num_free = num_free
        self.rng = random.Random(1)
        self.seconds = self.without = 0.0
        self.num_drafts = 0

    def run(self, count: int, wanted: int | None = None) -> None:
        """``wanted``: drafts of a sequence; None: as many as pay."""
        plain = 0.010
        for _ in range(count):
            self.allowance.begin_step(self.num_sequences)
            cost = self.allowance.cost(self.num_sequences)
            limit = num_paying(self.share, 7, self.num_sequences, cost) if wanted is None else wanted
            drafts = [self.allowance.take(limit) for _ in range(self.num_sequences)]
            right = [next((i for i in range(n) if self.rng.random() >= self.share), n) for n in drafts]
            taken = plain * (1 + self.row * max(0, sum(drafts) - self.num_free))
            self.allowance.end_step(self.num_sequences, self.num_sequences + sum(drafts), sum(right), taken)
            self.seconds += taken
            self.without += plain * (self.num_sequences + sum(right)) / self.num_sequences
            self.num_drafts += sum(drafts)


@pytest.mark.parametrize(("num_sequences", "row"), [(1, 0.3), (1, 0.05), (4, 0.2), (16, 0.06), (64, 0.015)])
def test_allowance_when_drafts_are_never_right_then_next_to_nothing_is_lost(num_sequences: int, row: float) -> None:
    steps = Steps(num_sequences, row, 0.0)
    steps.run(64, 7)
    assert 1.0 < steps.seconds / steps.without < 1.015
    steps.run(2000, 7)
    assert steps.num_drafts > 10
    assert steps.seconds / steps.without < 1.007


@pytest.mark.parametrize(("num_sequences", "row", "least"), [(1, 0.3, 1.6), (1, 0.05, 3.0), (4, 0.05, 2.0)])
def test_allowance_when_drafts_are_right_then_they_are_run(num_sequences: int, row: float, least: float) -> None:
    steps = Steps(num_sequences, row, 0.85)
    steps.run(300, 5)
    assert steps.without / steps.seconds > least


def test_allowance_when_the_first_rows_are_free_then_next_to_no_more_than_those_are_run() -> None:
    """A processor without bfloat16: three rows more take no time, seven twice as long."""
    steps = Steps(1, 0.25, 0.8, num_free=3)
    steps.run(100)
    steps.seconds = steps.without = 0.0
    steps.num_drafts = 0
    steps.run(400)
    assert 3 <= steps.num_drafts / 400 <= 4.2
    assert steps.without / steps.seconds > 2.5  # 2.95 with three drafts in each step; 2.1 with seven


def test_allowance_when_nothing_is_known_of_so_many_sequences_then_steps_without_drafts_come_first() -> None:
    steps = Steps(2, 0.1, 1.0)
    steps.run(3, 1)
    assert steps.num_drafts == 0
    steps.run(1, 1)
    assert steps.num_drafts > 0
    steps.num_sequences, steps.num_drafts = 3, 0
    steps.run(3, 1)
    assert steps.num_drafts == 0
    # And now and then one without, so that what it takes is known.
    steps.run(200, 1)
    counts = []
    for _ in range(130):
        steps.num_drafts = 0
        steps.run(1, 1)
        counts.append(steps.num_drafts)
    assert counts.count(0) == 2


def test_allowance_when_a_number_of_rows_is_new_then_its_first_steps_say_nothing_of_its_cost() -> None:
    """They are not replayed, or recorded: several times as long, and once."""
    allowance = Allowance()
    for _ in range(4):
        allowance.begin_step(1)
        allowance.end_step(1, 1, 0, 1.0)
    before = allowance.cost(1)
    for seconds in (3.0, 2.9, 9.0):
        allowance.end_step(1, 2, 1, seconds)
    assert allowance.cost(1) == before
    allowance.end_step(1, 2, 1, 1.1)
    assert sum(allowance.cost(1)) == pytest.approx(1.1)


def test_allowance_when_a_step_computes_prompts_too_then_its_drafts_are_paid_as_if_it_did_not() -> None:
    steps = Steps(1, 0.3, 0.0)
    steps.run(5, 0)
    taken = []
    for _ in range(20):
        steps.allowance.begin_step(1)
        taken.append(steps.allowance.take(1))
        steps.allowance.end_step_with_prompts(1, taken[-1], 0)
    assert 0 < sum(taken) <= 2


@pytest.mark.parametrize(
    ("rate", "num_sequences", "cost", "least", "most"),
    [
        (0.9, 1, (1.0, 0.0, 0.05), 7, 7),
        (0.5, 1, (1.0, 0.0, 0.05), 3, 4),
        (0.02, 1, (1.0, 0.0, 0.05), 0, 0),
        (0.5, 1, (1.0, 0.0, 0.3), 1, 1),
        (0.6, 1, (1.0, 0.6, 0.02), 3, 6),  # one would not pay
        (0.8, 1, (1.0, -0.75, 0.25), 3, 3),  # the fourth is the first that costs
        (0.2, 1, (1.0, 0.6, 0.02), 0, 0),
        (0.5, 16, (1.6, 0.0, 0.04), 1, 1),
        (0.3, 16, (1.6, 0.0, 0.05), 0, 0),
        (0.9, 64, (64.0, 0.0, 1.0), 0, 0),  # rows cost what they bring
    ],
)
def test_drafts_when_more_would_cost_more_than_they_bring_then_are_as_many_as_pay(
    rate: float, num_sequences: int, cost: tuple[float, float, float], least: int, most: int
) -> None:
    assert least <= num_paying(rate, 7, num_sequences, StepCost(*cost)) <= most


def test_drafts_when_known_tokens_run_again_then_are_fewer_where_their_rows_cost_more() -> None:
    cost = StepCost(1.0, -0.75, 0.25)
    assert num_paying(0.5, 7, 1, cost, num_again=3) < num_paying(0.5, 7, 1, cost)
    each = StepCost(1.0, 0.0, 0.15)
    assert num_paying(0.8, 7, 1, each, runs_again=True) < num_paying(0.8, 7, 1, each)
    assert num_paying(0.8, 7, 1, StepCost(1.0, 0.0, 0.02), 2, runs_again=True) == 7
