"""The parts and their jobs: processes that are run one after the other, each under a limit of its own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.models.sizes import SMOKE_MODEL
from benchmarks.gpu.settings import Row, Settings

LIMITS_S = {
    "machine": 45,
    "identity": 120,
    "decode": 70,
    "prefill": 45,
    "ops": 130,
    "transfer": 75,
    "sanitizer": 100,
    "tests": 120,
}
"""In the order in which they run: what says most first. ``decode`` and ``prefill``: for each model."""
PARTS = tuple(LIMITS_S)
OF_MODELS = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class Job:
    """``work``: the parts that it does; several only of a model, which is made once for all of them."""

    name: str
    work: tuple[str, ...]
    limit_s: float
    model: str = ""


def make_jobs(parts: Sequence[str], models: Sequence[str], *, smoke: bool, soak_s: float) -> list[Job]:
    wanted = [part for part in PARTS if part in parts]
    of_models = tuple(part for part in wanted if part in OF_MODELS)
    jobs: list[Job] = []
    for part in wanted:
        limit_s = LIMITS_S[part] + (soak_s if part == "transfer" else 0.0)
        if part not in OF_MODELS:
            jobs.append(Job(part, (part,), limit_s))
        elif part == of_models[0]:
            limit_s = float(sum(LIMITS_S[each] for each in of_models))
            names = (SMOKE_MODEL,) if smoke else models
            jobs += [Job(f"{'+'.join(of_models)} {name}", of_models, limit_s, name) for name in names]
    return jobs


def run_job(settings: Settings) -> Iterator[Row]:
    """The rows of a job, in the process that does it. A part is imported where it is needed: each needs other
    packages, and one that is missing costs that part alone."""
    name = "model_steps" if settings.model else settings.work[0]
    module = importlib.import_module(f"benchmarks.gpu.parts.{name if name != 'tests' else 'cuda_tests'}")
    rows: Iterator[Row] = module.run(settings)
    return rows
