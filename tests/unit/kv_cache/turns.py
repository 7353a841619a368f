"""Requests run to their end on a cache manager, without any pretend bytes: for long prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.kv_cache.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class Turn:
    """``chunk_ends``: where the prompt's steps ended. ``num_tokens``: tokens not computed."""

    num_tokens: int
    num_attention_tokens: int
    chunk_ends: list[int]


def run_turn(
    manager: KVCacheManager,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    boundaries: Sequence[int] = (),
    budget: int = 1 << 30,
    donate: bool = False,
) -> Turn:
    """One request from lookup to free, the generated tokens one step each."""
    keys = manager.prefix_keys(prompt)
    hit = manager.lookup(keys, len(prompt))
    assert manager.admit("turn", keys, hit, len(prompt))
    wanted = manager.save_positions(len(prompt), hit, boundaries)
    ends: list[int] = []
    start = hit.num_tokens
    while start < len(prompt):
        end = start + manager.chunk_size(start, min(budget, len(prompt) - start), len(prompt))
        manager.plan_saves("turn", start, end, wanted)
        manager.take_block_copies()
        manager.complete_step("turn", end)
        ends.append(end)
        start = end
    manager.finish_prompt("turn", "row")
    for count, token in enumerate(output[:-1], start=1):  # the last sampled token is never computed
        keys.extend([token])
        end = len(prompt) + count
        assert manager.extend("turn", end)
        manager.plan_saves("turn", end - 1, end, ())
        manager.take_block_copies()
        manager.complete_step("turn", end)
    manager.free("turn", donate=donate)
    return Turn(hit.num_tokens, hit.num_attention_tokens, ends)
