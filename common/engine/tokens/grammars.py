"""The grammars of an engine's sequences in its steps: who waits for one, whose mask is filled, what a token does to it.

``begin`` when a request comes, ``take_failed`` and ``launch`` when a step is launched, ``take_ready`` and ``mask``
before it samples, ``consume`` for each token. A sequence whose grammar is not compiled when its first token is due is
held: it keeps the row that it would be sampled from, and the others go on. Sequences without a grammar cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

from common.engine.sampling.grammar import GrammarMasks, SequenceGrammar
from common.engine.sampling.grammar_compiler import GrammarCompiler
from common.engine.scheduling.schedule import Schedule
from common.engine.sequence import Sequence, SequenceStatus
from common.errors import DeadlineExceededError, InvalidRequestError, TandemError

Sampled = tuple[Sequence, Any]
"""A sequence, and the row [hidden] that its next token is sampled from."""


class StepGrammars:
    """Owned by the engine thread. Without ``compiler`` the model has no tokenizer, and no request a grammar."""

    def __init__(self, compiler: GrammarCompiler | None, masks: GrammarMasks | None) -> None:
        self._compiler = compiler
        self._masks = masks
        self._pending: list[Sequence] = []
        self._live: WeakSet[SequenceGrammar] = WeakSet()

    def wake_with(self, wake: Callable[[], None]) -> None:
        """``wake`` is called from a thread whenever a grammar is ready or has failed."""
        if self._compiler is not None:
            self._compiler.on_ready = wake

    def report_to(self, *, compiled: Callable[[float], None], filled: Callable[[float], None]) -> None:
        """``compiled`` is told the seconds of each compilation, ``filled`` those of a step's masks; from threads."""
        if self._compiler is not None and self._masks is not None:
            self._compiler.on_compiled, self._masks.on_filled = compiled, filled

    def prepare(self, text: str) -> None:
        """Begins to compile a grammar that a sequence will have. Callable from any thread."""
        if self._compiler is not None:
            self._compiler.prepare(text)

    @property
    def num_waiting(self) -> int:
        """Grammars that are compiled now, or wait for it."""
        return 0 if self._compiler is None else self._compiler.num_waiting

    def begin(self, sequence: Sequence) -> TandemError | None:
        """Starts to compile the sequence's grammar, if it has one; the error when there can be none here."""
        text = sequence.sampling.grammar if sequence.sampling is not None else None
        if text is None:
            return None
        if self._compiler is None:
            return InvalidRequestError(
                "the model has no tokenizer: its answers cannot be constrained", code="unsupported_parameter"
            )
        sequence.grammar = self._compiler.begin(text, sequence.output_token_ids)
        self._live.add(sequence.grammar)
        self._pending.append(sequence)
        return None

    def next_deadline_s(self) -> float | None:
        """When ``take_failed`` may have something new to say. Of those whose prompt is being pulled it says nothing."""
        waiting = (each for each in self._pending if each.status is not SequenceStatus.TRANSFERRING)
        return min((each.grammar.deadline_s for each in waiting if each.grammar is not None), default=None)

    def take_failed(self, now_s: float) -> list[tuple[Sequence, TandemError]]:
        """Sequences whose grammar has failed, or is not there by now; each is named once."""
        if not self._pending:
            return []
        failed, pending = [], []
        for sequence in self._pending:
            grammar = sequence.grammar
            assert grammar is not None
            if sequence.status is SequenceStatus.FINISHED:
                continue
            error = grammar.error
            if error is None and grammar.is_pending and now_s > grammar.deadline_s:
                error = DeadlineExceededError("the grammar was not compiled in time: others are before it")
            if error is not None and sequence.status is not SequenceStatus.TRANSFERRING:
                failed.append((sequence, error))
            elif error is not None or grammar.is_pending:
                pending.append(sequence)
        self._pending = pending
        return failed

    def launch(self, schedule: Schedule) -> None:
        """Fills the masks of those that the step will sample: what they depend on is known."""
        if self._masks is None:
            return
        if not self._live:
            self._masks.fill(())
            return
        due = [
            *(
                sequence
                for sequence, segment in zip(schedule.sequences, schedule.plan.segments, strict=True)
                if sequence.grammar is not None
                and segment.start + segment.num_tokens - len(sequence.drafts) == sequence.num_tokens
            ),
            *(sequence for sequence in schedule.row_only if sequence.grammar is not None),
        ]
        grammars, drafts = [], []
        for sequence in due:
            grammar = sequence.grammar
            if grammar is not None and not grammar.is_pending and grammar.error is None:
                grammar.hidden_token_ids = _hidden_token_ids(sequence)
                grammars.append(grammar)
                drafts.append(sequence.drafts)
        self._masks.fill(grammars, drafts)

    def take_ready(self, to_sample: Iterable[Sampled]) -> tuple[list[Sampled], list[tuple[Sequence, TandemError]]]:
        """Those of ``to_sample`` that can be sampled, and those that have failed. The others are held: they come again
        in a later step."""
        ready: list[Sampled] = []
        failed: list[tuple[Sequence, TandemError]] = []
        firsts: dict[str, Sequence] = {}
        for sequence, row in to_sample:
            if sequence.sampling is None or sequence.sampling.grammar is None:
                ready.append((sequence, row))
                continue
            assert self._masks is not None
            first = firsts.setdefault(sequence.request.request_id, sequence)
            if sequence.grammar is None:
                self._begin_fork(sequence, first)
            grammar = sequence.grammar
            assert grammar is not None
            if grammar.error is not None:
                failed.append((sequence, grammar.error))
            elif grammar.is_pending or not self._masks.has(grammar):
                # A copy: the row is a view of the step's.
                sequence.pending_row = row.to("cpu", copy=True)
            else:
                ready.append((sequence, row))
        return ready, failed

    def _begin_fork(self, sequence: Sequence, first: Sequence) -> None:
        """A continuation that begins beside the first one shares its mask, one that begins later has its own."""
        assert self._masks is not None
        grammar = first.grammar
        if first is not sequence and grammar is not None and self._masks.has(grammar) and not first.num_output_tokens:
            sequence.grammar = grammar.fork()
            self._live.add(sequence.grammar)
            self._masks.share(grammar, sequence.grammar)
        else:
            self.begin(sequence)

    def mask(self, sequence: Sequence, num_drafts: int = 0) -> memoryview | None:
        """Of a sequence that is ready, behind the first ``num_drafts`` of its drafts; None without a grammar."""
        if sequence.grammar is None:
            return None
        assert self._masks is not None
        return self._masks.row(sequence.grammar, num_drafts)

    @staticmethod
    def consume(sequence: Sequence, token_id: int) -> TandemError | None:
        """Tells the sequence's grammar of the token that was drawn for it."""
        grammar = sequence.grammar
        if grammar is None:
            return None
        grammar.consume(token_id)
        return grammar.error


def _hidden_token_ids(sequence: Sequence) -> frozenset[int]:
    """The ends that the request does not want yet."""
    sampling, eos_token_ids = sequence.sampling, sequence.request.eos_token_ids
    assert sampling is not None
    if sequence.num_output_tokens < sampling.min_tokens:
        return eos_token_ids | sampling.stop_token_ids
    return eos_token_ids if sampling.ignore_eos else frozenset()
