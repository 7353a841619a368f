"""Part ``sanitizer``: NVIDIA's compute-sanitizer over mixed steps of tiny models (``mixed_step.py``): reads and writes
out of bounds, then, as far as the time goes, races in shared memory. Where it is not installed, the part says so."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator

from benchmarks.gpu.children import run_child
from benchmarks.gpu.settings import Row, Settings

FAMILIES = ("granitemoehybrid", "qwen3_5", "kimi_linear", "jamba")
RUNS = tuple(
    (check, family)
    for families in (FAMILIES[:2], FAMILIES[2:])
    for check in ("memcheck", "racecheck")
    for family in families
)
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def run(settings: Settings) -> Iterator[Row]:
    tool = shutil.which("compute-sanitizer")
    steps = [sys.executable, "-m", "benchmarks.gpu.models.mixed_step", settings.backend]
    end_s = time.monotonic() + settings.limit_s - 2
    if tool is None:
        yield {"kind": "sanitizer", "tool": "compute-sanitizer is not on the PATH"}
        if settings.smoke:
            ended = run_child([*steps[:-1], settings.backend_on("cpu"), FAMILIES[0]], end_s - time.monotonic())
            yield {"kind": "without it", "result": ended.status, "steps": "mixed steps done" in ended.output}
        return
    # Each tensor an allocation of its own: in torch's pool a read behind one would be inside another.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for check, family in RUNS:
        begin_s = time.monotonic()
        if end_s - begin_s < 5:
            return
        command = [tool, "--tool", check, "--target-processes", "application-only", "--print-limit", "5", *steps]
        ended = run_child([*command, family], end_s - begin_s, env)
        summary = _SUMMARY.search(ended.output)
        row: dict[str, object] = {
            "kind": "sanitizer",
            "tool": check,
            "family": family,
            "errors": int(summary[1]) if summary else None,
            "steps": "mixed steps done" in ended.output,
            "result": ended.status,
            "seconds": time.monotonic() - begin_s,
        }
        if not summary or summary[1] != "0":
            row["output"] = [line for line in ended.output.splitlines() if line.startswith("=====")][:60]
        yield row
