"""Prefixes that a peer holds for a request, or a tier of this node: begun, committed, given up, or replaced by
computing.

1 the scheduler found memory for the prefix (``start``), 2 the prefix source reads it, 3 ``finish`` takes the result.
Leaves by: committed whole (the caller samples from its last row), committed in part (the sequence waits again and finds
it in the cache), failed and computed here, failed with a typed error, or aborted. From 1 until the result says
``terminal`` the destination belongs to the read; one that is not terminal by then stays in quarantine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from common.engine.live_sequences import LiveSequences
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.errors import InvalidRequestError, TandemError, TransferError
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.sharing.remote_prefix import PullPlan

logger = logging.getLogger(__name__)

OPTIONAL_PREFIX_PATIENCE_S = 1.0
"""Seconds for which a queue may stand still with nothing running before its requests give up the prefixes that they can
do without. A pull that fits begins in the next step, so a second means that the memory does not come by itself."""


class PrefixSource(Protocol):
    """Moves a remote prefix into this node's pools; implemented by the node over its transfer layer.

    ``start`` must not block; one that raises has begun nothing. Exactly one ``EngineCore.finish_pull`` follows each
    ``start`` (and, when that one said the read is not terminal, exactly one ``EngineCore.end_quarantine`` some day).
    ``give_up``: a prefix that was not started will not be.
    """

    def start(self, seq_id: str, remote: Any, plan: PullPlan) -> None: ...

    def cancel(self, seq_id: str) -> None: ...

    def give_up(self, remote: Any) -> None: ...


class PullResult(Protocol):
    """What the engine needs of a pull's outcome.

    ``terminal`` False: the destination may still be written. ``output_row``: [hidden], the prompt's last row, when the
    pulled prefix is a whole prompt. ``final_s``: when the holder had finished, on the engine's clock: the transfer that
    the request waits for begins there.
    """

    @property
    def ok(self) -> bool: ...

    @property
    def terminal(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_states(self) -> int: ...

    @property
    def output_row(self) -> Any: ...

    @property
    def final_s(self) -> float | None: ...


class RemotePrefixes:
    """Owned by the engine thread. ``source`` is set before the first request that has a remote prefix."""

    def __init__(
        self,
        scheduler: Scheduler,
        manager: KVCacheManager,
        live: LiveSequences,
        *,
        recompute_on_load_failure: bool,
        local_prefill_limit: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.source: PrefixSource | None = None
        self._scheduler = scheduler
        self._manager = manager
        self._live = live
        self._recompute = recompute_on_load_failure
        self._local_prefill_limit = local_prefill_limit
        self._clock = clock
        self._still_since_s: float | None = None

    def find_refusal(self, sequence: Sequence) -> TandemError | None:
        """Why a new request cannot be taken with what it brings: a prefix of another prompt (or cache salt), or one
        that was lost and may not be replaced by computing."""
        request, remote = sequence.request, sequence.remote
        if remote is not None and (
            remote.num_tokens > sequence.num_prompt_tokens
            or sequence.keys.key_at(remote.num_tokens) != remote.prefix_key
        ):
            message = "kv_transfer_params.tandem_prefix_key is not the key of prompt_token_ids (and cache_salt) here"
            return InvalidRequestError(message, param="kv_transfer_params.tandem_prefix_key")
        if request.lost_remote:
            return self._refuse_to_compute(sequence, "its holder could not be used")
        return None

    def start(self, sequence: Sequence, plan: PullPlan) -> None:
        assert self.source is not None
        self.source.start(sequence.seq_id, sequence.tier_prefix or sequence.remote, plan)

    def abort(self, sequence: Sequence) -> None:
        """The caller left while its prefix is read: the memory is a destination until ``finish`` frees it."""
        assert self.source is not None
        sequence.aborted = True
        self.source.cancel(sequence.seq_id)

    def finish(self, sequence: Sequence, result: PullResult) -> Any | None:
        """Commits what was validated, or discards it and lets the prompt be computed, or fails typed.

        Returns the prompt's last row [hidden] when the whole prompt came, and the sequence runs now.
        """
        sequence.pull_plan = None
        if not sequence.is_prompt_done:
            sequence.transfer_end_s = self._clock()
        if result.final_s is not None:
            assert sequence.transfer_start_s is not None
            sequence.transfer_start_s = max(sequence.transfer_start_s, result.final_s)
        if result.ok and not sequence.aborted:
            return self._commit(sequence, result)
        self._manager.abandon_remote(sequence.seq_id, quarantine=not result.terminal)
        if sequence.aborted:
            self._live.forget(sequence)
            return None
        logger.warning("pull failed request_id=%s reason=%s", sequence.request.request_id, result.reason)
        if sequence.tier_prefix is not None:  # another one is looked for, or it is computed as if there had been none
            self._wait_again(sequence)
            return None
        error = self._refuse_to_compute(sequence, result.reason)
        if error is not None:
            self._live.fail(sequence, error)
        else:
            self._wait_again(sequence)
        return None

    def give_up_optional(self) -> None:
        """Ends a circle between two nodes: this queue waits for memory that others have leased, while leases that it
        holds elsewhere keep memory from them. Optional prefixes are given up, after a while of standing still."""
        scheduler = self._scheduler
        if not scheduler.waiting or scheduler.running or scheduler.transferring:
            self._still_since_s = None
            return
        now = self._clock()
        if self._still_since_s is None:
            self._still_since_s = now
        if now - self._still_since_s < OPTIONAL_PREFIX_PATIENCE_S:
            return
        for sequence in scheduler.waiting:
            if sequence.remote is not None and sequence.request.is_remote_optional:
                assert self.source is not None
                logger.warning("prefix given up request_id=%s: no memory for it", sequence.request.request_id)
                self.source.give_up(sequence.remote)
                sequence.remote = None

    def _commit(self, sequence: Sequence, result: PullResult) -> Any | None:
        row, num_tokens = result.output_row, (sequence.tier_prefix or sequence.remote).num_tokens
        if sequence.tier_prefix is None:
            sequence.transferred_bytes = result.num_bytes
            sequence.transferred_blocks = result.num_blocks
            sequence.transferred_states = result.num_states
        is_part = num_tokens < sequence.num_prompt_tokens or row is None
        if is_part or sequence.request.is_prompt_only or sequence.is_prompt_done:
            # Into the cache, most recently used: the sequence is admitted like any that finds a prefix there. One that
            # was preempted while it generated may have been sampled from that row before.
            self._manager.commit_remote(sequence.seq_id, row, seal=True)
            self._manager.free(sequence.seq_id, donate=True)
            self._wait_again(sequence)
            return None
        self._manager.commit_remote(sequence.seq_id, row)
        if sequence.tier_prefix is not None:
            sequence.num_local_hit = num_tokens
        sequence.remote = sequence.tier_prefix = None
        sequence.num_computed_tokens = sequence.num_prompt_tokens
        del self._scheduler.transferring[sequence.seq_id]
        self._scheduler.add_running(sequence)
        return row

    def _wait_again(self, sequence: Sequence) -> None:
        """From transferring back to its old place in the queue."""
        if sequence.tier_prefix is None:
            sequence.remote = None
        sequence.tier_prefix = None
        del self._scheduler.transferring[sequence.seq_id]
        self._scheduler.add(sequence)

    def _refuse_to_compute(self, sequence: Sequence, reason: str) -> TransferError | None:
        """Why a prompt whose remote prefix was lost is not computed here; None: it is."""
        if sequence.request.is_remote_optional:
            return None
        num_prompt_tokens = sequence.num_prompt_tokens
        lost = f"the prefix of {num_prompt_tokens} tokens could not be pulled: {reason}"
        if not self._recompute:
            return TransferError(lost)
        if self._local_prefill_limit is None:
            return None
        num_left = num_prompt_tokens - self._manager.lookup(sequence.keys, num_prompt_tokens).num_tokens
        if num_left <= self._local_prefill_limit:
            return None
        return TransferError(
            f"{lost}; {num_left} tokens would have to be computed here, --local-prefill-limit is "
            f"{self._local_prefill_limit}"
        )
