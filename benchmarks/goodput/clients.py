"""Sends requests and notes when their tokens come."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.goodput.search import Attainment
from benchmarks.goodput.streaming import post_stream
from benchmarks.goodput.traffic import THINK_S, Arrival, Mix
from common.wire.headers import ITL_TARGET_HEADER, TRACE_HEADER, TTFT_TARGET_HEADER
from common.wire.routes import COMPLETIONS_ROUTE


@dataclass(frozen=True)
class Answer:
    """``ttft_s`` from sending to the first token; ``gaps_s`` between its tokens."""

    mix: Mix
    ttft_s: float
    gaps_s: tuple[float, ...]
    token_ids: tuple[int, ...]
    placement: str = ""

    @property
    def itl_s(self) -> float:
        """Mean time between tokens (TPOT of DistServe and of ``vllm bench serve --goodput``)."""
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else 0.0


class Timed(Protocol):
    """An answer, measured or simulated."""

    @property
    def ttft_s(self) -> float: ...

    @property
    def itl_s(self) -> float: ...


@dataclass(frozen=True)
class Targets:
    """Infinite: there is none."""

    ttft_s: float
    itl_s: float

    def are_kept(self, answer: Timed) -> bool:
        return answer.ttft_s <= self.ttft_s and answer.itl_s <= self.itl_s

    def are_within(self, factor: float, others: Targets) -> bool:
        """Neither is over ``factor`` times as long as in ``others``, nor as short."""
        pairs = ((self.ttft_s, others.ttft_s), (self.itl_s, others.itl_s))
        return all(other / factor <= mine <= factor * other for mine, other in pairs)

    @property
    def headers(self) -> dict[str, str]:
        named = {TTFT_TARGET_HEADER: self.ttft_s, ITL_TARGET_HEADER: self.itl_s}
        return {name: f"{max(1.0, 1e3 * seconds):.3f}" for name, seconds in named.items() if seconds < math.inf}


@dataclass
class Outcome:
    """Of one run: ``refused`` got no answer."""

    answers: list[Answer] = field(default_factory=list)
    refused: Counter[Mix] = field(default_factory=Counter)
    seconds: float = 0.0

    def attainment(self, targets: Mapping[Mix, Targets]) -> Attainment:
        kept = Counter(answer.mix for answer in self.answers if targets[answer.mix].are_kept(answer))
        return Attainment(kept, Counter(answer.mix for answer in self.answers) + self.refused)

    def missed(self, targets: Mapping[Mix, Targets]) -> tuple[int, int]:
        """Answers whose first token was late, and those whose tokens were slow."""
        pairs = [(answer, targets[answer.mix]) for answer in self.answers]
        late = sum(answer.ttft_s > target.ttft_s for answer, target in pairs)
        return late, sum(answer.itl_s > target.itl_s for answer, target in pairs)

    @property
    def tokens_per_s(self) -> float:
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds

    @property
    def placements(self) -> dict[str, int]:
        return dict(Counter(answer.placement for answer in self.answers))

    def gap_s(self, part: float) -> float:
        return percentile([gap for answer in self.answers for gap in answer.gaps_s], part)

    def ttft_s(self, part: float) -> float:
        return percentile([answer.ttft_s for answer in self.answers], part)


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


class Clients:
    """``targets``: of each mix, which go with its requests."""

    def __init__(self, url: str, targets: Mapping[Mix, Targets]) -> None:
        self._url = url + COMPLETIONS_ROUTE
        self._targets = targets

    async def open_loop(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Each arrival at its time, however many are under way."""
        outcome = Outcome()
        began_s = time.perf_counter()

        async def come(arrival: Arrival) -> None:
            await asyncio.sleep(began_s + arrival.at_s - time.perf_counter())
            await self._chat(arrival, outcome)

        await asyncio.gather(*map(come, arrivals))
        outcome.seconds = time.perf_counter() - began_s
        return outcome

    async def closed_loop(self, arrivals: Sequence[Arrival], concurrency: int) -> Outcome:
        """``concurrency`` at any time, until all are answered."""
        outcome = Outcome()
        waiting = iter(arrivals)
        began_s = time.perf_counter()

        async def one_after_another() -> None:
            for arrival in waiting:
                await self._chat(arrival, outcome)

        await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
        outcome.seconds = time.perf_counter() - began_s
        return outcome

    async def _chat(self, arrival: Arrival, outcome: Outcome) -> None:
        so_far: list[int] = []
        for turn, prompt in enumerate(arrival.prompts):
            if turn:
                await asyncio.sleep(THINK_S)
            so_far += prompt
            try:
                answer = await self._stream(so_far, arrival.mix)
            except OSError:
                # The rest of a chat whose turn failed never comes: all of it missed its targets.
                outcome.refused[arrival.mix] += len(arrival.prompts) - turn
                return
            outcome.answers.append(answer)
            so_far += answer.token_ids

    async def _stream(self, prompt: Sequence[int], mix: Mix) -> Answer:
        """Raises OSError."""
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": mix.num_answer_tokens,
        }
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        targets = self._targets.get(mix)
        headers = {TRACE_HEADER: "1", **(targets.headers if targets else {})}
        times_s: list[float] = []
        token_ids: list[int] = []
        placement = ""
        sent_s = time.perf_counter()
        for time_s, event in await post_stream(self._url, body, headers):
            if "error" in event:
                raise ConnectionError(event["error"])
            new = [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
            if new:
                times_s.append(time_s)
                token_ids += new
            placement = (event.get("tandem") or {}).get("placement", placement)
        if len(token_ids) != mix.num_answer_tokens:
            raise ConnectionError(f"{len(token_ids)} tokens of {mix.num_answer_tokens} came")
        gaps_s = tuple(b - a for a, b in itertools.pairwise(times_s))
        return Answer(mix, times_s[0] - sent_s, gaps_s, tuple(token_ids), placement)
