"""The benchmark of what surrounds a step's kernels runs from end to end; no speed is asserted."""

from __future__ import annotations

import time

import pytest

from benchmarks.engine.overhead import print_overhead
from tests.support.ops import make_ops


def test_overhead_when_a_step_is_taken_apart_then_each_part_that_is_timed_has_a_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert make_ops("cpp").name == "cpp"
    print_overhead("granitemoehybrid", time.perf_counter, is_replayed=True)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("family granitemoehybrid, size S, batch 1")
    figures = {name.strip(): float(value) for name, value in (line.rsplit(maxsplit=1) for line in lines)}
    assert list(figures) == [
        "step",
        "schedule",
        "forward and head: kernels",
        "forward and head: Python, torch",
        "sample",
        "core: publish, emit",
        "overhead: step - kernels",
    ]
    timed = [figures[name] for name in ("step", "schedule", "forward and head: kernels", "sample")]
    assert min(timed) > 0
    assert max(timed) == figures["step"]
