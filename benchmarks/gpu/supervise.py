"""One job's process: under a limit, with what it starts; what it found until then is kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GRACE_S = 5.0
"""Between asking a job to end and ending it."""
TAIL_LINES = 25


def run_limited(command: Sequence[str], rows: Path, log: Path, limit_s: float) -> dict[str, Any]:
    """``command`` writes a line of JSON to ``rows`` for each row. Status, seconds, rows, and the end of the log where
    something went wrong."""
    rows.unlink(missing_ok=True)
    begin_s = time.monotonic()
    with log.open("wb") as file:
        # A session of its own: what the job starts ends with it.
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit_s)
            status = "done" if code == 0 else f"failed with status {code}"
        except subprocess.TimeoutExpired:
            status = f"ended after {limit_s:.0f} s"
        finally:
            _end(process)
    text = rows.read_text(encoding="utf-8") if rows.exists() else ""
    found: dict[str, Any] = {
        "status": status,
        "seconds": round(time.monotonic() - begin_s, 1),
        "rows": [json.loads(line) for line in text.splitlines() if line.endswith("}")],
    }
    if status != "done":
        found["log"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the job's whole session: politely, then for certain."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
