"""Prompts with the same beginning that come together: it is computed once, and the others go on from it.

While a prompt is computed, others that begin like it wait for the place where they part from it, and a state is kept
there. Whoever waits waits for a running prompt, so never for long, and for nobody once that one has ended, failed or
lost its memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.engine.sequence import Sequence

MIN_SHARED_BLOCKS = 4
"""Less than this is computed sooner than waited for."""
MAX_LOOKED_AT = 16
"""Waiting prompts that are compared with each one that is computed."""
MAX_SAVES = 4
"""Of one prompt, for those that wait at one time: states are large."""


def parting_place(computing: Sequence, other: Sequence) -> int:
    """The deepest position at which ``other`` could go on from what ``computing`` will have computed; 0: nowhere."""
    size = computing.keys.block_size
    num_own, num_other = computing.num_prompt_tokens, other.num_prompt_tokens
    high = min(num_own, num_other - 1) // size
    if high == 0:
        return 0
    # One after the other: of most pairs the first one differs, and no more is hashed.
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


def has_to_wait(sequence: Sequence, num_found: int, running: Iterable[Sequence]) -> bool:
    """Whether a running prompt will soon have much more of the prompt than the ``num_found`` tokens of the cache."""
    least = num_found + MIN_SHARED_BLOCKS * sequence.keys.block_size
    return any(
        max(least, other.num_computed_tokens + 1) <= parting_place(other, sequence)
        for other in running
        if other is not sequence and is_computing(other)
    )


def places_for(computing: Sequence, waiting: Iterable[Sequence]) -> list[int]:
    """Where ``computing`` should keep states for those of ``waiting`` that begin like it."""
    least = computing.num_computed_tokens + MIN_SHARED_BLOCKS * computing.keys.block_size
    places: list[int] = []
    for other in waiting:
        if other.remote is not None or other.request.skip_prefix_lookup:
            continue
        place = parting_place(computing, other)
        if least <= place < computing.num_prompt_tokens and place not in places:
            places.append(place)
            if len(places) == MAX_SAVES:
                break
    return places
