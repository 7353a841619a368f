"""``python -m tests.support.faulty_node ROLE FLAGS``: a node in which what belongs to a marked request can be made to
fail or to take long, on a late device if the test run wants those.

A request is marked by its ``cache_salt``, ``fault:NODE:PLACE:AFTER`` (``mark``), so it needs no field of its own and
goes the way of any other, over the proxy and both legs. It strikes in nodes whose name begins with NODE (a role, or a
role and port), from when AFTER tokens of the request are computed there (decoded, at ``detokenise``): once at
``engine_thread`` and ``hang``, else whenever the request comes to PLACE again.

- ``lookup``, ``admission``: the cache manager raises. ``forward``: the model runner does for each step that has rows of
  the request, after it has computed them. ``sampling``: the sampler does. ``detokenise``: turning its tokens into text.
- ``engine_thread``: the step raises what nothing contains, so the engine's thread ends. ``hang``: the step never ends.
- ``slow``: each step that has rows of the request takes ``SLOW_STEP_S`` longer.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.config.node import parse_node_config
from common.metrics.table import Role
from tests.support.late_node import DEFAULT_PORTS, run_late_node

PREFIX = "fault"
PLACES = ("lookup", "admission", "forward", "sampling", "detokenise", "engine_thread", "hang", "slow")
SLOW_STEP_S = 0.2
"""Longer than gaps between tokens may be, by the alerts."""


class InjectedError(Exception):
    """What a marked request makes a place raise; no error of ours, as a bug would."""


@dataclass(frozen=True)
class Fault:
    place: str
    after: int


def mark(node: str, place: str, after: int = 0) -> str:
    """The ``cache_salt`` of a request that is to fail; see above."""
    assert place in PLACES, place
    return f"{PREFIX}:{node}:{place}:{after}"


def fault_of(salt: str | None, node_name: str) -> Fault | None:
    words = (salt or "").split(":")
    if len(words) != 4 or words[0] != PREFIX or not node_name.startswith(words[1]):
        return None
    return Fault(words[2], int(words[3]))


class Faults:
    """What is marked in this process; patches each place once, when it is made."""

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name
        self._marked: dict[str, tuple[Any, Fault]] = {}  # by sequence id
        self._in_scheduler()
        self._in_manager()
        self._in_runner()
        self._in_sampler()
        self._in_core()
        self._in_text()

    def _is_due(self, place: str, is_it: Callable[[Any], bool]) -> bool:
        """Whether a marked sequence that ``is_it`` is to fail at ``place`` now."""
        return any(
            fault.place == place and is_it(sequence) and sequence.num_computed_tokens >= fault.after
            for sequence, fault in self._marked.values()
        )

    def _strike(self, place: str, is_it: Callable[[Any], bool]) -> None:
        if self._is_due(place, is_it):
            raise InjectedError(place)

    def _in_scheduler(self) -> None:
        from common.engine.scheduler import Scheduler

        def marking(kept: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
            def add(scheduler: Any, sequence: Any) -> None:
                fault = fault_of(sequence.request.cache_salt, self._node_name)
                if fault is not None:
                    self._marked[sequence.seq_id] = sequence, fault
                kept(scheduler, sequence)

            return add

        Scheduler.add = marking(Scheduler.add)  # type: ignore[method-assign]
        Scheduler.add_running = marking(Scheduler.add_running)  # type: ignore[method-assign]

    def _in_manager(self) -> None:
        from common.kv_cache.manager import KVCacheManager

        lookup, admit = KVCacheManager.lookup, KVCacheManager.admit

        def faulty_lookup(manager: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
            self._strike("lookup", lambda sequence: sequence.keys is keys)
            return lookup(manager, keys, *args, **kwargs)

        def faulty_admit(manager: Any, seq_id: str, *args: Any, **kwargs: Any) -> Any:
            self._strike("admission", lambda sequence: sequence.seq_id == seq_id)
            return admit(manager, seq_id, *args, **kwargs)

        KVCacheManager.lookup = faulty_lookup  # type: ignore[method-assign]
        KVCacheManager.admit = faulty_admit  # type: ignore[method-assign]

    def _in_runner(self) -> None:
        from common.engine.model_runner import ModelRunner

        launch = ModelRunner.launch

        def faulty_launch(runner: Any, plan: Any) -> Any:
            forward = launch(runner, plan)  # states are advanced by then
            planned = {segment.request_id for segment in plan.segments}
            self._strike("forward", lambda sequence: sequence.seq_id in planned)
            if self._is_due("slow", lambda sequence: sequence.seq_id in planned):
                time.sleep(SLOW_STEP_S)
            return forward

        ModelRunner.launch = faulty_launch  # type: ignore[method-assign]

    def _in_sampler(self) -> None:
        from common.engine.sampling.sampler import Sampler

        sample = Sampler.sample

        def faulty_sample(sampler: Any, logits: Any, tasks: Sequence[Any]) -> Any:
            params = {id(task.params) for task in tasks}
            self._strike("sampling", lambda sequence: id(sequence.sampling) in params)
            return sample(sampler, logits, tasks)

        Sampler.sample = faulty_sample  # type: ignore[assignment]

    def _in_core(self) -> None:
        from common.engine.core import EngineCore

        step = EngineCore.step

        def faulty_step(core: Any) -> Any:
            self._strike("engine_thread", lambda sequence: sequence.finish_reason is None)
            if self._is_due("hang", lambda sequence: sequence.finish_reason is None):
                threading.Event().wait()
            return step(core)

        EngineCore.step = faulty_step  # type: ignore[method-assign]

    def _in_text(self) -> None:
        from common.node.serving.prompt_jobs import PromptReader

        jobs = PromptReader.jobs

        async def faulty_jobs(reader: Any, http: Any, request: Any) -> Any:
            found = await jobs(reader, http, request)
            fault = fault_of(request.cache_salt, self._node_name)
            if fault is not None and fault.place == "detokenise":
                for choice in (choice for job in found for choice in job.choices):
                    choice._stream.add = _failing_after(choice._stream.add, fault.after)
            return found

        PromptReader.jobs = faulty_jobs  # type: ignore[method-assign]


def _failing_after(add: Callable[..., Any], after: int) -> Callable[..., Any]:
    num_tokens = 0

    def faulty_add(token_ids: Sequence[int], **settings: Any) -> Any:
        nonlocal num_tokens
        num_tokens += len(token_ids)
        if num_tokens > after:
            raise InjectedError("detokenise")
        return add(token_ids, **settings)

    return faulty_add


def main() -> None:
    role = Role(sys.argv.pop(1))
    config = parse_node_config(sys.argv[1:], os.environ, role=role.value, default_port=DEFAULT_PORTS[role])
    assert config.node_name is not None
    Faults(config.node_name)
    run_late_node(role)


if __name__ == "__main__":
    main()
