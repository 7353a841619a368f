"""Parts ``decode`` and ``prefill`` of one model: steps of a whole engine, with random weights in bfloat16.

Decode: the median step of 1, 32 and 128 sequences behind prompts of 1,024 tokens, as nodes run it and with
``--enforce-eager``; beside it the floor (``floors.py``), and at batch 1 transformers' own decode step. ``cpu_ms``: time
of the engine's thread in ``launch`` and ``collect``; waiting takes none, for the driver is told to sleep meanwhile
(where it refuses, ``cpu_waits`` says ``spins``, and waits outside of ``Forward.wait`` are in it).

Prefill: one prompt of 8,192 tokens, in steps of 2,048 and as one.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

from benchmarks.gpu.measure.floors import Weights, decode_bytes, prefill_flops
from benchmarks.gpu.measure.launches import count_launches
from benchmarks.gpu.measure.timing import Ceilings, find_device, measure_ceilings, synchronize
from benchmarks.gpu.models.node import STEP_TOKENS, BenchmarkNode
from benchmarks.gpu.models.random_weights import make_config
from benchmarks.gpu.models.stock import stock_decode_s
from benchmarks.gpu.settings import Row, Settings
from common.engine.core import EngineCore
from common.engine.model_runner import Forward

DTYPE = "bfloat16"
_SCHEDULE_BLOCKING = 4
"""Of ``CUctx_flags``."""


@dataclass(frozen=True)
class Sizes:
    batches: tuple[int, ...] = (1, 32, 128)
    context: int = 1024
    prompt: int = 8192
    prompt_steps: tuple[int, ...] = (STEP_TOKENS, 8192)
    wall_steps: int = 40
    cpu_steps: int = 16
    repeat: int = 3


SMOKE = Sizes((1, 3), 40, 100, (64, 128), 4, 2, 1)


def run(settings: Settings) -> Iterator[Row]:
    sizes = SMOKE if settings.smoke else Sizes()
    device = find_device()
    ceilings = measure_ceilings(device)
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder:
        for eager in (False, True) if "decode" in settings.work else (False,):
            begin_s = time.monotonic()
            left_bytes = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            node = BenchmarkNode(
                settings.model,
                Path(folder),
                settings,
                dtype=DTYPE,
                eager=eager,
                max_batch=max(sizes.batches),
                context=sizes.context + 512,
                prompt=sizes.prompt + 64,
            )
            weights = Weights.of(make_config(settings.model), getattr(torch, DTYPE))
            is_replayed = node.model.loaded.is_replayed
            mode = "eager" if eager else "graphs" if is_replayed else "no graphs"
            yield {
                "kind": "loaded",
                "mode": mode,
                "seconds": time.monotonic() - begin_s,
                "ops": node.model.loaded.ops.name,
                "weights_gb": (weights.dense_bytes + weights.expert_bytes) / 1e9,
                "is_replayed": is_replayed,
                "left_from_before_gb": left_bytes / 1e9,
                **node.notes,
            }
            if "prefill" in settings.work and not eager:
                yield from _prefill(node, sizes, weights, ceilings)
            if "decode" in settings.work:
                yield from _decode(node, mode, sizes, weights, ceilings)
            del node
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if "decode" in settings.work:
            stock_s = stock_decode_s(Path(folder), getattr(torch, DTYPE), device, sizes.context)
            yield {"kind": "transformers' own decode", "batch": 1, "ms": 1e3 * stock_s, "tokens_per_s": 1 / stock_s}


# --- prefill


def _prefill(node: BenchmarkNode, sizes: Sizes, weights: Weights, ceilings: Ceilings) -> Iterator[Row]:
    loaded = node.model.loaded
    num_heads = int(loaded.model.config.get_text_config().num_attention_heads)
    flops = prefill_flops(weights, loaded.geometry, num_heads, sizes.prompt)
    for step_tokens in sizes.prompt_steps:
        core = node.core(step_tokens)
        samples = []
        for _ in range(1 + sizes.repeat):
            node.add(core, sizes.prompt, 1)
            synchronize(loaded.device)
            begin_s = time.perf_counter()
            _drain(core)
            samples.append(time.perf_counter() - begin_s)
        seconds = statistics.median(samples[1:])
        yield {
            "kind": "prefill",
            "tokens": sizes.prompt,
            "step_tokens": step_tokens,
            "ms": 1e3 * seconds,
            "first_ms": 1e3 * samples[0],
            "tokens_per_s": sizes.prompt / seconds,
            "of_matrix_rate": flops / seconds / ceilings.flops,
        }


def _drain(core: EngineCore) -> None:
    while core.has_work():
        for output in core.step():
            if output.error is not None:
                raise output.error


# --- decode


def _decode(node: BenchmarkNode, mode: str, sizes: Sizes, weights: Weights, ceilings: Ceilings) -> Iterator[Row]:
    loaded = node.model.loaded
    for batch in sizes.batches:
        core = node.core()
        begin_s = time.perf_counter()
        steps = _DecodeSteps(node, core, batch, sizes.context)
        prompts_s = time.perf_counter() - begin_s
        for _ in range(4):
            steps.step()
        wall = [steps.step() for _ in range(sizes.wall_steps)]
        context = steps.mean_context - sizes.wall_steps / 2
        cpu = _cpu_time(steps, sizes.cpu_steps)
        launches = count_launches(steps.step, loaded.device)
        steps.end()
        seconds = statistics.median(wall)
        floor_s = ceilings.floor_s(decode_bytes(weights, loaded.geometry, batch, context))
        yield {
            "kind": "decode",
            "mode": mode,
            "batch": batch,
            "context": round(context),
            "ms": 1e3 * seconds,
            "p90_ms": 1e3 * sorted(wall)[len(wall) * 9 // 10],
            "floor_ms": 1e3 * floor_s,
            "of_floor": floor_s / seconds,
            "tokens_per_s": batch / seconds,
            **cpu,
            **launches,
            "prompts_s": prompts_s,
        }


@dataclass
class _DecodeSteps:
    """``batch`` sequences whose prompts are computed, all of them in every step."""

    node: BenchmarkNode
    core: EngineCore
    batch: int
    context: int
    names: list[str] = field(default_factory=list)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.names = [self.node.add(self.core, self.context, 1 << 14) for _ in range(self.batch)]
        begun: set[str] = set()
        while len(begun) < self.batch:
            for output in self.core.step():
                if output.error is not None:
                    raise output.error
                begun.add(output.request_id)
                self.num_tokens += len(output.token_ids)

    @property
    def mean_context(self) -> float:
        return self.context + self.num_tokens / self.batch

    def step(self) -> float:
        """Seconds of one step."""
        begin_s = time.perf_counter()
        outputs = self.core.step()
        seconds = time.perf_counter() - begin_s
        found = sum(len(output.token_ids) for output in outputs)
        if found != self.batch:
            errors = [output.error for output in outputs if output.error is not None]
            raise RuntimeError(f"a decode step of {self.batch} sequences gave {found} tokens: {errors[:1]}")
        self.num_tokens += found
        return seconds

    def end(self) -> None:
        for name in self.names:
            self.core.abort(name)


def _cpu_time(steps: _DecodeSteps, num_steps: int) -> Row:
    """Medians of the thread's time in ``launch`` and in ``collect`` without ``Forward.wait``, milliseconds."""
    core, waits = steps.core, [0.0]
    wait = Forward.wait

    def timed(forward: Forward) -> list[torch.Tensor]:
        begin_s = time.thread_time()
        rows = wait(forward)
        waits[0] += time.thread_time() - begin_s
        return rows

    launch, collect = [], []
    with mock.patch.object(Forward, "wait", timed), _sleeping_waits() as how:
        for _ in range(num_steps):
            waits[0] = 0.0
            begin_s = time.thread_time()
            step = core.launch()
            launched_s = time.thread_time()
            outputs = core.collect(step)
            collect.append(time.thread_time() - launched_s - waits[0])
            launch.append(launched_s - begin_s)
            steps.num_tokens += sum(len(output.token_ids) for output in outputs)
    parts = {"cpu_launch_ms": statistics.median(launch), "cpu_collect_ms": statistics.median(collect)}
    total = statistics.median(a + b for a, b in zip(launch, collect, strict=True))
    return {"cpu_ms": 1e3 * total, **{name: 1e3 * value for name, value in parts.items()}, "cpu_waits": how}


@contextmanager
def _sleeping_waits() -> Iterator[str]:
    """The driver's waits sleep instead of spinning in here, so that they take no CPU time."""
    if not torch.cuda.is_available():
        yield "none"
        return
    driver = ctypes.CDLL("libcuda.so.1")
    set_flags = getattr(driver, "cuCtxSetFlags", None)  # CUDA 12.1
    can_sleep = set_flags is not None and set_flags(ctypes.c_uint(_SCHEDULE_BLOCKING)) == 0
    try:
        yield "sleeps" if can_sleep else "spins"
    finally:
        if can_sleep:
            set_flags(ctypes.c_uint(0))
