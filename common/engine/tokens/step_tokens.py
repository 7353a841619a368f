"""Samples what a step has computed: one token of each sequence; with drafts as many as were right, and one.

A row behind drafts is sampled as if these were the sequence's own: with its penalties, its seed and its mask at that
place. It counts only when each draft before it equals what was sampled in its place: so the tokens are those that come
without drafts, one by one. 1 ``verify`` for each sequence with drafts, 2 ``sample``: draw all rows, append what is
right, 3 publish of the step what the right tokens have written, and take the state back to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch

from common.engine.model_runner import ModelRunner
from common.engine.outputs import OutputList
from common.engine.plan import Rows, Segment
from common.engine.sampling.sampler import Sampler, SampleTask
from common.engine.scheduler import Scheduler
from common.engine.scheduling.schedule import Schedule
from common.engine.sequence import Sequence
from common.engine.tokens.grammars import Sampled, StepGrammars
from common.kv_cache.manager import KVCacheManager
from common.request import TokenLogprob


@dataclass(frozen=True, slots=True)
class _Verified:
    """A sequence with drafts. ``rows``: [hidden] each, the last known token's and those of its ``drafts``. ``end``:
    tokens that the step ran of it, drafts and all."""

    sequence: Sequence
    rows: SequenceOf[torch.Tensor]
    drafts: list[int]
    end: int


class StepTokens:
    """Owned by the engine thread. ``fail`` and ``end``: what becomes of a sequence that cannot be sampled, or is
    complete."""

    def __init__(
        self,
        scheduler: Scheduler,
        manager: KVCacheManager,
        runner: ModelRunner,
        sampler: Sampler,
        grammars: StepGrammars,
        outputs: OutputList,
        *,
        max_model_len: int,
        clock: Callable[[], float],
        fail: Callable[[Sequence, Exception], None],
        end: Callable[[Sequence], None],
    ) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._runner = runner
        self._sampler = sampler
        self._grammars = grammars
        self._outputs = outputs
        self._max_model_len = max_model_len
        self._clock = clock
        self._fail = fail
        self._end = end
        self._to_verify: list[_Verified] = []

    def verify(self, sequence: Sequence, segment: Segment, hidden: torch.Tensor) -> None:
        """The step has run ``segment`` with the sequence's drafts; ``hidden``: all its rows. They are sampled with the
        next ``sample``."""
        first = sequence.num_tokens - 1 - segment.start
        drafts, sequence.drafts = sequence.drafts, []
        rows = hidden[first : first + 1 + len(drafts)].unbind()
        self._to_verify.append(_Verified(sequence, rows, drafts, segment.start + segment.num_tokens))

    def sample(self, to_sample: list[Sampled]) -> None:
        to_sample, failed = self._grammars.take_ready(to_sample)
        verified, self._to_verify = self._to_verify, []
        to_verify = []
        for item in verified:
            if item.sequence.grammar is not None and (error := item.sequence.grammar.error) is not None:
                failed.append((item.sequence, error))
            else:
                to_verify.append(item)
        for sequence, refusal in failed:
            self._fail(sequence, refusal)
        self._sample(to_sample, to_verify)

    def _sample(self, to_sample: list[Sampled], to_verify: list[_Verified]) -> None:
        if not to_sample and not to_verify:
            return
        try:
            tokens = self._draw(to_sample, to_verify)
        except Exception as exc:  # noqa: BLE001  # whatever it is, one of the rows may have caused it
            self._sample_apart(to_sample, to_verify, exc)
            return
        self._take_all([sequence for sequence, _ in to_sample], tokens[: len(to_sample)])
        at = len(to_sample)
        for item in to_verify:
            self._take_right_ones(item, tokens[at : at + len(item.rows)])
            at += len(item.rows)

    def drawer(self, schedule: Schedule, num_unknown: int = 0) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What draws the step's tokens on the device, behind its forward; ``take`` then takes them. None: a sequence of
        the step needs the host for its token, or has none due. ``num_unknown``: as of the tasks."""
        if schedule.row_only or not schedule.sequences:
            return None
        for sequence, segment in zip(schedule.sequences, schedule.plan.segments, strict=True):
            if sequence.grammar is not None or sequence.is_over:
                return None
            if not sequence.is_prompt_done or segment.num_tokens > 1 or segment.rows is not Rows.LAST:
                return None
        tasks = [replace(self._task(sequence), num_unknown=num_unknown) for sequence in schedule.sequences]
        if not all(task.is_plain for task in tasks):
            return None
        return lambda logits: self._sampler.draw(logits, tasks)

    def take(self, drawn: SequenceOf[tuple[Sequence, int]]) -> None:
        """Appends and reports what ``drawer`` drew."""
        self._take_all([sequence for sequence, _ in drawn], [TokenLogprob(token, 0.0, 0) for _, token in drawn])

    def _take_all(self, sequences: SequenceOf[Sequence], tokens: SequenceOf[TokenLogprob]) -> None:
        """One token each."""
        now = self._clock()
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.first_token_s is None:
                sequence.first_token_s = now
            if self._take(sequence, token) and sequence.finish_reason is not None:
                self._end(sequence)

    def _sample_apart(self, to_sample: list[Sampled], to_verify: list[_Verified], cause: Exception) -> None:
        """A row's draw does not depend on the others'."""
        if len(to_sample) + len(to_verify) > 1:
            for each in to_sample:
                self._sample([each], [])
            for item in to_verify:
                self._sample([], [item])
        elif to_sample:
            self._fail(to_sample[0][0], cause)
        elif to_verify[0].drafts:
            # It may be a row behind a draft that nobody says.
            self._sample([], [replace(to_verify[0], rows=to_verify[0].rows[:1], drafts=[])])
        else:
            self._fail(to_verify[0].sequence, cause)

    def _take(self, sequence: Sequence, token: TokenLogprob) -> bool:
        """Appends and reports a token. False: it failed the sequence."""
        if (refused := self._grammars.consume(sequence, token.token_id)) is not None:
            self._fail(sequence, refused)
            return False
        sequence.append(token.token_id)
        sequence.check_stop(token.token_id, self._max_model_len)
        self._outputs.add(sequence, token)
        return True

    def _take_right_ones(self, item: _Verified, tokens: list[TokenLogprob]) -> None:
        """Of the tokens behind drafts those that are the sequence's, the one in place of the first wrong draft
        included; then the step is complete for the sequence."""
        sequence, num_right = item.sequence, 0
        num_known = sequence.num_tokens
        if item.drafts:  # first, because the answer's last output reports it
            same = (token.token_id == draft for token, draft in zip(tokens, item.drafts, strict=False))
            assert self._scheduler.speculation is not None
            self._scheduler.speculation.observe(sequence, len(item.drafts), sum(itertools.takewhile(bool, same)))
        for token, draft in zip(tokens, [*item.drafts, None], strict=True):
            if not self._take(sequence, token):
                return
            if token.token_id != draft or sequence.finish_reason is not None:
                break
            num_right += 1
        try:
            done = self._manager.complete_drafts(sequence.seq_id, item.end, num_known + num_right)
            sequence.num_computed_tokens = done
            sequence.num_to_replay = num_known + num_right - done
            sequence.last_row = item.rows[num_right]
        except Exception as exc:  # noqa: BLE001  # whatever it is, it is this sequence's
            self._fail(sequence, exc)
            return
        if sequence.finish_reason is not None:
            self._end(sequence)

    def _draw(self, to_sample: list[Sampled], to_verify: list[_Verified]) -> list[TokenLogprob]:
        """A token for each row, in order."""
        rows = [row for _, row in to_sample]
        tasks = [self._task(sequence) for sequence, _ in to_sample]
        for item in to_verify:
            rows += item.rows
            tasks.append(self._task(item.sequence))
            tasks += [self._task_behind(item, count) for count in range(1, len(item.rows))]
        return self._sampler.sample(self._runner.logits(rows, has_drafts=bool(to_verify)), tasks)

    def _task(self, sequence: Sequence) -> SampleTask:
        assert sequence.sampling is not None
        return SampleTask(
            params=sequence.sampling,
            prompt_token_ids=sequence.given_token_ids,
            output_token_ids=sequence.output_token_ids,
            eos_token_ids=sequence.request.eos_token_ids,
            index=sequence.index,
            counts=sequence.token_counts,
            mask=self._grammars.mask(sequence),
        )

    def _task_behind(self, item: _Verified, num_drafts: int) -> SampleTask:
        """Of the row behind the first ``num_drafts`` of the drafts."""
        sequence, task = item.sequence, self._task(item.sequence)
        return replace(
            task,
            output_token_ids=[*task.output_token_ids, *item.drafts[:num_drafts]],
            counts=sequence.token_counts.fork() if task.has_penalties else None,
            mask=self._grammars.mask(sequence, num_drafts),
        )
