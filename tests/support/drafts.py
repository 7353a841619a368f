"""Drafters that know the answer, to be right as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Sequence

from common.engine.core import EngineCore
from common.engine.drafting.drafter import Drafter
from common.engine.speculation import Speculation
from common.node.runtime import NodeModel


class Oracle(Drafter):
    """``answers``: prompts with what follows them. ``share`` of the drafted tokens are right, each by chance; unless
    ``always``, drafts have any length up to what is asked for, 0 too: steps with and without them follow each other."""

    def __init__(self, answers: Sequence[Sequence[int]], share: float, rng: random.Random, always: bool) -> None:
        self._answers, self._share, self._rng, self._always = answers, share, rng, always

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        known = list(token_ids)
        answer = next((each for each in self._answers if each[: len(known)] == known), known)
        count = max_tokens if self._always else self._rng.randint(0, max_tokens)
        right = answer[len(known) : len(known) + count]
        return [token if self._rng.random() < self._share else token ^ 1 for token in right]


def speculate(
    core: EngineCore,
    model: NodeModel,
    answers: Sequence[Sequence[int]],
    share: float,
    *,
    seed: int = 0,
    always: bool = False,
    saves_each: bool = False,
    num_tokens: int = 7,
) -> Speculation:
    """Lets an engine draft by oracle; ``saves_each`` as in ``Speculation``, whatever the states' size."""
    rng = random.Random(seed)
    speculation = Speculation(
        lambda: Oracle(answers, share, rng, always),
        num_tokens=num_tokens,
        max_model_len=model.max_model_len,
        slot_bytes=0 if saves_each else 1 << 30,
        adapts=False,
    )
    core._scheduler.speculation = speculation
    return speculation
