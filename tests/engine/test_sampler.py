"""The sampling pipeline against naive, row by row references."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.sampling.sampler import Sampler, SampleTask
from common.engine.sampling.token_counts import TokenCounts
from common.request import SamplingParams

VOCAB = 50


def random_logits(num_rows: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def task(prompt: Sequence[int] = (), output: Sequence[int] = (), index: int = 0, **params: object) -> SampleTask:
    return SampleTask(SamplingParams(**params), list(prompt), list(output), index)  # type: ignore[arg-type]


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all lists that become tensors, in order."""
    lengths: list[int] = []
    tensor = torch.tensor

    def counting(values: Any, *args: Any, **kwargs: Any) -> Tensor:
        lengths.append(len(values))
        return tensor(values, *args, **kwargs)

    monkeypatch.setattr(torch, "tensor", counting)
    return lengths


def drawn_frequencies(logits: Tensor, num_draws: int, **params: object) -> Tensor:
    """Empirical distribution over ``num_draws`` seeds."""
    rows = logits.expand(num_draws, -1)
    tokens = [r.token_id for r in Sampler().sample(rows, [task(seed=s, **params) for s in range(num_draws)])]
    return torch.bincount(torch.tensor(tokens), minlength=VOCAB) / num_draws


def naive_distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    probs = (logits.double() / temperature).softmax(-1)
    keep = probs >= min_p * probs.max()
    order = sorted(range(VOCAB), key=lambda i: -float(probs[i]))
    order = [i for i in order if keep[i]][: top_k or VOCAB]
    total = sum(float(probs[i]) for i in order)
    result, running = torch.zeros(VOCAB, dtype=torch.double), 0.0
    for i in order:
        if running < top_p:
            result[i] = probs[i]
        running += float(probs[i]) / total
    return result / result.sum()


def test_sample_when_all_rows_are_greedy_then_takes_the_largest_logit() -> None:
    logits = random_logits(7)
    results = Sampler().sample(logits, [task(temperature=0.0) for _ in range(7)])
    assert [r.token_id for r in results] == logits.argmax(-1).tolist()


def test_sample_when_the_step_has_no_rows_then_returns_nothing() -> None:
    assert Sampler().sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (1.5, 5, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.2, 12, 0.8, 0.05),
    ],
)
def test_sample_when_drawn_many_times_then_follows_the_naive_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(1, seed=3)
    expected = naive_distribution(logits[0], temperature, top_k, top_p, min_p)
    found = drawn_frequencies(logits, 8000, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert found[expected == 0].sum() == 0
    assert float((found - expected).abs().max()) < 4 * math.sqrt(0.25 / 8000)
    assert float((found - expected).abs().sum()) < 0.08


def test_sample_when_no_seed_is_given_then_rows_draw_independently() -> None:
    logits = random_logits(1, scale=0.1).expand(4000, -1)
    tokens = torch.tensor([r.token_id for r in Sampler(seed=1).sample(logits, [task() for _ in range(4000)])])
    found = torch.bincount(tokens, minlength=VOCAB) / 4000
    assert float((found - logits[0].softmax(-1)).abs().max()) < 0.015


def test_sample_when_seeded_then_does_not_depend_on_the_batch() -> None:
    logits = random_logits(6, seed=5)
    kinds = [
        task(seed=11),
        task(seed=12, top_k=7),
        task(temperature=0.0),
        task(seed=13, top_p=0.5, output=(1, 2)),
        task(),
        task(seed=14, min_p=0.1, temperature=0.7, repetition_penalty=1.3, prompt=(4, 9)),
    ]
    together = [r.token_id for r in Sampler(seed=0).sample(logits, kinds)]
    for row in (0, 1, 2, 3, 5):
        alone = Sampler(seed=99).sample(logits[row : row + 1], [kinds[row]])[0].token_id
        assert alone == together[row]
    backwards = [r.token_id for r in Sampler(seed=7).sample(logits.flip(0), kinds[::-1])][::-1]
    assert [t for i, t in enumerate(backwards) if i != 4] == [t for i, t in enumerate(together) if i != 4]


def _tied_rows(num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """As a bfloat16 head gives them: some hundred distinct values among thousands of tokens; some rows of one value."""
    rows = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    rows[::7] = (rows[::7] * 2).round() / 2
    rows[5::16] = 0.0
    return rows.bfloat16().float()


@pytest.mark.parametrize("vocab_size", [50, 3000, 20_000])
def test_sample_when_scores_are_equal_then_neither_tokens_nor_logprobs_depend_on_the_batch(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    logits = _tied_rows(48, vocab_size, seed=1)
    tasks = [
        task(
            seed=row,
            temperature=rng.choice([0.7, 1.0, 1.3]),
            top_k=rng.choice([0, 0, 1, 3, 40, 64, 65, 700, vocab_size - 1]),
            top_p=rng.choice([1.0, 1.0, 0.95, 0.5]),
            min_p=rng.choice([0.0, 0.0, 0.02]),
            logprobs=rng.choice([None, 0, 1, 5, 20]),
        )
        for row in range(48)
    ]
    alone = [Sampler().sample(logits[row : row + 1], [tasks[row]])[0] for row in range(48)]
    for _ in range(12):
        rows = rng.sample(range(48), rng.choice([2, 5, 16, 48]))
        assert Sampler().sample(logits[rows], [tasks[row] for row in rows]) == [alone[row] for row in rows]


@pytest.mark.parametrize("top_k", [1, 5, 64, 200, 4000])
def test_sample_when_scores_are_equal_then_top_k_keeps_the_first_tokens(top_k: int) -> None:
    logits = torch.zeros(400, 5000)
    logits[:, 4990] = 1.0
    drawn = {r.token_id for r in Sampler().sample(logits, [task(seed=s, top_k=top_k) for s in range(400)])}
    assert drawn <= {4990, *range(top_k - 1)}
    assert len(drawn) > min(top_k, 100) / 2
    best = Sampler().sample(logits[:1], [task(seed=1, logprobs=4)])[0].top
    assert [token for token, _ in best] == [4990, 0, 1, 2]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.999])
def test_sample_when_the_mass_is_spread_over_tens_of_thousands_of_tokens_then_top_p_keeps_the_first_ones(
    top_p: float,
) -> None:
    size = 40_000
    drawn = [
        r.token_id for r in Sampler().sample(torch.zeros(60, size), [task(seed=s, top_p=top_p) for s in range(60)])
    ]
    assert 0.8 * top_p * size < max(drawn) < top_p * size + 1


@pytest.mark.parametrize("changed", [{"index": 1}, {"output_token_ids": [0]}, {"params": SamplingParams(seed=2)}])
def test_sample_when_fork_position_or_seed_differs_then_draws_anew(changed: dict[str, object]) -> None:
    flat = torch.zeros(1, 4096)
    first = task(seed=1)
    a = Sampler().sample(flat, [first])[0].token_id
    b = Sampler().sample(flat, [replace(first, **changed)])[0].token_id  # type: ignore[arg-type]
    assert a != b


def test_sample_when_penalties_are_set_then_scores_equal_the_naive_reference() -> None:
    logits = random_logits(3, seed=8)
    prompt, output = [1, 2, 3, 3], [3, 4, 4, 4, 5]
    settings = [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.1, "frequency_penalty": 0.4},
        {"repetition_penalty": 0.6, "presence_penalty": -0.5, "frequency_penalty": -0.2},
    ]
    for row, setting in enumerate(settings):
        expected = logits[row].clone().double()
        p = SamplingParams(**setting)  # type: ignore[arg-type]
        for token in set(prompt + output):
            value = expected[token]
            expected[token] = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        for token in set(output):
            expected[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
        # The whole penalised distribution shows through the draws of many seeds at once.
        rows = logits[row].expand(6000, -1)
        tasks = [task(prompt, output, seed=s, **setting) for s in range(6000)]
        found = (
            torch.bincount(torch.tensor([r.token_id for r in Sampler().sample(rows, tasks)]), minlength=VOCAB) / 6000
        )
        assert float((found - expected.softmax(-1)).abs().max()) < 0.025
        greedy = Sampler().sample(logits[row : row + 1], [task(prompt, output, temperature=0.0, **setting)])[0]
        assert greedy.token_id == int(expected.argmax())


@pytest.mark.parametrize("seed", range(3))
def test_sample_when_a_sequence_is_counted_step_by_step_then_tokens_are_those_of_counting_all_of_it(seed: int) -> None:
    rng = random.Random(seed)
    params = [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "frequency_penalty": 0.3},
        {"presence_penalty": 0.5, "frequency_penalty": -0.2, "temperature": 0.0},
        {},
    ]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(20))] for _ in params]
    outputs: list[list[int]] = [[] for _ in params]
    counts = [TokenCounts() for _ in params]
    for step in range(40):
        rows = rng.sample(range(len(params)), rng.randrange(1, len(params) + 1))  # others wait, or are preempted
        logits = random_logits(len(rows), seed=1000 * seed + step)
        whole = [task(prompts[row], outputs[row], **{"seed": row, **params[row]}) for row in rows]
        kept = [replace(each, counts=counts[row]) for row, each in zip(rows, whole, strict=True)]
        tokens = Sampler().sample(logits, kept)
        assert tokens == Sampler().sample(logits, whole)
        for row, token in zip(rows, tokens, strict=True):
            outputs[row].append(token.token_id)


def test_sample_when_a_sequence_was_counted_then_its_prompt_is_not_read_again() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 9] = 2.0, 1.5
    penalised = replace(task(prompt=[7] * 3, temperature=0.0, repetition_penalty=2.0), counts=TokenCounts())
    assert Sampler().sample(logits, [penalised])[0].token_id == 9
    blank = replace(penalised, prompt_token_ids=[])
    assert Sampler().sample(logits, [blank])[0].token_id == 9


def test_sample_when_a_frequent_token_leads_by_less_than_its_penalty_then_greedy_takes_the_next() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 9] = 2.0, 1.5
    penalised = task(output=[7, 7], temperature=0.0, frequency_penalty=0.3)
    assert Sampler().sample(logits, [penalised])[0].token_id == 9
    assert Sampler().sample(logits, [task(prompt=[7, 7], temperature=0.0, frequency_penalty=0.3)])[0].token_id == 7


def test_sample_when_logit_bias_is_given_then_shifts_only_that_row() -> None:
    logits = random_logits(2, seed=4)
    banned = int(logits[0].argmax())
    tasks = [task(temperature=0.0, logit_bias={banned: -100.0, 5: 100.0}), task(temperature=0.0)]
    results = Sampler().sample(logits, tasks)
    assert results[0].token_id == 5
    assert results[1].token_id == int(logits[1].argmax())


def test_sample_when_below_min_tokens_then_never_ends() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 2], logits[0, 3] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=frozenset({2}))
    early = SampleTask(params, [5], [6], eos_token_ids=frozenset({1}))
    assert Sampler().sample(logits, [early])[0].token_id == 3
    assert Sampler().sample(logits, [replace(early, output_token_ids=[6, 6])])[0].token_id == 1


def test_sample_when_tokens_are_allowed_then_only_these_are_drawn_and_other_rows_are_not_touched() -> None:
    logits = random_logits(40, seed=5)
    allowed = frozenset({3, 9, 41})
    tasks = [task(seed=row, allowed_token_ids=allowed if row % 2 else None) for row in range(40)]
    free = [each.token_id for each in Sampler().sample(logits, [task(seed=row) for row in range(40)])]
    drawn = [each.token_id for each in Sampler().sample(logits, tasks)]
    assert set(drawn[1::2]) == allowed
    assert drawn[::2] == free[::2]
    assert not set(free[1::2]) <= allowed
    greedy = Sampler().sample(logits[:1], [task(temperature=0.0, allowed_token_ids=allowed)])
    assert greedy[0].token_id == max(allowed, key=lambda token: float(logits[0, token]))


def test_sample_when_many_requests_have_allowed_tokens_then_each_list_is_made_once_and_goes_with_its_request(
    converted: list[int],
) -> None:
    logits, sampler = random_logits(40, seed=5), Sampler()
    allowed = [frozenset(range(number, VOCAB)) for number in range(40)]
    tasks = [task(temperature=0.0, allowed_token_ids=each) for each in allowed]
    first = sampler.sample(logits, tasks)
    assert sampler.sample(logits, tasks) == first
    assert converted == [VOCAB - number for number in range(40)]
    is_kept = [weakref.ref(each) for each in allowed]
    del allowed, tasks
    gc.collect()
    assert [each() for each in is_kept] == [None] * 40
    assert len(sampler.lists) == 0


@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_sample_when_rows_have_masks_then_only_these_tokens_come_and_other_rows_are_not_touched(share: float) -> None:
    draw, logits = random.Random(3), random_logits(60, seed=6)
    best: list[int] = logits.argmax(-1).tolist()
    allowed = [[each for each in range(VOCAB) if each != no and draw.random() < share] or [no ^ 1] for no in best]
    words = [sum(1 << token for token in each).to_bytes(8, "little") for each in allowed]
    masks = [memoryview(bytearray(each)).cast("I") for each in words]
    kinds: list[dict[str, object]] = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"temperature": 0.0, "logprobs": 1}]
    free = [task(seed=row, **kinds[row % 4]) for row in range(60)]
    tasks = [replace(each, mask=masks[row]) if row % 3 else each for row, each in enumerate(free)]
    for rows in (range(60), range(0, 60, 4)):  # the second: greedy alone
        found = [each.token_id for each in Sampler().sample(logits[rows], [tasks[row] for row in rows])]
        others = [each.token_id for each in Sampler().sample(logits[rows], [free[row] for row in rows])]
        for row, token, other in zip(rows, found, others, strict=True):
            if not row % 3:
                assert token == other
                continue
            assert token in allowed[row]
            if "temperature" in kinds[row % 4]:
                assert other == best[row]
                assert token == max(allowed[row], key=lambda each: float(logits[row, each]))


def test_sample_when_only_ends_are_allowed_before_min_tokens_then_one_is_drawn() -> None:
    params = SamplingParams(min_tokens=5, allowed_token_ids=frozenset({1, 2}), stop_token_ids=frozenset({2}))
    ending = SampleTask(params, [5], [], eos_token_ids=frozenset({1}))
    assert Sampler().sample(random_logits(1), [ending])[0].token_id in {1, 2}


def test_sample_when_words_are_bad_then_the_token_that_would_complete_one_is_not_drawn() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 6], logits[0, 7] = 9.0, 8.0, 7.0
    bad = {"temperature": 0.0, "bad_token_ids": ((4,), (5, 6), (1, 2, 7))}
    sample = Sampler().sample
    assert sample(logits, [task(**bad)])[0].token_id == 6
    assert sample(logits, [task(output=[5], **bad)])[0].token_id == 7
    assert sample(logits, [task(prompt=[5], output=[3], **bad)])[0].token_id == 6
    logits[0, 6] = 0.0
    assert sample(logits, [task(output=[1, 2], **bad)])[0].token_id not in {4, 7}
    assert sample(logits, [task(output=[2], **bad)])[0].token_id == 7
    assert sample(logits, [task(allowed_token_ids=frozenset({4}), **bad)])[0].token_id == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_when_only_ends_and_bad_words_are_allowed_before_min_tokens_then_a_bad_word_is_drawn(
    temperature: float,
) -> None:
    params = SamplingParams(
        temperature=temperature, min_tokens=1, allowed_token_ids=frozenset({5, 9}), bad_token_ids=((5,),)
    )
    before = SampleTask(params, [7], [], eos_token_ids=frozenset({9}))
    assert Sampler().sample(random_logits(1), [before])[0].token_id == 5
    assert Sampler().sample(random_logits(1), [replace(before, output_token_ids=[5])])[0].token_id == 9


class Words(tuple[tuple[int, ...], ...]):
    num_reads = 0

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        self.num_reads += 1
        return super().__iter__()


def test_sample_when_a_request_says_much_of_tokens_then_it_is_read_once_and_not_in_each_step(
    converted: list[int],
) -> None:
    bad = Words((*((token,) for token in range(10, 20)), *((1, 2, token) for token in range(4, 10))))
    params = SamplingParams(
        temperature=0.0,
        min_tokens=9,
        logit_bias={token: token / 8 for token in range(20, 40)},
        stop_token_ids=frozenset(range(40, VOCAB)),
        bad_token_ids=bad,
    )
    forks = [SampleTask(params, [5], [], index, frozenset({3})) for index in range(3)]
    sampler, outputs = Sampler(), [[], [1], [1, 2], [2, 2], [2, 1, 2]]
    sampler.sample(random_logits(3), forks)
    num_reads = bad.num_reads
    assert max(converted) == 20
    converted.clear()
    found = []
    for step, output in enumerate(outputs):
        tasks = [replace(each, output_token_ids=output) for each in forks]
        found.append(sampler.sample(random_logits(3, seed=step), tasks))
    assert bad.num_reads == num_reads
    assert max(converted) <= 3 * len(forks)  # a number for each row, and what completes a word
    for step, output in enumerate(outputs):
        tasks = [replace(each, output_token_ids=output) for each in forks]
        assert Sampler().sample(random_logits(3, seed=step), tasks) == found[step]


def test_sample_when_bad_words_begin_alike_or_end_alike_then_each_is_kept_from_coming() -> None:
    rng, words = random.Random(4), ((1, 2), (2, 2), (1, 1, 2), (2, 1, 2, 0), (1, 2, 1), (0, 0, 0, 1), (2, 2, 0))
    for _ in range(200):
        output = [rng.randrange(3) for _ in range(rng.randrange(6))]
        logits = torch.zeros(1, VOCAB)
        logits[0, :4] = torch.tensor([9.0, 8.0, 7.0, 6.0])
        banned = {word[-1] for word in words if tuple(output[-len(word) + 1 :]) == word[:-1]}
        drawn = Sampler().sample(logits, [task(output=output, temperature=0.0, bad_token_ids=words)])
        assert drawn[0].token_id == min({0, 1, 2, 3} - banned)


def test_sample_when_tokens_are_named_then_their_logprobs_are_told_instead_of_the_likeliest() -> None:
    logits = random_logits(2, seed=8)
    expected = logits.log_softmax(-1)
    named, usual = Sampler().sample(
        logits, [task(temperature=0.0, logprobs=1, logprob_token_ids=(30, 2, 17)), task(temperature=0.0, logprobs=1)]
    )
    assert dict(named.top) == pytest.approx({token: float(expected[0, token]) for token in (30, 2, 17)})
    assert [value for _, value in named.top] == sorted((value for _, value in named.top), reverse=True)
    assert [token for token, _ in usual.top] == [int(expected[1].argmax())]


def test_sample_when_logprobs_are_asked_then_values_are_of_the_raw_distribution() -> None:
    logits = random_logits(3, seed=6)
    tasks = [
        task(seed=1, temperature=0.3, top_k=2, logprobs=4),
        task(temperature=0.0, logprobs=0, logit_bias={8: 100.0}),
        task(temperature=0.0),
    ]
    results = Sampler().sample(logits, tasks)
    expected = logits.log_softmax(-1)
    for row in (0, 1):
        token = results[row].token_id
        assert results[row].logprob == pytest.approx(float(expected[row, token]), abs=1e-6)
        assert results[row].rank == 1 + int((expected[row] > expected[row, token]).sum())
    values, order = expected[0].topk(4)
    assert [t for t, _ in results[0].top] == order.tolist()
    assert [v for _, v in results[0].top] == pytest.approx(values.tolist(), abs=1e-6)
    assert results[1].token_id == 8
    assert results[1].top == ()
    assert results[2].rank == 0


def test_prompt_logprobs_when_given_next_tokens_then_equal_log_softmax() -> None:
    logits = random_logits(5, seed=9)
    following = [3, 1, 4, 1, 5]
    results = Sampler().prompt_logprobs(logits, following, 2)
    expected = logits.log_softmax(-1)
    for row, token in enumerate(following):
        assert results[row].token_id == token
        assert results[row].logprob == pytest.approx(float(expected[row, token]), abs=1e-6)
        assert [t for t, _ in results[row].top] == expected[row].topk(2).indices.tolist()


def test_sample_when_given_then_leaves_the_logits_alone() -> None:
    logits = random_logits(2)
    before = logits.clone()
    Sampler(seed=0).sample(logits, [task(logit_bias={1: 5.0}, repetition_penalty=2.0, prompt=[1]), task(min_p=0.5)])
    assert torch.equal(logits, before)


WAYS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.05},
)


def test_draw_when_tasks_are_plain_then_gives_the_tokens_of_sample() -> None:
    logits = random_logits(len(WAYS), seed=5)
    tasks = [task(output=(1, 2), seed=9, **way) for way in WAYS]
    behind = [task(output=(1,), seed=9, **way) for way in WAYS]
    expected = [each.token_id for each in Sampler(0).sample(logits, tasks)]
    assert Sampler(0).draw(logits, tasks).tolist() == expected
    assert Sampler(0).draw(logits, [replace(each, num_unknown=1) for each in behind]).tolist() == expected
    assert Sampler(0).draw(logits, behind).tolist() != expected


def test_draw_when_on_a_device_then_asks_for_no_value() -> None:
    """The meta device has none."""
    logits = torch.empty(len(WAYS), 3000, device="meta")
    tokens = Sampler(0).draw(logits, [task(seed=9, **way) for way in WAYS])
    assert (tokens.device.type, tokens.shape) == ("meta", (len(WAYS),))
    with pytest.raises(NotImplementedError):
        Sampler(0).sample(logits, [task(seed=9, **way) for way in WAYS])
