"""The GPU benchmark runs from end to end where there is no GPU; no speed is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.jobs import PARTS, make_jobs
from benchmarks.gpu.measure.floors import Weights, decode_bytes, prefill_flops, state_bytes
from benchmarks.gpu.models.answers import compare
from benchmarks.gpu.models.random_weights import make_config
from benchmarks.gpu.supervise import run_limited
from benchmarks.gpu.table import to_markdown
from common.geometry.geometry import model_geometry

ROOT = Path(__file__).resolve().parents[2]


def run_program(out: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    done = subprocess.run(
        ["bash", "benchmarks/gpu.sh", "--smoke", "--soak", "1", "--out", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
        check=False,
    )
    return done.returncode, done.stdout, json.loads((out / "gpu.json").read_text())


@pytest.mark.full
def test_program_when_there_is_no_gpu_then_every_part_of_the_smoke_run_ends_with_rows(tmp_path: Path) -> None:
    parts = [part for part in PARTS if part not in ("tests", "sanitizer")]  # they start the tests' own models again
    code, text, result = run_program(tmp_path, "--only", *parts)
    found = {name: job["status"] for name, job in result["jobs"].items()}
    assert code == 0, (found, text)
    assert list(found) == ["machine", "identity", "decode+prefill tiny", "ops", "transfer"]
    rows = {name: job["rows"] for name, job in result["jobs"].items()}
    assert all(rows.values())
    assert [row for each in rows.values() for row in each if "error" in row] == []
    assert rows["identity"][0]["kernels = torch"] == "6/6"
    kinds = {row["kind"] for row in rows["decode+prefill tiny"]}
    assert kinds == {"loaded", "prefill", "decode", "transformers' own decode"}
    assert text.count("\n## ") == len(rows)
    assert (tmp_path / "gpu.md").read_text() in text


HANGING = """
import pathlib, subprocess, sys, time
rows, pid = map(pathlib.Path, sys.argv[1:])
rows.write_text('{"found": 1}\\n{"cut')
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pid.write_text(str(child.pid))
print("hangs", flush=True)
time.sleep(600)
"""


def test_job_when_its_time_is_over_then_it_ends_with_what_it_started_and_its_rows_are_kept(tmp_path: Path) -> None:
    rows, log, pid = tmp_path / "rows", tmp_path / "log", tmp_path / "pid"
    found = run_limited([sys.executable, "-c", HANGING, str(rows), str(pid)], rows, log, 3.0)
    assert (found["status"], found["rows"], found["log"]) == ("ended after 3 s", [{"found": 1}], ["hangs"])
    end_s = time.monotonic() + 30
    while _lives(int(pid.read_text())):
        assert time.monotonic() < end_s, "the job's own child was left behind"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.split()[2] != "Z"  # nobody may be there to collect it


def test_job_when_it_ends_by_itself_then_says_how(tmp_path: Path) -> None:
    rows, log = tmp_path / "rows", tmp_path / "log"
    assert run_limited([sys.executable, "-c", ""], rows, log, 60.0)["status"] == "done"
    assert run_limited([sys.executable, "-c", "1 / 0"], rows, log, 60.0)["status"] == "failed with status 1"


def test_markdown_when_a_job_has_failed_then_shows_its_rows_and_its_log() -> None:
    rows = [{"kind": "a", "ms": 1.5, "list": [1]}, {"kind": "a", "ms": 20.0, "error": "x|y"}]
    text = to_markdown({"jobs": {"ops": {"status": "failed", "seconds": 1.0, "rows": rows, "log": ["the end"]}}})
    assert "| ms | error |\n| --- | --- |\n| 1.5 |  |\n| 20.0 | x/y |" in text
    assert "the end" in text


def test_floor_when_the_model_has_experts_then_counts_those_that_a_step_reads() -> None:
    config = make_config("granite-4-h-tiny")
    weights, geometry = Weights.of(config, torch.bfloat16), model_geometry(config.to_dict(), "bfloat16")
    assert weights.num_experts == 64
    assert weights.read_bytes(1) == weights.dense_bytes + weights.expert_bytes * 6 / 64
    assert weights.read_bytes(1) < weights.read_bytes(8) < weights.dense_bytes + weights.expert_bytes
    # 36 layers of 48 heads of 64 x 128 in float32 and 3 x 3,328 inputs of the convolution in bfloat16.
    assert state_bytes(geometry) == 36 * (48 * 64 * 128 * 4 + 3 * 3328 * 2)
    # gpu.md's floors: 0.71, 4.02 and 6.89 ms at 4.3 TB/s.
    for batch, milliseconds in ((1, 0.71), (32, 4.02), (128, 6.89)):
        assert 1e3 * decode_bytes(weights, geometry, batch, 1024) / 4.3e12 == pytest.approx(milliseconds, abs=0.01)
    # 0.9 thousand million active parameters but for the head and embeddings, two operations each.
    products = prefill_flops(weights, geometry, config.num_attention_heads, 8192) / 8192
    assert 2 * 1.3e9 < products < 2 * 1.5e9


def test_jobs_when_two_parts_are_of_models_then_one_process_does_both() -> None:
    jobs = make_jobs(["prefill", "ops", "decode"], ["qwen3.5-4b"], smoke=False, soak_s=5.0)
    assert [(job.name, job.work) for job in jobs] == [
        ("decode+prefill qwen3.5-4b", ("decode", "prefill")),
        ("ops", ("ops",)),
    ]


def test_answers_when_one_token_differs_then_they_are_not_equal() -> None:
    same = [[(1, -0.5), (2, -0.25)], [(3, -1.0), (4, -2.0)]]
    damaged = [same[0], [(3, -1.5), (5, -2.0)]]
    assert compare(same, same).num_equal == 2
    found = compare(same, damaged)
    assert (found.num_equal, found.logprob) == (1, 0.5)
