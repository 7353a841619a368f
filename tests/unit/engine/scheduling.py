"""A scheduler over a real cache manager, and a model that takes no time: every step does what the engine's does, tokens
are counted numbers. No torch."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import Any

from common.engine.scheduler import Scheduler, SchedulerConfig
from common.engine.scheduling.schedule import Schedule
from common.engine.sequence import Sequence, SequenceStatus
from common.kv_cache.manager import KVCacheManager
from common.request import Request, SamplingParams
from tests.unit.kv_cache.world import make_config

BLOCK = 4


def words(seed: int, count: int) -> list[int]:
    """A prompt that shares no block with that of another seed."""
    return [seed * 1000 + number for number in range(count)]


class Rig:
    """``step`` schedules and computes; ``schedule`` only schedules, as a step that would fail does."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        images_are_whole: bool = False,
        **cache: Any,
    ) -> None:
        self.manager = KVCacheManager(make_config(block_size=BLOCK, **cache), clock=lambda: 0.0)
        config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, images_are_whole)
        self.scheduler = Scheduler(config, self.manager, clock=lambda: 0.0)
        self._num_added = 0

    def add(
        self,
        name: str,
        prompt: ListOf[int],
        *,
        priority: int = 0,
        arrival_s: float | None = None,
        max_tokens: int = 8,
        index: int = 0,
        sampled: bool = True,
        prompt_logprobs: int | None = None,
        remote: Any = None,
        ttft_target_s: float | None = None,
        itl_target_s: float | None = None,
        num_resumed_tokens: int = 0,
    ) -> Sequence:
        """Arrivals are one second apart unless the test says when."""
        self._num_added += 1
        request = Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs) if sampled else None,
            priority=priority,
            remote=remote,
            ttft_target_s=ttft_target_s,
            itl_target_s=itl_target_s,
            arrival_s=float(self._num_added) if arrival_s is None else arrival_s,
            num_resumed_tokens=num_resumed_tokens,
        )
        sequence = Sequence(request, index, self.manager.prefix_keys(prompt))
        self.scheduler.add(sequence)
        return sequence

    def schedule(self) -> Schedule:
        return self.scheduler.schedule()

    def step(self) -> Schedule:
        """One step of the engine: publish, finish prompts, add one token to whoever has no token left to compute."""
        schedule = self.schedule()
        due = []
        for sequence, segment in zip(schedule.sequences, schedule.plan.segments, strict=True):
            sequence.num_computed_tokens += segment.num_tokens
            self.manager.complete_step(sequence.seq_id, sequence.num_computed_tokens)
            if not sequence.num_uncomputed_tokens:
                due.append((sequence, f"row of {sequence.seq_id}"))
        for sequence in schedule.row_only:
            due.append((sequence, sequence.pending_row))
            sequence.pending_row = None
        for sequence, row in due:
            if not sequence.is_prompt_done:
                sequence.is_prompt_done = True
                self.manager.finish_prompt(sequence.seq_id, row)
            sequence.append(900_000 + sequence.num_tokens)
            sequence.check_stop(0, 1024)
            if sequence.finish_reason is not None:
                self.end(sequence)
        assert self.manager.check() == []
        return schedule

    def end(self, sequence: Sequence) -> None:
        """As an abort does, or the end of an output."""
        if sequence.status is SequenceStatus.RUNNING:
            self.manager.free(sequence.seq_id, donate=True)
        self.scheduler.remove(sequence)

    def run(self, max_steps: int = 500) -> list[Schedule]:
        """Steps until nothing is left."""
        schedules = []
        while self.scheduler.has_work():
            schedules.append(self.step())
            assert len(schedules) < max_steps, "it never ends"
        return schedules


def planned(schedule: Schedule) -> list[tuple[str, int, int]]:
    """(request, start, number of tokens) of each segment, in order."""
    return [
        (segment.request_id.partition("#")[0], segment.start, segment.num_tokens) for segment in schedule.plan.segments
    ]


def names(sequences: ListOf[Sequence]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]
