"""Constrained answers of a random alive model, which never emits sense by itself."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance.gbnf_to_lark import gbnf_to_lark

from common.engine.core import EngineCore
from common.engine.outputs import RequestOutput
from common.engine.sampling.grammar import GrammarMasks, SequenceGrammar
from common.engine.sampling.grammar_compiler import GrammarCompiler
from common.engine.sequence import SequenceStatus
from common.errors import DeadlineExceededError, GrammarError, InvalidRequestError, TandemError
from common.node.runtime import NodeModel
from common.openai.constraint import read_constraint
from common.request import FinishReason, Request, SamplingParams
from tests.engine.cores import engine, tokens, used
from tests.support.drafts import speculate

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["round", "square"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}


def grammar(**spelled: Any) -> str:
    constraint = read_constraint({"structured_outputs": spelled})
    assert constraint is not None

    async def lark_of(text: str, _: str) -> str:
        return gbnf_to_lark(text)

    return asyncio.run(constraint.in_lark(lark_of)).grammar()


JSON = grammar(json=SCHEMA)


@pytest.fixture(scope="module")
def shared() -> tuple[EngineCore, NodeModel]:
    return engine(max_num_seqs=12, kv_cache_memory=4 << 20)


def request(name: str, prompt: list[int], *, eos: frozenset[int] = frozenset({1}), **fields: Any) -> Request:
    num_forks, resumed = fields.pop("num_forks", 1), fields.pop("num_resumed_tokens", 0)
    params = SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": 200, "grammar": JSON, **fields})
    return Request(
        name, prompt, params, eos_token_ids=eos, num_forks=num_forks, num_resumed_tokens=resumed, arrival_s=0.0
    )


class Results:
    """Of every continuation: its tokens, how it ended, its error."""

    def __init__(self, core: EngineCore, *requests: Request, num_added: int = 0) -> None:
        woken = threading.Event()
        core.wake_with(woken.set)
        self.token_ids: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.errors: dict[str, Exception] = {}
        self.logprobs: list[Any] = []
        for each in requests:
            core.add_request(each)
        left = num_added + sum(each.num_forks for each in requests)
        for _ in range(4000):
            if not left:
                return
            outputs = core.step()
            left -= sum(output.finish_reason is not None for output in outputs)
            for output in outputs:
                self._take(output)
            if not outputs and not core.has_work():
                woken.wait(5.0)
                woken.clear()
        raise AssertionError(f"{left} continuations left")

    def _take(self, output: RequestOutput) -> None:
        key = (output.request_id, output.index)
        self.token_ids.setdefault(key, []).extend(output.token_ids)
        self.logprobs += output.logprobs or []
        if output.error is not None:
            self.errors[output.request_id] = output.error
        if output.finish_reason is not None:
            self.reasons[key] = output.finish_reason


def text(model: NodeModel, token_ids: list[int]) -> str:
    return str(model.loaded.tokenizer.decode(token_ids, skip_special_tokens=True))


def check(model: NodeModel, token_ids: list[int]) -> None:
    Draft202012Validator(SCHEMA).validate(json.loads(text(model, token_ids)))


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.3},
    "logprobs": {"logprobs": 3},
    "penalties": {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {20: 100.0, 1: 100.0}},
    "min_tokens": {"min_tokens": 199},
    "ignore_eos": {"ignore_eos": True},
    "hot": {"temperature": 2.0, "logit_bias": {1: 100.0}},
}


def test_constrained_rows_when_sampled_in_every_way_beside_others_then_each_answer_is_of_its_grammar(
    shared: tuple[EngineCore, NodeModel],
) -> None:
    core, model = shared
    prompts = {name: tokens(index, 20) for index, name in enumerate(VARIANTS)}
    free = request("free", tokens(99, 20), grammar=None, temperature=0.0, max_tokens=40, eos=frozenset())
    alone = Results(core, free).token_ids["free", 0]
    results = Results(core, *(request(name, prompts[name], **fields) for name, fields in VARIANTS.items()), free)
    assert not results.errors
    for name in VARIANTS:
        assert results.reasons[name, 0] is FinishReason.STOP
        assert results.token_ids[name, 0][-1] == 1
        check(model, results.token_ids[name, 0])
    # What nobody constrained is what it is alone, and no such thing.
    assert results.token_ids["free", 0] == alone
    with pytest.raises(ValueError, match=r"."):
        check(model, alone)
    # Reported are the model's own log-probabilities: what is reported first is not always what may come.
    assert any(entry.rank > 3 for entry in results.logprobs)
    assert all(len(entry.top) == 3 for entry in results.logprobs)
    assert used(model) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("spelled", "pattern"),
    [
        ({"regex": "[a-c]{3}-\\d{2,4}"}, r"[a-c]{3}-\d{2,4}"),
        ({"choice": ["yes", "no", "größer 😀"]}, "yes|no|größer 😀"),
        ({"grammar": 'root ::= "x" [0-9] "y" ("," "x" [0-9] "y")?'}, r"x\dy(,x\dy)?"),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ],
)
def test_other_kinds_when_sampled_then_the_answer_is_one_of_theirs(
    shared: tuple[EngineCore, NodeModel], spelled: dict[str, Any], pattern: str
) -> None:
    core, model = shared
    results = Results(core, request("r", tokens(3, 9), grammar=grammar(**spelled), max_tokens=120, temperature=0.7))
    answer = text(model, results.token_ids["r", 0])
    if results.reasons["r", 0] is FinishReason.STOP:
        assert re.fullmatch(pattern, answer)
    else:
        assert "json_object" in spelled  # a random model may go on for long


def test_forks_when_constrained_then_each_has_its_own_place_in_the_grammar(
    shared: tuple[EngineCore, NodeModel],
) -> None:
    core, model = shared
    results = Results(core, request("n", tokens(5, 30), num_forks=5))
    assert not results.errors
    answers = {text(model, results.token_ids["n", index]) for index in range(5)}
    assert len(answers) == 5
    for index in range(5):
        check(model, results.token_ids["n", index])


def test_preemption_when_constrained_then_the_answers_are_those_of_enough_memory(
    shared: tuple[EngineCore, NodeModel],
) -> None:
    core, _ = shared
    requests = [request(f"p{i}", tokens(40 + i, 30), seed=i, max_tokens=90) for i in range(5)]
    enough = Results(core, *requests)
    small_core, small_model = engine(kv_cache_memory=300_000, max_num_seqs=5)
    before = small_core.num_preemptions
    short = Results(small_core, *requests)
    assert small_core.num_preemptions > before
    assert short.token_ids == enough.token_ids
    assert not short.errors
    assert used(small_model) == (0, 0, 0, 0)


@pytest.mark.parametrize("share", [0.6, pytest.param(1.0, marks=pytest.mark.full)])
def test_answers_when_drafts_are_run_then_are_those_without_and_no_draft_is_of_another_grammar(
    shared: tuple[EngineCore, NodeModel], share: float
) -> None:
    core, model = shared
    requests = [request(name, tokens(index, 20), **fields) for index, (name, fields) in enumerate(VARIANTS.items())]
    requests.append(request("n", tokens(50, 20), num_forks=3))
    # As a budget of thought: llguidance cannot go back in it.
    counted = 'start: thought "</think>" /[a-c]{4}/\nthought[max_tokens=12]: /(.|\\n)*/'
    requests.append(request("counted", tokens(60, 20), grammar=counted))
    expected = Results(core, *requests)
    assert text(model, expected.token_ids["counted", 0]).partition("</think>")[2].strip("abc") == ""
    prompts = {each.request_id: list(each.prompt_token_ids) for each in requests}
    known = [prompts[name] + token_ids for (name, _), token_ids in expected.token_ids.items()]
    speculation = speculate(core, model, known, share)
    try:
        found = Results(core, *requests)
    finally:
        core._scheduler.speculation = None
    assert not found.errors
    assert found.token_ids == expected.token_ids
    assert found.reasons == expected.reasons
    assert speculation.num_accepted_tokens > 50
    assert used(model) == (0, 0, 0, 0)


def test_answers_when_a_grammar_forces_tokens_then_these_are_drafts_though_nobody_guesses(
    shared: tuple[EngineCore, NodeModel],
) -> None:
    core, model = shared
    fixed = grammar(regex="(yes|no), and that is all there is to say about it [0-9]{2}")
    asked = [
        request("free", tokens(1, 20), grammar=None, max_tokens=30),
        *(request(f"r{index}", tokens(2 + index, 20), grammar=fixed, temperature=index * 0.7) for index in range(3)),
    ]
    expected = Results(core, *asked)
    speculation = speculate(core, model, [], 0.0)
    try:
        found = Results(core, *asked)
    finally:
        core._scheduler.speculation = None
    assert found.token_ids == expected.token_ids
    assert found.reasons == expected.reasons
    assert speculation.num_accepted_tokens > 10
    assert used(model) == (0, 0, 0, 0)


def test_draft_when_nothing_may_follow_it_then_the_request_goes_on_without_it(
    shared: tuple[EngineCore, NodeModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a grammar says behind a token that nobody has said is no error of the request."""
    core, model = shared
    asked = request("r", tokens(3, 20))
    expected = Results(core, asked).token_ids
    trim, failed = SequenceGrammar.trim, []

    def failing(self: SequenceGrammar, mask: memoryview) -> None:
        trim(self, mask)
        if self.matcher is not None and len(failed) < 5 and behind[0]:
            failed.append(self)
            self.error = GrammarError("the grammar allows no token any more")

    behind = [False]
    consume = SequenceGrammar.consume

    def consumed(self: SequenceGrammar, token_id: int) -> None:
        consume(self, token_id)
        behind[0] = core._is_filling  # type: ignore[attr-defined]

    fill = GrammarMasks.fill

    def filled(self: GrammarMasks, *args: Any) -> None:
        core._is_filling, behind[0] = True, False  # type: ignore[attr-defined]
        fill(self, *args)
        core._is_filling, behind[0] = False, False  # type: ignore[attr-defined]

    monkeypatch.setattr(SequenceGrammar, "trim", failing)
    monkeypatch.setattr(SequenceGrammar, "consume", consumed)
    monkeypatch.setattr(GrammarMasks, "fill", filled)
    speculate(core, model, [list(asked.prompt_token_ids) + expected["r", 0]], 1.0, always=True)
    try:
        found = Results(core, asked)
    finally:
        core._scheduler.speculation = None
    assert len(failed) == 5
    assert not found.errors
    assert found.token_ids == expected


@pytest.mark.parametrize("num_resumed", [1, 5, 17])
def test_answer_when_it_goes_on_from_what_another_node_made_then_it_ends_the_same(
    shared: tuple[EngineCore, NodeModel], num_resumed: int
) -> None:
    core, _ = shared
    prompt = tokens(8, 25)
    whole = Results(core, request("w", prompt)).token_ids["w", 0]
    given = whole[:num_resumed]
    rest = Results(core, request("r", prompt + given, num_resumed_tokens=num_resumed)).token_ids["r", 0]
    assert given + rest == whole
    # From its beginning the grammar would refuse what follows; so does it what is not of it.
    other = Results(core, request("x", [*prompt, 77, *given[1:]], num_resumed_tokens=num_resumed))
    assert isinstance(other.errors["x"], GrammarError)
    assert "the answer so far is not of its grammar" in str(other.errors["x"])


def test_end_tokens_when_one_is_also_a_piece_of_text_then_no_answer_ends_inside(
    shared: tuple[EngineCore, NodeModel],
) -> None:
    _, model = shared
    # Pieces that only a free text has: one that the schema forces could not be both.
    vocabulary = model.loaded.tokenizer.get_vocab()
    ends = frozenset(vocabulary[piece] for piece in ("\u0120to", "\u0120be", "\u0120is", "\u0120of")) | {1}
    core, model = engine()  # the vocabulary is made with the model's ends
    compiler = core.grammars._compiler
    assert compiler is not None
    compiler._eos_token_ids = ends
    results = Results(core, request("e", tokens(6, 9), eos=ends, logit_bias=dict.fromkeys(ends, 20.0)))
    assert not results.errors
    assert results.reasons["e", 0] is FinishReason.STOP
    check(model, results.token_ids["e", 0][:-1])


def test_grammars_when_they_cannot_be_used_then_each_fails_its_request_alone(
    shared: tuple[EngineCore, NodeModel],
) -> None:
    core, model = shared
    bad = {
        "empty": "",
        "broken": grammar(regex="a(b"),
        "unknown": json.dumps({"grammars": [{"lark_grammar": 'start: "a" <|nope|>'}]}),
        "states": grammar(regex="(\\w\\W\\p{L}\\p{Greek}){1,2000}"),
        "row": json.dumps(
            {"grammars": [{"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}}]}
        ),
    }
    results = Results(
        core,
        *(request(name, tokens(1, 12), grammar=text, max_tokens=100) for name, text in bad.items()),
        request("clash", tokens(1, 12), allowed_token_ids=frozenset({300, 301})),
        request("good", tokens(2, 12)),
    )
    assert set(results.errors) - {"states"} == {*bad, "clash"} - {"states"}
    assert all(isinstance(error, GrammarError) for error in results.errors.values())
    check(model, results.token_ids["good", 0])
    assert used(model) == (0, 0, 0, 0)
    assert core.num_running == 0


def test_grammar_when_it_is_compiled_late_then_only_its_sequence_waits(
    shared: tuple[EngineCore, NodeModel],
) -> None:
    core, model = shared
    compiler = core.grammars._compiler
    assert compiler is not None
    gate, entered = threading.Event(), threading.Event()
    make = compiler._matcher

    def late(text: str) -> Any:
        entered.set()
        assert gate.wait(60)
        return make(text)

    compiler._matcher = late  # type: ignore[method-assign]
    try:
        core.add_request(request("late", tokens(11, 20), num_forks=2))
        core.add_request(request("free", tokens(12, 20), grammar=None, max_tokens=30, temperature=0.0, eos=frozenset()))
        assert entered.wait(60)
        free = [output for outputs in _steps(core) for output in outputs]
        assert {output.request_id for output in free} == {"free"}
        assert free[-1].finish_reason is FinishReason.LENGTH
        assert not core.has_work()  # nothing spins until the grammar is there
        gate.set()
        results = Results(core, request("other", tokens(13, 9)), num_added=2)
        for key in (("late", 0), ("late", 1), ("other", 0)):
            check(model, results.token_ids[key])
    finally:
        gate.set()
        del compiler._matcher
    assert used(model) == (0, 0, 0, 0)


def _steps(core: EngineCore) -> Iterator[list[RequestOutput]]:
    while True:
        outputs = core.step()
        yield outputs
        if not outputs and not core.has_work():
            return


def test_grammar_when_it_is_not_compiled_in_time_then_the_request_fails_with_a_deadline(
    shared: tuple[EngineCore, NodeModel],
) -> None:
    core, model = shared
    compiler = core.grammars._compiler
    assert compiler is not None
    gate = threading.Event()
    make = compiler._matcher
    compiler._matcher = lambda text: gate.wait(60) and make(text)  # type: ignore[method-assign,assignment,return-value]
    try:
        core.add_request(request("never", tokens(11, 20)))
        [sequence] = core._live.of_request("never")
        assert sequence.grammar is not None
        sequence.grammar.deadline_s = 0.0
        assert core.next_deadline_s() == 0.0
        status, sequence.status = sequence.status, SequenceStatus.TRANSFERRING
        assert core.next_deadline_s() is None  # the end of its pull wakes the engine
        sequence.status = status
        errors: list[TandemError | Exception | None] = [
            output.error for outputs in _steps(core) for output in outputs if output.error
        ]
        assert [type(each) for each in errors] == [DeadlineExceededError]
    finally:
        gate.set()
        del compiler._matcher
    assert used(model) == (0, 0, 0, 0)


def test_grammar_when_it_is_asked_for_again_while_it_is_compiled_then_it_is_compiled_once_and_others_go_on(
    shared: tuple[EngineCore, NodeModel],
) -> None:
    tokenizer = shared[0].grammars._compiler._vocabulary()  # type: ignore[union-attr]
    compiler = GrammarCompiler(lambda: tokenizer, frozenset({1}), wait_seconds=60)
    gate, entered, ready = threading.Event(), threading.Event(), threading.Semaphore(0)
    compiled: list[float] = []

    def hold_the_first(seconds: float) -> None:
        compiled.append(seconds)
        entered.set()
        assert len(compiled) > 1 or gate.wait(60)

    compiler.on_compiled, compiler.on_ready = hold_the_first, ready.release
    compiler.prepare(JSON)
    assert entered.wait(60)
    first, second = compiler.begin(JSON), compiler.begin(JSON)
    other = compiler.begin(grammar(regex="[a-z]+"))
    assert ready.acquire(timeout=60)
    assert (first.is_pending, second.is_pending, other.is_pending) == (True, True, False)
    assert compiler.num_waiting == 3
    gate.set()
    assert ready.acquire(timeout=60)
    assert ready.acquire(timeout=60)
    assert len(compiled) == 2
    assert first.error is second.error is None
    assert first.matcher is not second.matcher


def test_grammar_when_the_model_has_no_tokenizer_then_it_is_refused_by_name() -> None:
    core, _ = engine()
    core.grammars._compiler = None
    results = Results(core, request("g", tokens(1, 9)))
    assert isinstance(results.errors["g"], InvalidRequestError)
    assert "no tokenizer" in str(results.errors["g"])
