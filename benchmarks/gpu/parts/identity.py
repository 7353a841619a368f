"""Part ``identity``: the same answers from the GPU's kernels as from the torch ops, and with graphs as without.

Tiny models of every family in float32, greedy, cold and from the cache. ``graph = eager`` is expected to be exact;
between kernels and torch ops a token may differ where the model itself is undecided: then ``largest`` (the difference
of log-probabilities there) is of the size of rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.measure.timing import find_device, synchronize
from benchmarks.gpu.models.answers import PROMPTS, Answer, Difference, answers, compare
from benchmarks.gpu.settings import Row, Settings
from tests.support.models import FAMILIES, SHORT_TIER

SMOKE = ("granitemoehybrid",)
HALF = ("granitemoehybrid", "qwen3_5")
"""Also in bfloat16, graphs against eager: with that they must agree as exactly."""


def run(settings: Settings) -> Iterator[Row]:
    ordered = [*SHORT_TIER, *(family for family in FAMILIES if family not in SHORT_TIER)]
    families, prompts = (SMOKE, PROMPTS[:3]) if settings.smoke else (ordered, PROMPTS)
    backend = settings.backend_on(find_device().type)
    for family in families:
        row: dict[str, object] = {"kind": "identity", "family": family, "dtype": "float32"}
        try:
            ours = answers(family, "float32", backend=backend, eager=False, prompts=prompts)
            eager = answers(family, "float32", backend=backend, eager=True, prompts=prompts)
            row |= _fields("graph = eager", compare(ours, eager))
            torch_ops = answers(family, "float32", backend="torch", eager=True, prompts=prompts)
            row |= _fields("kernels = torch", compare(eager, torch_ops))
            row |= _fields("cold = cached", compare(*_halves(ours)))
        except Exception as exc:  # noqa: BLE001  # a family that fails must not hide the others
            row["error"] = f"{type(exc).__name__}: {exc}"
        yield row
        synchronize(find_device())  # raises where a kernel has left the device unusable
        _free()
    for family in HALF if not settings.smoke else ():
        ours, eager = (answers(family, "bfloat16", backend=backend, eager=each) for each in (False, True))
        yield {
            "kind": "identity",
            "family": family,
            "dtype": "bfloat16",
            **_fields("graph = eager", compare(ours, eager)),
        }


def _fields(name: str, difference: Difference) -> dict[str, object]:
    return {name: f"{difference.num_equal}/{difference.num_answers}", f"largest, {name}": f"{difference.logprob:.1e}"}


def _halves(found: list[Answer]) -> tuple[list[Answer], list[Answer]]:
    middle = len(found) // 2
    return found[:middle], found[middle:]


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
