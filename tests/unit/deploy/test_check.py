"""deploy/check.sh where it cannot run. What it finds where it can is its own to say: it is a check of whole images."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_check_when_there_is_no_container_engine_then_is_skipped_with_the_reason(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "python3"):
        program = shutil.which(name)
        assert program is not None
        (tmp_path / name).symlink_to(program)
    done = subprocess.run(
        ["bash", "deploy/check.sh"],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 77, done.stderr  # tests/run.sh --all passes over this status alone
    assert done.stdout.splitlines()[-1].startswith("skipped: neither docker")
