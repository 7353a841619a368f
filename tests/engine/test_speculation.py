"""Speculative decoding changes no answer: tokens and log-probabilities against those of the same engine without drafts,
for every family, however many drafts are right; with controls in which the rollback is damaged.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from common.engine.core import EngineCore
from common.engine.outputs import RequestOutput
from common.kv_cache.sequences.allocation import Allocation
from common.kv_cache.sequences.rollback import Rollback
from common.node.runtime import NodeModel
from common.request import Request, SamplingParams, TokenLogprob
from tests.engine.cores import engine, run, tokens, used
from tests.support.drafts import speculate
from tests.support.models import DEMO, FAMILIES, RECURRENT_FAMILIES, tiered

ROOMY = {"kv_cache_memory": 16 << 20, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 96}
LENGTHS = (5, 33, 70, 48)
GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": 2}
DRAWN: dict[str, Any] = {
    "temperature": 0.8,
    "seed": 5,
    "presence_penalty": 0.4,
    "repetition_penalty": 1.1,
    "logit_bias": {20: 1.5, 33: -2.0},
    "min_p": 0.02,
    "min_tokens": 12,
    "stop_token_ids": frozenset(range(10, 60)),
    "logprobs": 2,
}
SHORT = (("granitemoehybrid", "drawn", False),)

Answers = dict[tuple[str, int], list[TokenLogprob]]


def requests(sampling: dict[str, Any], num_tokens: int = 40, salt: str | None = None) -> list[Request]:
    """The second one has two answers. ``salt``: of a cache in which nothing is yet."""
    return [
        Request(
            f"r{index}",
            tokens(index, length),
            SamplingParams(**{"max_tokens": num_tokens, **sampling}),
            num_forks=2 if index == 1 else 1,
            cache_salt=salt,
            arrival_s=0.0,
        )
        for index, length in enumerate(LENGTHS)
    ]


def answers_of(core: EngineCore, model: NodeModel, *asked: Request) -> Answers:
    found: Answers = {}
    for each in asked:
        core.add_request(each)
    for step in run(core):
        assert model.manager.check() == []
        for output in step:
            assert output.error is None
            _take(found, output)
    assert used(model) == (0, 0, 0, 0)
    return found


def _take(found: Answers, output: RequestOutput) -> None:
    assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
    entries = output.logprobs or [TokenLogprob(token_id, 0.0, 0) for token_id in output.token_ids]
    found.setdefault((output.request_id, output.index), []).extend(entries)


def ids(answers: Answers) -> dict[tuple[str, int], list[int]]:
    return {key: [entry.token_id for entry in entries] for key, entries in answers.items()}


def wholes(asked: list[Request], answers: Answers) -> list[list[int]]:
    """Prompts with their answers, for the oracle."""
    prompts = {each.request_id: list(each.prompt_token_ids) for each in asked}
    return [prompts[name] + token_ids for (name, _), token_ids in ids(answers).items()]


def check_equal(found: Answers, expected: Answers) -> None:
    assert ids(found) == ids(expected)
    for key, entries in expected.items():
        for entry, other in zip(entries, found[key], strict=True):
            assert other.logprob == pytest.approx(entry.logprob, abs=2e-4), key
            assert [token for token, _ in other.top] == [token for token, _ in entry.top], key


@pytest.mark.parametrize(
    ("family", "drawn", "saves_each"),
    [
        each if each in SHORT else pytest.param(*each, marks=pytest.mark.full)
        for each in itertools.product(FAMILIES, ("greedy", "drawn"), (False, True))
    ],
)
def test_answers_when_drafts_are_right_never_always_or_by_chance_then_are_those_without(
    family: str, drawn: str, saves_each: bool
) -> None:
    """``saves_each``: there is a state behind each draft; else what is right is computed again behind a wrong one."""
    sampling = GREEDY if drawn == "greedy" else DRAWN
    core, model = engine(family, **ROOMY)
    asked = requests(sampling)
    expected = answers_of(core, model, *asked)
    assert sampling is GREEDY or any(len(each) < 40 for each in expected.values())  # some have ended at a stop token
    known = wholes(asked, expected)
    for share, salt in ((0.0, "none"), (1.0, "all"), (0.6, "some"), (0.6, "some")):  # the last time from the cache
        speculation = speculate(core, model, known, share, saves_each=saves_each)
        check_equal(answers_of(core, model, *requests(sampling, salt=salt)), expected)
        assert speculation.num_drafts > 10
        right = speculation.num_accepted_tokens / speculation.num_draft_tokens
        assert (right == 0.0) if share == 0.0 else (right == 1.0) if share == 1.0 else 0.2 < right < 0.9
        assert sum(speculation.num_accepted_by_place) == speculation.num_accepted_tokens


def _keep_running_slot(self: Rollback, allocation: Allocation, end: int, num_right: int) -> int:
    """The state of all drafts is taken for that of the right ones."""
    self._coordinator.slots.drop(allocation.rollback.values())
    allocation.rollback.clear()
    return num_right


class _Swapped:
    """Each sequence is settled with the count of another one of its step: of the last one that was settled."""

    def __init__(self, settle: Any) -> None:
        self._settle, self._last = settle, 0

    def __call__(self, rollback: Rollback, allocation: Allocation, end: int, num_right: int) -> int:
        known = min(allocation.rollback)
        own, self._last = num_right - known, self._last
        position: int = self._settle(rollback, allocation, end, min(known + self._last, end))
        self._last = own
        return min(position, num_right) if position != end else num_right


@pytest.mark.parametrize("family", tiered(RECURRENT_FAMILIES, ("granitemoehybrid",)))
def test_answers_when_the_rollback_is_damaged_then_are_others(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core, model = engine(family, **ROOMY)
    asked = requests({"temperature": 0.0})
    expected = answers_of(core, model, *asked)
    settle = Rollback.settle
    swapped = _Swapped(settle)
    for damaged in (_keep_running_slot, lambda *args: swapped(*args)):
        speculate(core, model, wholes(asked, expected), 0.6)
        with monkeypatch.context() as broken:
            broken.setattr(Rollback, "settle", damaged)
            found = ids(answers_of(core, model, *requests({"temperature": 0.0}, salt=str(damaged))))
        assert found != ids(expected)


@pytest.mark.parametrize("method", ["ngram", pytest.param("suffix", marks=pytest.mark.full)])
def test_answers_when_a_drafter_guesses_by_itself_then_are_those_without_in_fewer_steps(method: str) -> None:
    """Of the built-in model, which repeats itself; some are right."""
    found: list[Answers] = []
    num_steps = []
    for drafts in ("", f'{{"method": "{method}", "num_speculative_tokens": 5}}'):
        core, model = engine(DEMO, **ROOMY, speculative_config=drafts)
        if core.speculation is not None:
            core.speculation.adapts = False  # what pays here and now is another machine's business
        asked = [
            Request(f"r{index}", tokens(index, 30) * 2, SamplingParams(temperature=0.0, max_tokens=80), arrival_s=0.0)
            for index in range(3)
        ]
        before = core.step
        count = [0]

        def step(before: Any = before, count: list[int] = count) -> list[RequestOutput]:
            count[0] += 1
            outputs: list[RequestOutput] = before()
            return outputs

        core.step = step  # type: ignore[method-assign]
        found.append(answers_of(core, model, *asked))
        num_steps += count
    assert ids(found[1]) == ids(found[0])
    assert core.speculation is not None
    assert core.speculation.num_accepted_tokens > 30
    assert num_steps[1] < num_steps[0]
