"""The process of one job: ``python -m benchmarks.gpu.job SETTINGS ROWS``. Each row is written as it is found, so that
whoever ends this process has those from before."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from benchmarks.gpu.jobs import run_job
from benchmarks.gpu.measure.timing import find_device
from benchmarks.gpu.settings import Settings


def main() -> None:
    settings, path = Settings.from_json(sys.argv[1]), Path(sys.argv[2])
    if not settings.smoke and find_device().type != "cuda":
        raise SystemExit(f"torch {torch.__version__} finds no CUDA device here; --smoke tries the program without one")
    with path.open("w", encoding="utf-8") as file:
        for row in run_job(settings):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
    # Without the interpreter's clean-up: a library that NIXL brings crashes in it beside the system's own (libnl).
    sys.stdout.flush()
    os._exit(0)
