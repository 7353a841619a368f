"""A device that is late, as a GPU is: ``launch`` returns while its memory still holds what was there before.

The forward runs at once on shadow arenas. What it wrote appears in the real ones, which peers read and pulls write, a
random while later: from then on its event has happened. Launches are done in order, as on a CUDA stream: one reads what
the one before it wrote. The rows are there at once, drawn tokens come to the host with the event: an engine that does
not wait for it goes on to publish what is not there yet. ``LATE_DEVICE=1 pytest tests/e2e/...`` gives such a device to
every node that the tests start; ``LATE_DEVICE=control`` one whose events never wait, with which the tests of transfers
must fail.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch

from common.engine.model_runner import Forward, ModelRunner
from common.engine.plan import StepPlan
from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.spec import KVCacheConfig
from common.models.loading.loader import LoadedModel
from common.models.vision.encoder import ImageEncoder
from common.node import runtime
from tests.support.service import LATE_DEVICE_VARIABLE

MAX_DELAY_S = 0.02
"""A few steps of the tests' models: long enough that a peer would read in between, short enough for many steps."""

_Unit = tuple[int, int]
_SLOTS = -1


class LateEvent:
    def __init__(self) -> None:
        self._happened = threading.Event()
        self.error: BaseException | None = None

    def happen(self) -> None:
        self._happened.set()

    @property
    def has_happened(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        assert self._happened.wait(60), "the late device has died"
        if self.error is not None:
            raise self.error


class UnwaitedEvent(LateEvent):
    """The control: collects go on at once."""

    def synchronize(self) -> None: ...


class LateRunner:
    """``ModelRunner``, late. ``is_held``: memory appears only with the next launch, or when somebody waits for all.

    A step may be launched before the one before it has appeared: it reads of the shadow what that one wrote. What a
    step names must stay as it is until it appears: else its event raises.
    """

    event_type: type[LateEvent] = LateEvent

    def __init__(
        self, model: LoadedModel, storage: KVStorage, config: KVCacheConfig, images: ImageEncoder | None = None
    ) -> None:
        self.images = images
        self._storage = storage
        self._shadow = KVStorage(config, torch.device("cpu"))
        self._runner = ModelRunner(model, self._shadow, config, images)
        self._block_size = config.block_size
        self._steps: list[_LateStep] = []
        self._random = random.Random(1)
        self.logits = self._runner.logits
        self.is_held = False

    def record_ahead(self, max_rows: int) -> None:
        self._runner.record_ahead(max_rows)

    def forward(self, plan: StepPlan) -> list[torch.Tensor]:
        return self.launch(plan).wait()

    def launch(self, plan: StepPlan) -> Forward:
        if plan.ids_from is None:
            self.synchronize()
        self._steps = [step for step in self._steps if not step.event.has_happened]
        written = set(self._written(plan))
        named = {*_read(plan), *written}
        late = {unit for step in self._steps for unit in step.written}
        _copy(self._storage, self._shadow, named - late)
        before = {unit: _unit(self._storage, unit).clone() for unit in named}
        forward = self._runner.launch(plan)
        token_ids = None if forward.token_ids is None else torch.zeros_like(forward.token_ids)
        event = self.event_type()
        delay_s = None if self.is_held else self._random.uniform(0, MAX_DELAY_S)
        last = self._steps[-1] if self._steps else None
        # Later steps write to the shadow again.
        result = {unit: _unit(self._shadow, unit).clone() for unit in written}
        step = _LateStep(written, event)

        def appear() -> None:
            try:
                step.is_due.wait(delay_s)
                if last is not None:
                    last.thread.join()
                for unit, value in before.items():
                    if unit not in late and not torch.equal(_unit(self._storage, unit), value):
                        event.error = AssertionError(f"{unit} was written while a launched forward named it")
                for unit, value in result.items():
                    _unit(self._storage, unit).copy_(value)
                if token_ids is not None:
                    token_ids.copy_(forward.token_ids)
            except BaseException as exc:  # noqa: BLE001  # whoever waits for the event gets it
                event.error = exc
            event.happen()

        step.thread = threading.Thread(target=appear, name="late-device", daemon=True)
        step.thread.start()
        self._steps.append(step)
        return Forward([row.clone() for row in forward.rows], event, forward.tokens, token_ids)

    def synchronize(self) -> None:
        for step in self._steps:
            step.is_due.set()
            step.thread.join()

    def _written(self, plan: StepPlan) -> Iterator[_Unit]:
        for group_id, pairs in plan.block_copies.items():
            yield from ((group_id, destination) for _, destination in pairs)
        for segment in plan.segments:
            first, last = (
                segment.start // self._block_size,
                (segment.start + segment.num_tokens - 1) // self._block_size,
            )
            for group_id, table in enumerate(segment.tables):
                yield from ((group_id, block_id) for block_id in table.block_ids[first : last + 1] if block_id)
            yield from ((_SLOTS, slot_id) for slot_id in (segment.dst_slot, *segment.save_slots) if slot_id)


class _LateStep:
    def __init__(self, written: set[_Unit], event: LateEvent) -> None:
        self.written = written
        self.event = event
        self.is_due = threading.Event()
        self.thread: threading.Thread


def _arena(storage: KVStorage, group_id: int) -> torch.Tensor:
    return storage.slot_arena if group_id == _SLOTS else storage.block_arenas[group_id]


def _unit(storage: KVStorage, unit: _Unit) -> torch.Tensor:
    return _arena(storage, unit[0])[unit[1]]


def _copy(source: KVStorage, destination: KVStorage, units: set[_Unit]) -> None:
    for group_id in {group_id for group_id, _ in units}:
        ids = torch.tensor(sorted(unit_id for each, unit_id in units if each == group_id))
        _arena(destination, group_id)[ids] = _arena(source, group_id)[ids]


class UnwaitedRunner(LateRunner):
    event_type = UnwaitedEvent


def _read(plan: StepPlan) -> Iterator[_Unit]:
    for group_id, pairs in plan.block_copies.items():
        yield from ((group_id, source) for source, _ in pairs)
    for segment in plan.segments:
        for group_id, table in enumerate(segment.tables):
            yield from ((group_id, block_id) for block_id in table.block_ids if block_id)
        if segment.src_slot:
            yield (_SLOTS, segment.src_slot)


def late_device(*, waits: bool = True) -> AbstractContextManager[object]:
    """Every model that is loaded inside runs on a late device; ``waits`` False: on the control."""
    return patch.object(runtime, "ModelRunner", LateRunner if waits else UnwaitedRunner)


def wanted_device() -> AbstractContextManager[object]:
    """What the environment asks for."""
    mode = os.environ.get(LATE_DEVICE_VARIABLE, "")
    assert mode in ("", "1", "control"), f"{LATE_DEVICE_VARIABLE}={mode}: 1 or control"
    return late_device(waits=mode != "control") if mode else nullcontext()
