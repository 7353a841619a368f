"""One node: the real scheduler and cache manager, a clock that somebody else turns, and steps that compute nothing.

A step begins when there is work and none is in flight, and ends after what its node's rates say; then all that
``EngineCore.collect`` publishes is published. While nobody but streams runs, one event stands for all steps to the end
of the first of them; whatever happens to the node meanwhile cuts that run after the step it falls into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from common.engine.finished_prompts import FinishedPrompts
from common.engine.live_sequences import LiveSequences
from common.engine.outputs import OutputList
from common.engine.pacing.step_model import StepShape
from common.engine.plan import StepPlan
from common.engine.rates import HALF_LIFE
from common.engine.remote_prefixes import RemotePrefixes
from common.engine.scheduler import Scheduler, SchedulerConfig
from common.engine.scheduling.schedule import Schedule, shape_of
from common.engine.sequence import Sequence as EngineSequence
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.layout import make_layout, transfer_bytes
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.observe.events import CacheEvent, EventKind
from common.kv_cache.sharing.leases import LeasedPrefix
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.kv_cache.spec import KVCacheConfig
from common.request import FinishReason, Request
from common.wire.cache_events import CacheChange, truncate_key
from proxy.nodes.contention import DecodeTotals
from proxy.nodes.load import LoadReport
from proxy.nodes.node import Node
from proxy.simulation.speeds import Speeds

LEASE_S = 30.0
"""As nodes have it (``--kv-lease-seconds``)."""
LOOK_S = 0.1
"""A node whose queue waits for memory that others have leased looks again after so long."""
ROW = object()
"""In place of a last hidden row."""


class Time(Protocol):
    """Simulated seconds, and what is to be done at which of them."""

    now: float

    def at(self, time_s: float, action: Callable[[], None]) -> None: ...


@dataclass(eq=False, slots=True)
class HeldPrefix:
    """A prefix that ``holder`` has leased for a reader, or computes (not ``is_ready``). ``hidden_s``: of moving its
    blocks, what passed while it was computed."""

    holder: SimulatedNode
    lease_id: str
    num_tokens: int
    prefix_key: bytes
    has_row: bool
    hidden_s: float = 0.0
    is_ready: bool = True
    on_ready: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        return self.holder.node.url

    @property
    def is_final(self) -> bool:
        return self.is_ready

    def become_ready(self) -> None:
        self.is_ready = True
        self.on_ready()

    def when_ready(self, action: Callable[[], None]) -> None:
        self.on_ready = action
        if self.is_ready:
            action()


@dataclass(frozen=True, slots=True)
class _Pulled:
    """``common.engine.remote_prefixes.PullResult``."""

    output_row: Any
    num_bytes: int
    num_blocks: int
    num_states: int
    ok: bool = True
    terminal: bool = True
    reason: str = ""
    final_s: float | None = None


@dataclass(slots=True)
class _Work:
    """What one sequence is for: ``answer`` are the tokens that it will generate."""

    answer: Sequence[int]
    on_first: Callable[[], None] | None = None
    on_end: Callable[[], None] | None = None
    on_begin: Callable[[], None] | None = None
    on_handoff: Callable[[LeasedPrefix, float], None] | None = None
    on_leave: Callable[[int], None] | None = None
    began_s: float | None = None


@dataclass(slots=True)
class _Step:
    """``repeats`` steps one after the other, each of ``seconds``."""

    schedule: Schedule
    started_s: float
    seconds: float
    repeats: int
    number: int
    is_decode: bool
    is_beside: bool


class _NoDevice:
    """Block copies, which take no time here (``common.engine.finished_prompts.BlockCopier``)."""

    def launch(self, plan: StepPlan) -> _NoDevice:
        return self

    def synchronize(self) -> None:
        return None

    def wait(self) -> None:
        return None


class SimulatedNode:
    """
    Attributes:
        busy_s: seconds of steps so far, by kind: "prompt" (those with prompt tokens) and "decode".
        neighbours: nodes that share its machine.
        is_generating: whether a step runs that only generates.
        num_computed: prompt tokens computed here.
    """

    def __init__(self, node: Node, config: KVCacheConfig, speeds: Speeds, time: Time) -> None:
        self.node = node
        self.speeds = self._said = speeds
        self._time = time

        def clock() -> float:
            return time.now

        self.manager = manager = KVCacheManager(config, clock=clock)
        # Of all ranks: each reads its own part of a block and of a state.
        num_ranks, layout = config.geometry.num_ranks, make_layout(config.geometry, config.block_size)
        self._group_block_bytes = tuple(num_ranks * num_bytes for num_bytes in layout.group_block_bytes)
        self._kv_bytes_per_token, self._state_bytes = transfer_bytes(config.geometry, config.block_size)
        self.scheduler = scheduler = Scheduler(SchedulerConfig(speeds.max_num_seqs, speeds.chunk), manager, clock)
        self._outputs = OutputList()
        self._live = live = LiveSequences(scheduler, manager, self._outputs)
        self._remote = RemotePrefixes(
            scheduler, manager, live, recompute_on_load_failure=True, local_prefill_limit=None, clock=clock
        )
        self._remote.source = self
        self._prompts = FinishedPrompts(
            scheduler, manager, _NoDevice(), live, self._outputs, lease_seconds=LEASE_S, clock=clock
        )
        self._works: dict[str, _Work] = {}
        self._step: _Step | None = None
        self._num_steps = 0
        self._num_leases = 0
        self._last_event = 0
        self._looks_at_s = -1.0
        self._is_settling = False
        self.busy_s = {"prompt": 0.0, "decode": 0.0}
        self.num_computed = 0
        self.neighbours: Iterable[SimulatedNode] = ()
        self.is_generating = False
        self._decode_totals = DecodeTotals()
        self._beside_share = 0.0  # of the steps that only generated, as a node's own fit has them

    # --- what it is asked for

    def compute(
        self,
        request: Request,
        keys: PrefixKeys,
        on_begin: Callable[[], None],
        on_handoff: Callable[[LeasedPrefix, float], None],
    ) -> None:
        """A prompt that is handed out. ``on_begin`` comes with its first step, or just before its end; ``on_handoff``
        gets the lease and the seconds from its first step to its end."""
        self._add(request, keys, _Work((), on_begin=on_begin, on_handoff=on_handoff))

    def generate(
        self,
        request: Request,
        keys: PrefixKeys,
        answer: Sequence[int],
        on_first: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._add(request, keys, _Work(answer, on_first, on_end))

    def num_output_tokens(self, name: str) -> int:
        """Of the answer ``name`` so far; 0 when it is not one that runs."""
        seq_id = f"{name}#0"
        return self._live[seq_id].num_output_tokens if seq_id in self._works else 0

    def leave(self, name: str, on_leave: Callable[[int], None]) -> None:
        """Lets the answer ``name`` go after the step that runs; its state is kept. ``on_leave`` gets the number of its
        tokens; it is not called when that step was its last one."""
        self._works[f"{name}#0"].on_leave = on_leave
        self.wake()

    def lease(self, keys: PrefixKeys, deeper_than: int) -> HeldPrefix | None:
        """What is here of a prompt beyond ``deeper_than`` tokens, for another node."""
        self._num_leases += 1
        lease_id = f"{self.node.url} {self._num_leases}"
        deadline_s = self._time.now + LEASE_S
        lease = self.manager.lease_prefix(keys, keys.num_tokens, lease_id, deadline_s, deeper_than=deeper_than)
        self._prompts.run_copies(lease_id)
        if lease is None:
            return None
        is_whole = lease.num_tokens == keys.num_tokens and lease.output_row is not None
        return HeldPrefix(self, lease_id, lease.num_tokens, lease.key, is_whole)

    def num_local_tokens(self, keys: PrefixKeys) -> int:
        return self.manager.lookup(keys, keys.num_tokens).num_tokens

    def release(self, lease_id: str) -> None:
        self.manager.release_lease(lease_id)
        self.wake()

    def change_speeds(self, speeds: Speeds) -> None:
        """Of its steps and pulls from now on; what it reports are still those of before."""
        self.speeds = speeds
        if self._step is not None:
            self._cut(self._step)

    def report(self) -> LoadReport:
        scheduler, speeds = self.scheduler, self._said
        return LoadReport(
            num_running=scheduler.num_holding,
            num_waiting=len(scheduler.waiting),
            num_uncomputed_tokens=scheduler.num_uncomputed_prompt_tokens,
            max_num_seqs=speeds.max_num_seqs,
            chunk=speeds.chunk,
            prefill=speeds.prefill,
            decode=replace(speeds.decode, fixed_s=speeds.decode.fixed_s + self._beside_share * speeds.beside_s),
            decode_totals=self._decoded_by_now(),
            row_s=speeds.row_s,
            pull=speeds.pull,
            kv_bytes_per_token=self._kv_bytes_per_token,
            state_bytes=self._state_bytes,
        )

    def take_changes(self) -> list[CacheChange]:
        """What came into the cache and left it since the last time."""
        log = self.manager.events
        assert log is not None
        events = log.since(self._last_event)
        assert events is not None, "more changes between two steps than are kept"
        self._last_event = log.last_sequence_number
        return [_change(event) for event in events]

    def wake(self) -> None:
        """Something came, or memory became free."""
        step = self._step
        if self._is_settling:
            return  # a step begins when all of the last one is told
        if step is None:
            self._begin()
        else:
            self._cut(step)

    # --- common.engine.remote_prefixes.PrefixSource

    def start(self, seq_id: str, remote: HeldPrefix, plan: PullPlan) -> None:
        num_blocks = [len(pairs) for pairs in plan.pairs]
        block_bytes = sum(n * size for n, size in zip(num_blocks, self._group_block_bytes, strict=True))
        state_bytes = self._state_bytes if plan.slot_id else 0
        result = _Pulled(
            ROW if remote.has_row else None, block_bytes + state_bytes, sum(num_blocks), int(bool(plan.slot_id))
        )

        def read() -> None:
            seconds = self.speeds.pull_s(state_bytes)
            seconds += max(0.0, self.speeds.pull.unit_s * block_bytes - remote.hidden_s)
            self._time.at(self._time.now + seconds, lambda: self._end_pull(seq_id, remote, result))

        remote.when_ready(read)

    def cancel(self, seq_id: str) -> None:
        raise AssertionError("nobody leaves a simulated cluster")

    def give_up(self, remote: HeldPrefix) -> None:
        remote.when_ready(lambda: remote.holder.release(remote.lease_id))

    # --- inside

    def _add(self, request: Request, keys: PrefixKeys, work: _Work) -> None:
        sequence = EngineSequence(request, 0, keys)
        self._works[sequence.seq_id] = work
        self._live.add(sequence)
        self.scheduler.add(sequence)
        self.wake()

    def _end_pull(self, seq_id: str, remote: HeldPrefix, result: _Pulled) -> None:
        sequence = self._live[seq_id]
        row = self._remote.finish(sequence, result)
        if row is not None:
            self._prompts.begin_from(sequence, row)
        remote.holder.release(remote.lease_id)
        self.wake()

    def _decoded_by_now(self) -> DecodeTotals:
        step = self._step
        if step is None or not step.is_decode:
            return self._decode_totals
        return self._decoded(step, int((self._time.now - step.started_s) / step.seconds))

    def _decoded(self, step: _Step, repeats: int) -> DecodeTotals:
        """After so many of its run, which is not counted yet."""
        num_steps, num_rows, seconds = self._decode_totals
        num_rows += repeats * len(step.schedule.sequences)
        return DecodeTotals(num_steps + repeats, num_rows, seconds + repeats * step.seconds)

    def _cut(self, step: _Step) -> None:
        """``step`` is the last of its run."""
        if step.repeats > 1:
            repeats = int((self._time.now - step.started_s) / step.seconds) + 1
            if repeats < step.repeats:
                step.repeats = repeats
                self._run(step)

    def _begin(self) -> None:
        """A step, if there is anything to do; tells neighbours that run beside it, or no longer do."""
        self._plan()
        is_generating = self._step is not None and self._step.is_decode
        if is_generating is not self.is_generating:
            self.is_generating = is_generating
            for other in self.neighbours:
                if other._step is not None:
                    other._cut(other._step)

    def _plan(self) -> None:
        """The next step, or none."""
        scheduler = self.scheduler
        if not scheduler.has_work():
            return
        self.manager.expire_leases()
        schedule = scheduler.schedule()
        for _, error in schedule.failed:
            raise error
        self._remote.give_up_optional()
        for sequence, plan in schedule.pulls:
            self._remote.start(sequence, plan)
        if not schedule.sequences and not schedule.row_only:
            if scheduler.waiting and not schedule.pulls and self._looks_at_s <= self._time.now:
                self._looks_at_s = self._time.now + LOOK_S
                self._time.at(self._looks_at_s, self.wake)
            return
        shape = shape_of(schedule)
        assert shape is not None
        seconds = self.speeds.step_s(shape) if schedule.sequences else 0.0
        is_decode = bool(schedule.sequences) and not shape.num_prompt_tokens
        is_beside = is_decode and any(other.is_generating for other in self.neighbours)
        if is_beside:
            seconds += self.speeds.beside_s
        self._num_steps += 1
        repeats = self._repeats(schedule, shape)
        self._step = _Step(schedule, self._time.now, seconds, repeats, self._num_steps, is_decode, is_beside)
        self._note_beginnings(schedule)
        self._run(self._step)

    def _repeats(self, schedule: Schedule, shape: StepShape) -> int:
        """Steps like this one that come if nothing happens, at most."""
        if shape.num_prompt_tokens or schedule.row_only or len(schedule.sequences) != len(self.scheduler.running):
            return 1
        return min(self._num_left(sequence) for sequence in schedule.sequences)

    def _num_left(self, sequence: EngineSequence) -> int:
        return len(self._works[sequence.seq_id].answer) - sequence.num_output_tokens

    def _note_beginnings(self, schedule: Schedule) -> None:
        for sequence in schedule.sequences:
            work = self._works[sequence.seq_id]
            if work.began_s is None:
                work.began_s = self._time.now
                if work.on_begin is not None:
                    work.on_begin()

    def _run(self, step: _Step) -> None:
        repeats = step.repeats

        def end() -> None:
            if self._step is step and step.repeats == repeats:
                self._end(step)

        self._time.at(step.started_s + repeats * step.seconds, end)

    def _end(self, step: _Step) -> None:
        """As ``EngineCore.collect``."""
        self._step, self._is_settling = None, True
        schedule, shape = step.schedule, shape_of(step.schedule)
        assert shape is not None
        due = []
        for sequence, segment in zip(schedule.sequences, schedule.plan.segments, strict=True):
            if not sequence.is_prompt_done:
                self.num_computed += segment.num_tokens
            sequence.num_computed_tokens += segment.num_tokens
            self.manager.complete_step(sequence.seq_id, sequence.num_computed_tokens)
            if not sequence.num_uncomputed_tokens:
                due.append(sequence)
        for sequence in schedule.row_only:
            sequence.pending_row = None
            due.append(sequence)
        if schedule.sequences:
            self.scheduler.step_model.observe(shape, step.seconds)
            seconds = step.repeats * step.seconds
            self.busy_s["decode" if step.is_decode else "prompt"] += seconds
            if step.is_decode:
                self._decode_totals = self._decoded(step, step.repeats)
                fade = 0.5 ** (step.repeats / HALF_LIFE)
                self._beside_share = fade * self._beside_share + (1.0 - fade) * step.is_beside
        for sequence in due:
            if sequence.is_prompt_done or self._prompts.finish(sequence, ROW):
                self._append(sequence, step.repeats)
        self._hand_out()
        self._is_settling = False
        self._begin()

    def _append(self, sequence: EngineSequence, count: int) -> None:
        """The next ``count`` tokens of its answer; all but the last of them were run, too."""
        work, num_done = self._works[sequence.seq_id], sequence.num_output_tokens
        tokens = list(work.answer[num_done : num_done + count])
        sequence.token_ids.extend(tokens)
        sequence.keys.extend(tokens)
        if count > 1:
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count - 1
            if not self.manager.extend(sequence.seq_id, end):
                # Its memory would have run out on the way: it goes on as one that was preempted does.
                self.scheduler.preempt(sequence)
            else:
                self.manager.plan_saves(sequence.seq_id, start, end, {})
                self.manager.take_block_copies()
                sequence.num_computed_tokens = end
                self.manager.complete_step(sequence.seq_id, end)
        if not num_done and work.on_first is not None:
            work.on_first()
        is_over = num_done + count >= len(work.answer)
        if not is_over and work.on_leave is None:
            return
        if is_over:
            sequence.finish_reason = FinishReason.LENGTH
        del self._works[sequence.seq_id]
        self._live.end(sequence, donate=True)
        if is_over:
            assert work.on_end is not None
            work.on_end()
        else:
            assert work.on_leave is not None
            work.on_leave(num_done + count)

    def _hand_out(self) -> None:
        for output in self._outputs.take():
            assert output.error is None, output.error
            work = self._works.pop(f"{output.request_id}#0")
            assert output.handoff is not None
            assert work.on_handoff is not None
            if work.began_s is None and work.on_begin is not None:
                work.on_begin()
            took_s = self._time.now - (work.began_s if work.began_s is not None else self._time.now)
            work.on_handoff(output.handoff, took_s)


def _change(event: CacheEvent) -> CacheChange:
    keys, is_stored = tuple(map(truncate_key, event.keys)), event.kind is EventKind.STORED
    if not (is_stored and event.is_checkpoint):
        return CacheChange(is_stored, event.group, keys)
    return CacheChange(True, event.group, keys, truncate_key(event.parent), event.position, event.has_row)
