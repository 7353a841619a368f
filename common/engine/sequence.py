"""One continuation of one prompt, as the scheduler sees it. A request with ``num_forks`` > 1 becomes several sequences
once its prompt is computed.

Life: WAITING -> (TRANSFERRING ->) RUNNING -> FINISHED; RUNNING -> WAITING when preempted, TRANSFERRING -> WAITING when
the pull failed, or brought only a part of the prompt. The cache manager has an allocation under ``seq_id`` from the
sequence's admission to its ``free``.
"""

from __future__ import annotations

import enum
from typing import Any

from common.engine.drafting.drafter import Drafter
from common.engine.drafting.pay import Acceptance
from common.engine.sampling.grammar import SequenceGrammar
from common.engine.sampling.token_counts import TokenCounts
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.request import FinishReason, Request, SamplingParams, TokenLogprob


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    TRANSFERRING = "transferring"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Mutable; owned by the engine thread.

    Attributes:
        token_ids: prompt and generated tokens, in order.
        given_token_ids: the prompt without what of it was generated on another node (``Request.num_resumed_tokens``);
            what comes after them is output.
        num_computed_tokens: how many of them are in the cache (blocks and running state).
        pull_plan: where the prefix that is pulled now goes.
        awaited: another one, for which blocks come that this one would move too.
        tier_prefix: what is read now of a tier below this node's memory; ``num_tier_reads``: how many were begun since
            the sequence came, or lost its memory.
        pending_row: last hidden row [hidden] from which the next token can be sampled without a forward; set by an
            exact prefix hit, a prompt that was pulled whole, or a fork.
        save_positions: position -> why, for the states of the prompt that the save policy keeps.
        num_reported_tokens: of a prompt whose blocks are pulled while the rest is computed: tokens whose blocks the
            reader has been told of; -1: it has not begun.
        aborted: the caller left while the sequence could not be freed at once: its pull, or a step launched ahead, is
            in flight.
        is_ahead: a step is in flight that was launched before the sequence's last token was known.
        num_failed_forwards: forwards that it was in and that raised.
        num_lone_steps: after one: steps of all its tokens that it still has to be alone in.
        last_step: the number of the step that it was last planned in.
        grammar: what its output must be; None: anything.
        drafts: what the step in flight runs behind its last token.
        num_to_replay: output tokens whose K/V and state must be computed again, because the drafts after them were
            wrong: the state has seen those.
        drafter, acceptance: who guesses its next tokens, and how often they were right; made with the first draft.
        last_row: hidden row [hidden] of a forward, that its last token was sampled from: what the model's head drafts
            from. None: no forward was run of it since it got its memory, or nobody wants it.
        guessed: what the head says will come next.
        is_forced: its grammar drafts: no other tokens can come.
    """

    def __init__(self, request: Request, index: int, keys: PrefixKeys) -> None:
        self.request = request
        self.index = index
        self.seq_id = f"{request.request_id}#{index}"
        self.keys = keys
        self.token_ids = list(request.prompt_token_ids)
        num_given = len(request.prompt_token_ids) - request.num_resumed_tokens
        self.given_token_ids = self.token_ids[:num_given] if request.num_resumed_tokens else request.prompt_token_ids
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        self.pending_row: Any = None
        self.remote = request.remote
        self.pull_plan: PullPlan | None = None
        self.awaited: Sequence | None = None
        self.tier_prefix: Any = None
        self.num_tier_reads = 0
        self.num_reported_tokens = -1
        self.aborted = False
        self.is_ahead = False
        self.num_failed_forwards = 0
        self.num_lone_steps = 0
        self.last_step = 0
        self.is_prompt_done = False
        self.num_preemptions = 0
        self.token_counts = TokenCounts()
        self.grammar: SequenceGrammar | None = None
        self.drafts: list[int] = []
        self.num_to_replay = 0
        self.drafter: Drafter | None = None
        self.acceptance: Acceptance | None = None
        self.last_row: Any = None
        self.guessed: list[int] = []
        self.is_forced = False
        self.save_positions: dict[int, str] = {}
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = [None] if request.skip_prefix_lookup else None
        # What the response reports.
        self.num_prompt_computed = 0
        self.num_local_hit = 0
        self.transferred_bytes = 0
        self.transferred_blocks = 0
        self.transferred_states = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        # Monotonic seconds of the phase changes.
        self.scheduled_s: float | None = None
        self.transfer_start_s: float | None = None
        self.transfer_end_s: float | None = None
        self.prompt_done_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def sampling(self) -> SamplingParams | None:
        return self.request.sampling

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.given_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.given_token_ids) :]

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come of it, though it may still hold memory."""
        return self.finish_reason is not None or self.aborted

    @property
    def is_decoding(self) -> bool:
        """Whether the next step would compute its last token alone, or behind those that drafts have left."""
        return self.is_prompt_done and self.num_uncomputed_tokens <= 1 + self.num_to_replay

    @property
    def order(self) -> tuple[int, float, str]:
        """Scheduling order: lower priority value first, then first come first served."""
        return (self.request.priority, self.request.arrival_s, self.seq_id)

    @property
    def waits_for_grammar(self) -> bool:
        """Whether its next token is due and its grammar is not compiled yet."""
        return self.is_prompt_done and self.grammar is not None and self.grammar.is_pending

    def num_left(self, max_model_len: int) -> int:
        """How many more tokens it may generate, by its request's bound and the model's."""
        assert self.sampling is not None
        return min(self.sampling.max_tokens - self.num_output_tokens, max_model_len - self.num_tokens)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.keys.extend([token_id])

    def lose_memory(self) -> None:
        """It was preempted: what was computed of it, and what was to come of that, is gone; its tokens stay."""
        self.num_computed_tokens = 0
        self.num_to_replay = 0
        self.drafts, self.guessed = [], []
        self.pending_row = self.last_row = None
        self.remote = None
        self.num_tier_reads = 0
        self.num_preemptions += 1
        if self.prompt_logprobs is not None and not self.is_prompt_done:
            self.prompt_logprobs = [None]

    def check_stop(self, token_id: int, max_model_len: int) -> None:
        """Sets ``finish_reason`` when ``token_id``, just appended, ends the sequence."""
        sampling = self.sampling
        assert sampling is not None
        if self.grammar is not None and token_id in self.request.eos_token_ids:
            # Its mask had no end as long as anything else could come, whatever the request says of ends.
            self.finish_reason = FinishReason.STOP
            return
        if self.num_output_tokens >= sampling.min_tokens:
            if not sampling.ignore_eos and token_id in self.request.eos_token_ids:
                self.finish_reason = FinishReason.STOP
                return
            if token_id in sampling.stop_token_ids:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = token_id
                return
        if self.num_left(max_model_len) <= 0:
            self.finish_reason = FinishReason.LENGTH
