"""Runs the parts, each in its own process, and writes gpu.json after each; a Markdown table is printed last.

Rows that a job has found before its time is over, or before it crashed, are kept. A job that ends early leaves its time
to those behind it. Exit status: 0 when every part that was wanted ended by itself, whatever it found.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import PARTS, Job, make_jobs
from benchmarks.gpu.models.sizes import MODELS
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.supervise import GRACE_S, run_limited
from benchmarks.gpu.table import to_markdown


def main() -> None:
    args = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the table is printed in any case
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    result: dict[str, Any] = {"settings": vars(args), "date": time.strftime("%Y-%m-%d %H:%M:%S"), "jobs": {}}
    jobs = make_jobs(args.only, args.models, smoke=args.smoke, soak_s=args.soak)
    try:
        for index, job in enumerate(jobs):
            left_s = args.seconds - (time.monotonic() - begin_s)
            share = job.limit_s / sum(each.limit_s for each in jobs[index:])
            found = _run(job, args, out, min(job.limit_s, left_s * share))
            result["jobs"][job.name] = found
            result["seconds"] = round(time.monotonic() - begin_s, 1)
            _write(out / "gpu.json", result)
            print(f"{result['seconds']:6.1f} s  {job.name}: {found['status']}, {len(found['rows'])} rows", flush=True)
    finally:
        text = to_markdown(result)
        (out / "gpu.md").write_text(text, encoding="utf-8")
        print(text, flush=True)
    sys.exit(any(found["status"] != "done" for found in result["jobs"].values()))


def _run(job: Job, args: argparse.Namespace, out: Path, limit_s: float) -> dict[str, Any]:
    if limit_s < GRACE_S:
        return {"status": "not run: no time left", "seconds": 0.0, "rows": []}
    settings = Settings(
        smoke=args.smoke,
        out=str(out),
        work=job.work,
        model=job.model,
        backend=args.backend,
        limit_s=limit_s,
        soak_s=args.soak,
    )
    name = job.name.replace(" ", "-")
    rows = out / f"{name}.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu.job", settings.to_json(), str(rows)]
    return run_limited(command, rows, out / f"{name}.log", limit_s)


def _write(path: Path, result: dict[str, Any]) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(result, indent=1), encoding="utf-8")
    scratch.replace(path)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash benchmarks/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = tuple(MODELS)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", default="gpu-benchmark", metavar="DIR", help="where gpu.json, gpu.md and logs go")
    parser.add_argument("--seconds", type=float, default=480.0, metavar="N", help="the longest that all of it may take")
    parser.add_argument("--models", nargs="+", choices=models, default=list(models[:-1]), help="of decode and prefill")
    parser.add_argument("--backend", default="auto", help="--ops-backend of the models and ops that are measured")
    parser.add_argument("--soak", type=float, default=20.0, metavar="N", help="seconds of pulls in a row (transfer)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; runs on a CPU too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
