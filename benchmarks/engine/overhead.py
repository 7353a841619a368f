"""Where a decode step goes when the model is next to nothing: size S, batch 1, bfloat16, through the engine core.

Kernels (compiled ops, linear layers, and the runs of them that a replayed step is made of) are timed where they are
entered; everything else is overhead. Clocks round a call cost 0.1 us each and are part of what they surround.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.models import make_checkpoint
from common.config.node import NodeConfig
from common.engine.core import EngineCore
from common.engine.model_runner import ModelRunner
from common.node.runtime import create_core, load_node_model
from common.ops.cpu.backend import CppOps
from common.request import Request, SamplingParams

_PROMPT_TOKENS = 64
_WARM_UP, _STEPS = 50, 500


def print_overhead(family: str, clock: Callable[[], float], is_replayed: bool) -> None:
    """Medians over some hundred steps, in microseconds. ``is_replayed`` False: every step through the model's code."""
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        path = make_checkpoint(family, "S", torch.bfloat16, Path(folder))
        config = NodeConfig(model=str(path), device="cpu", kv_cache_memory=128 << 20, ops_backend="cpp")
        model = load_node_model(config, compact_weights=True)
    if not is_replayed:
        model.runner = ModelRunner(replace(model.loaded, is_replayed=False), model.storage, model.cache_config)
    core = create_core(config, model)
    params = SamplingParams(temperature=0.0, max_tokens=_WARM_UP + _STEPS, ignore_eos=True)
    core.add_request(Request("r", [7 + i for i in range(_PROMPT_TOKENS)], params, arrival_s=0.0))
    for _ in range(_WARM_UP):
        core.step()
    spent = _watch(core, model, clock)
    steps: list[dict[str, float]] = []
    while core.has_work():
        spent.clear()
        begin_s = clock()
        core.step()
        steps.append({**spent, "step": clock() - begin_s})
    median = {name: 1e6 * statistics.median(step.get(name, 0.0) for step in steps) for name in steps[0]}
    engine = median["step"] - sum(median[name] for name in ("schedule", "forward", "logits", "sample"))
    print(f"family {family}, size S, batch 1, bfloat16: microseconds of one step, medians of {_STEPS}")
    for name, value in (
        ("step", median["step"]),
        ("  schedule", median["schedule"]),
        ("  forward and head: kernels", median["kernels"]),
        ("  forward and head: Python, torch", median["forward"] + median["logits"] - median["kernels"]),
        ("  sample", median["sample"]),
        ("  core: publish, emit", engine),
        ("overhead: step - kernels", median["step"] - median["kernels"]),
    ):
        print(f"{name:<40}{value:9.1f}")


def _watch(core: EngineCore, model: Any, clock: Callable[[], float]) -> dict[str, float]:
    """Times the parts of a step from now on; what comes back is filled by each step."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin_s = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += clock() - begin_s

        return call

    ops = model.loaded.ops
    assert isinstance(ops, CppOps)
    for holder, attribute, name in (
        (core._scheduler, "schedule", "schedule"),
        (core._runner, "launch", "forward"),
        (core._runner, "logits", "logits"),
        (core._sampler, "sample", "sample"),
        (ops.elementwise, "_replay", "kernels"),
        (ops.elementwise, "function", "kernels"),
        (ops.linears, "_linear", "kernels"),
        (ops.linears, "_unpack", "kernels"),
        (ops.norms, "_norm", "kernels"),
    ):
        setattr(holder, attribute, timed(name, getattr(holder, attribute)))
    for name, function in ops._functions.items():
        ops._functions[name] = timed("kernels", function)
    return spent
