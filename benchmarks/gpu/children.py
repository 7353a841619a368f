"""Programs that a part starts, each under a limit."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ended:
    """``code``: None when it was ended because its time was over."""

    code: int | None
    output: str

    @property
    def status(self) -> str:
        return "ended: no time left" if self.code is None else f"status {self.code}"


def run_child(command: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> Ended:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(1.0, limit_s),
            env=env,
            check=False,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired as exc:
        output = exc.stdout or b""
        return Ended(None, output.decode(errors="replace") if isinstance(output, bytes) else output)
    return Ended(done.returncode, done.stdout)
