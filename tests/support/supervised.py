"""``tandem up`` as a user runs it: a child of a shell, its output in a file, its own children found by parent id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.support.hangup import wait_until
from tests.support.service import ROOT, child_environment, free_port

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
SMALL_FLAGS = ("--dtype", "float32", "--kv-cache-memory", "64MiB", "--max-model-len", "4096")
PORT_OFFSETS = (100, 101, 200)


def free_base_port() -> int:
    """A port for the proxy whose nodes' ports (from 100 and 200 above on) are free too."""
    return free_port(*PORT_OFFSETS)


@dataclass(frozen=True)
class Child:
    pid: int
    argv: tuple[str, ...]


def children_of(pid: int) -> list[Child]:
    return [child for child in _processes() if _parent(child.pid) == pid]


def alive(children: list[Child]) -> list[Child]:
    """Those that still run, under their own command line (a process id may be used again)."""
    running = {child.pid: child for child in _processes()}
    return [child for child in children if running.get(child.pid) == child]


def _processes() -> Iterator[Child]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:-1]:  # zombies have no command line
                yield Child(int(folder.name), tuple(word.decode(errors="replace") for word in words[:-1]))


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


class Up:
    """One ``tandem up``, by ``program``. Leaving the context ends it and whatever it left behind."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        program: str = "common.cli",
        ignore_sigint: bool = False,
        **environment: str,
    ) -> None:
        self.log = folder / "up.log"
        self.base_port = free_base_port()
        argv = [sys.executable, "-m", program, "up", "--port", str(self.base_port), *flags]
        if ignore_sigint:  # as a shell does to what a script starts with `&`
            argv = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *argv]
        with self.log.open("wb") as output:
            self.popen = subprocess.Popen(
                argv, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=child_environment(**environment)
            )

    def __enter__(self) -> Up:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        children = self.children()
        self.popen.kill()
        self.popen.wait(STOP_TIMEOUT_S)
        for child in alive(children):
            os.kill(child.pid, signal.SIGKILL)
        if exc is not None:
            sys.stderr.write(self.output[-6000:])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.base_port}"

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[Child]:
        return children_of(self.popen.pid)

    def child(self, module: str) -> Child:
        [found] = [child for child in self.children() if module in child.argv]
        return found

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.popen.poll() is None, f"exited with {self.popen.returncode}:\n{self.output[-4000:]}"
            return "Tandem is ready at" in self.output

        wait_until(ready, "tandem up to be ready", START_TIMEOUT_S)

    def end(self, number: signal.Signals) -> int:
        """Sends one signal to the supervisor alone; returns its exit status."""
        self.popen.send_signal(number)
        return self.popen.wait(STOP_TIMEOUT_S)
