"""Where ``tandem up`` writes what its processes say: each line under its process's name, or, when they log JSON, one
object a line."""

from __future__ import annotations

import json
import time
from typing import TextIO

from common.telemetry.logs import timestamp

PROGRAM = "tandem up"


class LogSink:
    """Not thread-safe."""

    def __init__(self, stream: TextIO, log_format: str) -> None:
        self._stream = stream
        self._is_json = log_format == "json"

    def forward(self, name: str, line: str) -> None:
        """``line`` comes from process ``name``. A JSON line names its process itself; other output, such as a
        library's, becomes an object."""
        if not self._is_json:
            self._write(f"[{name}] {line}")
        elif is_json_object(line):
            self._write(line)
        elif line.strip():
            self._write(_object("info", "output", line, name))

    def say(self, text: str) -> None:
        """A line of ``tandem up`` itself."""
        level = "error" if text.startswith("error") else "info"
        self._write(_object(level, PROGRAM, text, "up") if self._is_json else f"{PROGRAM}: {text}")

    def repeat(self, line: str) -> None:
        """Show a line again that ``forward`` wrote already; a reader of JSON needs it once only."""
        if not self._is_json:
            self._write(f"    {line}")

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def is_json_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _object(level: str, logger: str, message: str, node: str) -> str:
    fields = {"ts": timestamp(time.time()), "level": level, "logger": logger, "message": message, "node": node}
    return json.dumps(fields, ensure_ascii=False)
