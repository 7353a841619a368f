"""What the engine's steps say about each request, and the list in which it lies until the caller takes it."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.sequence import Sequence
from common.errors import TandemError
from common.kv_cache.sharing.leases import LeasedPrefix, PrefixProgress
from common.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Where a request's time went on this node, in seconds; ``None``: the phase did not happen.

    ``scheduled_s``: when its first work began (transfer or prefill, whichever came first), on ``time.monotonic``.
    """

    queue: float = 0.0
    prefill: float | None = None
    transfer: float | None = None
    first_token: float | None = None
    scheduled_s: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """What one engine step produced for one sequence. ``index`` is the fork number, 0 for ``num_forks`` 1.

    ``num_draft_tokens``, ``num_accepted_tokens``: that were run for it so far, and that were right.
    Of a prompt that is only computed: ``progress`` as its blocks are finished, if asked for; ``handoff`` at the end.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: Exception | None = None
    num_cached_tokens: int = 0
    num_local_computed_tokens: int = 0
    transferred_bytes: int = 0
    transferred_blocks: int = 0
    transferred_states: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    seconds: PhaseSeconds | None = None
    handoff: LeasedPrefix | None = None
    progress: PrefixProgress | None = None


class OutputList:
    """Filled between and during steps, emptied by ``take`` at the end of each step."""

    def __init__(self) -> None:
        self._outputs: list[RequestOutput] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def take(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def add(
        self,
        sequence: Sequence,
        token: TokenLogprob | None = None,
        *,
        index: int | None = None,
        handoff: LeasedPrefix | None = None,
        progress: PrefixProgress | None = None,
    ) -> None:
        """Reports the sequence as it stands. ``token``: the one it has just got. ``index``: of the fork that the output
        is for, when it is not the sequence's own."""
        wants_logprobs = sequence.sampling is not None and sequence.sampling.logprobs is not None
        is_first = sequence.num_output_tokens <= 1
        self._outputs.append(
            RequestOutput(
                request_id=sequence.request.request_id,
                index=sequence.index if index is None else index,
                token_ids=[token.token_id] if token is not None else [],
                logprobs=[token] if wants_logprobs and token is not None else None,
                prompt_logprobs=sequence.prompt_logprobs if is_first else None,
                finish_reason=sequence.finish_reason,
                stop_reason=sequence.stop_reason,
                num_cached_tokens=sequence.num_local_hit,
                num_local_computed_tokens=sequence.num_prompt_computed,
                transferred_bytes=sequence.transferred_bytes,
                transferred_blocks=sequence.transferred_blocks,
                transferred_states=sequence.transferred_states,
                num_draft_tokens=sequence.num_draft_tokens,
                num_accepted_tokens=sequence.num_accepted_tokens,
                seconds=phase_seconds(sequence),
                handoff=handoff,
                progress=progress,
            )
        )

    def add_error(self, sequence: Sequence, error: TandemError) -> None:
        """Reports that the sequence failed; nothing follows for it."""
        self._outputs.append(
            RequestOutput(
                sequence.request.request_id, sequence.index, [], finish_reason=FinishReason.ERROR, error=error
            )
        )


def phase_seconds(sequence: Sequence) -> PhaseSeconds:
    """Where the sequence's time went so far."""
    arrival, scheduled = sequence.request.arrival_s, sequence.scheduled_s
    queue = scheduled - arrival if scheduled is not None else 0.0
    transfer = None
    if sequence.transfer_start_s is not None and sequence.transfer_end_s is not None:
        transfer = sequence.transfer_end_s - sequence.transfer_start_s
    prefill = None
    if sequence.prompt_done_s is not None and scheduled is not None and sequence.num_prompt_computed:
        prefill = sequence.prompt_done_s - scheduled - (transfer or 0.0)
    first_token = None
    if sequence.first_token_s is not None and sequence.prompt_done_s is not None:
        first_token = sequence.first_token_s - sequence.prompt_done_s
    return PhaseSeconds(queue=queue, prefill=prefill, transfer=transfer, first_token=first_token, scheduled_s=scheduled)
