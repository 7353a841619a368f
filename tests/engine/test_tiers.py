"""Prefixes that come back from a tier, through the node's own threads: equal answers, nothing held, damage found."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import VOCAB_SIZE
from tests.support.tier_node import TierNode, objects_in

FAMILIES = ["granitemoehybrid", *(pytest.param(each, marks=pytest.mark.full) for each in ("qwen3_5", "llama"))]


def tokens(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def disk(folder: Path, size: str = "1GiB") -> str:
    return f"disk:{folder / 'tier'}?size={size}"


def run(coroutine: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await coroutine

    return asyncio.run(main())


PROMPT = tokens(1, 600)


async def answer_cold(family: str, prompt: Sequence[int], **fields: Any) -> list[int]:
    async with TierNode(family=family) as node:
        return (await node.generate(prompt, **fields))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_conversation_when_its_node_starts_again_then_it_goes_on_from_the_tier(tmp_path: Path, family: str) -> None:
    async def main() -> None:
        async with TierNode(disk(tmp_path), family=family) as node:
            answer, _ = await node.generate(PROMPT)
            await node.flush()
            await node.check()
        turn = [*PROMPT, *answer, *tokens(2, 30)]
        expected = await answer_cold(family, turn)
        async with TierNode(disk(tmp_path), family=family) as node:
            await node.flush()
            second, num_cached = await node.generate(turn)
            assert second == expected
            assert num_cached >= len(PROMPT) + len(answer) - 1
            assert node.metric("tier_hit_tokens_total") == num_cached
            assert node.metric("tier_read_errors_total") == 0
            # The first prompt once more: its last row was kept, so nothing is computed.
            assert await node.generate(PROMPT) == (answer, len(PROMPT))
            await node.check()

    run(main())
