"""Which drafted tokens a sequence runs behind its last one, and what came of them.

1 as many tokens as pay, 2 a drafter guesses them, or a grammar allows no others, 3 the guess is cut where it cannot be
used: at the request's and the model's end, at an end token, at the first token that the grammar forbids, 4 the step
runs it, 5 what is sampled says how much was right. A draft changes no answer: it is taken where it equals what is
sampled, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from common.engine.drafting.allowance import Allowance
from common.engine.drafting.drafter import Drafter
from common.engine.drafting.pay import Acceptance, num_paying
from common.engine.plan import Segment
from common.engine.sequence import Sequence

FORCED_RATE = 0.95
"""Of the tokens that a grammar forces, those that come, until it is known: the same text may be said in others."""
MAX_SAVE_BYTES = 1 << 20
"""A state of up to so many bytes is saved behind every drafted token. A larger one only behind the last known token:
what was right of the drafts runs again with the next ones, which takes less time than writing all these states (16 %
of a step with 3 drafts of granite's 20 MB, 33 % with 7; running 1 to 3 rows again takes 2 to 5 %)."""


Head = Callable[[SequenceOf[Segment], SequenceOf[Any], SequenceOf[int]], list[list[int]]]
"""The model's own head: ``ModelRunner.draft``."""


class Speculation:
    """Owned by the engine thread. Without ``create_drafter`` the model's ``head`` drafts.

    Attributes:
        head: drafts for all sequences of a step at once, if anybody does.
        num_tokens: drafted tokens of a sequence in a step, at most.
        saves_each: whether a state is saved behind every drafted token.
        adapts: whether fewer are run where they do not pay.
        allowance: what a step and its rows take, and what drafts may cost.
        num_drafts, num_draft_tokens, num_accepted_tokens, num_accepted_by_place: drafts that were run, their tokens,
            those of them that were right, and by their place in the draft.
    """

    def __init__(
        self,
        create_drafter: Callable[[], Drafter] | None,
        *,
        num_tokens: int,
        max_model_len: int,
        slot_bytes: int,
        adapts: bool = True,
        head: Head | None = None,
    ) -> None:
        assert (create_drafter is None) != (head is None), "either one drafter for each sequence or one head for all"
        self.head = head
        self._create_drafter = create_drafter
        self._max_model_len = max_model_len
        self.num_tokens = num_tokens
        self.saves_each = slot_bytes <= MAX_SAVE_BYTES
        self.adapts = adapts
        self._usual, self._forced = Acceptance.usual(), Acceptance.usual(FORCED_RATE)
        self.allowance = Allowance()
        self._num_generating = 0
        self._in_step = (0, 0)
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_by_place = [0] * num_tokens

    def begin_step(self, num_sequences: int, num_again: int) -> None:
        """A step is planned in which so many generate, with ``num_again`` rows of known tokens beside one of each."""
        self._num_generating = num_sequences
        self.allowance.begin_step(num_sequences, num_again)

    def end_step(self, num_sequences: int, num_rows: int, seconds: float, *, has_prompts: bool) -> None:
        """A step of so many sequences took so long; ``has_prompts``: some of them computed a prompt."""
        num_drafted, num_accepted = self._in_step
        self._in_step = (0, 0)
        if has_prompts:
            self.allowance.end_step_with_prompts(self._num_generating, num_drafted, num_accepted)
        else:
            self.allowance.end_step(num_sequences, num_rows, num_accepted, seconds)

    def propose(self, sequence: Sequence, max_tokens: int, num_sequences: int) -> list[int]:
        """What to run behind the sequence's last token, at most ``max_tokens``, in a step of ``num_sequences``."""
        if self._create_drafter is not None:
            sequence.guessed = []
            if limit := self.num_wanted(sequence, max_tokens, num_sequences):
                if sequence.drafter is None:
                    sequence.drafter = self._create_drafter()
                sequence.guessed = sequence.drafter.propose(sequence.token_ids, limit)
                self.allowance.give_back(limit - len(sequence.guessed))
        drafts, sequence.guessed = sequence.guessed[:max_tokens], []
        drafts = drafts[: _num_before_end(sequence, drafts)]
        if drafts and sequence.grammar is not None:
            drafts = drafts[: sequence.grammar.num_allowed(drafts)]
        return drafts

    def num_wanted(self, sequence: Sequence, max_tokens: int, num_sequences: int) -> int:
        """How many tokens to guess: 0 too where its grammar allows no others, which are ``guessed`` then. Asked before
        a guess is made: where none pays that is not free either."""
        limit = min(max_tokens, self._limit(sequence))
        if limit <= 0:
            return 0
        if sequence.acceptance is None:
            sequence.acceptance = Acceptance(self._usual.rate)
        forced = sequence.grammar.forced()[:limit] if sequence.grammar is not None else []
        sequence.is_forced = bool(forced)
        if self.adapts:
            rate, limit = (self._forced.rate, len(forced)) if forced else (sequence.acceptance.rate, limit)
            cost, num_again = self.allowance.cost(num_sequences), sequence.num_uncomputed_tokens - 1
            wanted = num_paying(rate, limit, num_sequences, cost, num_again, runs_again=not self.saves_each)
            limit = self.allowance.take(wanted or (0 if forced else sequence.acceptance.hold_back()))
        if forced:
            sequence.guessed = forced[:limit]
            return 0
        return limit

    def observe(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """Of a draft of ``num_drafts`` tokens the first ``num_right`` were right."""
        if sequence.is_forced:
            self._forced.observe(num_drafts, num_right)
        elif sequence.acceptance is not None:
            sequence.acceptance.observe(num_drafts, num_right)
            self._usual.observe(num_drafts, num_right)
        sequence.num_draft_tokens += num_drafts
        sequence.num_accepted_tokens += num_right
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_right
        self._in_step = (self._in_step[0] + num_drafts, self._in_step[1] + num_right)
        for place in range(num_right):
            self.num_accepted_by_place[place] += 1

    def _limit(self, sequence: Sequence) -> int:
        """Each drafted token brings one more that is sampled, beside the one that comes anyway."""
        sampling, grammar = sequence.sampling, sequence.grammar
        assert sampling is not None
        limit = min(self.num_tokens, sequence.num_left(self._max_model_len) - 1)
        if grammar is not None:
            if grammar.is_pending or grammar.error is not None:
                return 0
            if (missing := sampling.min_tokens - sequence.num_output_tokens) > 0:
                limit = min(limit, missing - 1)  # behind that, masks allow other ends
        return limit


def _num_before_end(sequence: Sequence, drafts: list[int]) -> int:
    """An end is not run: what comes before it is all that the answer's state has to have seen."""
    sampling, ends = sequence.sampling, sequence.request.eos_token_ids
    assert sampling is not None
    for place, token_id in enumerate(drafts):
        if token_id in ends or token_id in sampling.stop_token_ids:
            return place
    return len(drafts)
