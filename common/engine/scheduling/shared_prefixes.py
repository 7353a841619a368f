"""Prompts with the same beginning that come together: it is computed and moved once, and the others go on from it.

While a prompt is computed, others that begin like it wait until it has passed the junction, the position at which they
part from it, and a state is kept there. A prompt waits for a running one only, so never for long, and no longer once
that one has ended, failed or lost its memory. While a prefix is pulled, or read from a tier, others that begin like it
and come from there too wait until its blocks are here, and bring what is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from common.engine.sequence import Sequence, SequenceStatus
from common.kv_cache.keys import PrefixKeys

MIN_SHARED_BLOCKS = 4
"""Blocks that two prompts must share before one waits for the other: computing fewer takes less time than waiting."""
MAX_COMPARED = 16
"""Prompts from the front of the queue that are compared with those that run, in each step. Comparing hashes tokens on
the engine's thread, so it is bounded."""
MAX_JUNCTIONS = 4
"""States kept of one prompt for those that wait at one time: each takes a slot of the cache."""


class MovedPrefix(Protocol):
    """A prefix that another node has, or a tier."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def prefix_key(self) -> bytes: ...


class RemotePrefix(MovedPrefix, Protocol):
    """A prefix that the node at ``url`` has, or is computing. ``is_final``: it is known to have all of it."""

    @property
    def url(self) -> str: ...

    @property
    def is_final(self) -> bool: ...


def junction(computing: Sequence, other: Sequence) -> int:
    """The deepest position at which ``other`` could go on from what ``computing`` will have computed; 0: nowhere."""
    size = computing.keys.block_size
    num_own, num_other = computing.num_prompt_tokens, other.num_prompt_tokens
    high = min(num_own, num_other - 1) // size
    if high == 0:
        return 0
    # The first block by itself: it differs for most pairs, and then no more is hashed.
    if computing.keys.boundary_key(1) != other.keys.boundary_key(1):
        return 0
    if num_other >= num_own and computing.keys.key_at(num_own) == other.keys.key_at(num_own):
        return num_own
    own_keys, other_keys = computing.keys.boundary_keys(high), other.keys.boundary_keys(high)
    low = 1
    while low < high:  # a key binds all tokens before it
        middle = (low + high + 1) // 2
        if own_keys[middle] == other_keys[middle]:
            low = middle
        else:
            high = middle - 1
    return low * size


def is_computing(sequence: Sequence) -> bool:
    """Whether a running sequence still computes its prompt."""
    return not sequence.is_prompt_done and sequence.num_prompt_tokens - sequence.num_computed_tokens > 0


def has_to_wait(sequence: Sequence, num_found: int, running: Iterable[Sequence], longest_chunk: int) -> bool:
    """Whether a running prompt will soon have computed, and kept, much more of this one than the ``num_found`` tokens
    that the cache has of it. ``longest_chunk``: 1, or more where states are kept at the ends of chunks only."""
    least = num_found + MIN_SHARED_BLOCKS * sequence.keys.block_size
    return any(
        max(least, other.num_computed_tokens + longest_chunk) <= junction(other, sequence)
        for other in running
        if other is not sequence and is_computing(other)
    )


def junctions_with(computing: Sequence, waiting: Iterable[Sequence]) -> list[int]:
    """Where ``computing`` should keep states for those of ``waiting`` that begin like it, for longer than what is moved
    for them."""
    least = computing.num_computed_tokens + MIN_SHARED_BLOCKS * computing.keys.block_size
    positions: list[int] = []
    for other in waiting:
        if other is computing or other.is_prompt_done or other.request.skip_prefix_lookup:
            continue
        position = junction(computing, other)
        moved = other.tier_prefix or other.remote
        if moved is not None and moved.num_tokens >= position:
            continue
        if least <= position < computing.num_prompt_tokens and position not in positions:
            positions.append(position)
            if len(positions) == MAX_JUNCTIONS:
                break
    return positions


def who_pulls(sequence: Sequence, transferring: Iterable[Sequence]) -> Sequence | None:
    """Another sequence whose pull brings blocks of the remote prefix of ``sequence`` from the same node. That node
    computes in the order in which prompts came, so waiting costs nothing. Where it does not (it has finished the prefix
    of ``sequence`` and not the other one) nobody waits: the other may want memory there that this one's lease keeps."""
    remote: RemotePrefix = sequence.remote
    for other in transferring:
        if (
            other.remote is not None
            and other.request.priority <= sequence.request.priority
            and _brings_part(other, other.remote, sequence.keys, remote)
            and other.remote.url == remote.url
            and (other.remote.is_final or not remote.is_final)
        ):
            return other
    return None


def who_reads(sequence: Sequence, prefix: MovedPrefix, transferring: Iterable[Sequence]) -> Sequence | None:
    """Another sequence for which blocks of ``prefix``, which ``sequence`` would read from a tier, are read there."""
    for other in transferring:
        if other.tier_prefix is not None and _brings_part(other, other.tier_prefix, sequence.keys, prefix):
            return other
    return None


def still_waits(sequence: Sequence) -> bool:
    """Whether ``sequence`` waits for the one that was found before. Takes next to no time, however many wait."""
    other = sequence.awaited
    if other is None:
        return False
    is_coming = other.status is SequenceStatus.TRANSFERRING and not other.aborted
    if is_coming and sequence.remote is not None and other.remote is not None:
        is_coming = other.remote.is_final or not sequence.remote.is_final
    if not is_coming:
        sequence.awaited = None
    return is_coming


def _brings_part(other: Sequence, moved: MovedPrefix, keys: PrefixKeys, prefix: MovedPrefix) -> bool:
    """Whether what comes for ``other`` of ``moved`` are as many blocks of ``prefix`` as are worth waiting for, or it is
    the same prefix."""
    plan = other.pull_plan
    assert plan is not None
    if other.aborted or plan.is_empty:
        return False
    num_tokens = min(moved.num_tokens, prefix.num_tokens)
    if moved.num_tokens == prefix.num_tokens and moved.prefix_key == prefix.prefix_key:
        return True
    for pairs in plan.pairs:
        if len(pairs) >= MIN_SHARED_BLOCKS:
            num_blocks = pairs[MIN_SHARED_BLOCKS - 1][0] + 1
            if num_blocks * keys.block_size <= num_tokens:
                return other.keys.boundary_key(num_blocks) == keys.boundary_key(num_blocks)
    return False
