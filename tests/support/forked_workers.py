"""``python -m tests.support.forked_workers N ARGS``: pytest with N of xdist's workers, which share their imports.

Each worker would import torch, transformers and FastAPI for itself, and so would the warm server of each: a tenth of
the time of all tests. Here one process imports them once, forks the workers before pytest begins, and then is the
pytest that they work for. A worker is otherwise xdist's own: it waits for the first line on its standard input.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import pytest
from execnet import gateway_base, gateway_io

from tests.support import warm, warm_server

IMPORTED = ("anthropic", "openai", "pydantic_ai", "openapi_spec_validator", "kubernetes_validate")
"""What tests import beside the product's own."""


@dataclass
class Worker:
    """A forked process, in the words of ``subprocess.Popen`` that execnet uses."""

    pid: int
    stdin: BinaryIO
    stdout: BinaryIO

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def fork_workers(number: int) -> list[Worker]:
    workers: list[Worker] = []
    for _ in range(number):
        (their_stdin, stdin), (stdout, their_stdout) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            # Held here too, the others' standard inputs would never end.
            for each in (stdin, stdout, *(file.fileno() for other in workers for file in (other.stdin, other.stdout))):
                os.close(each)
            _be_worker(their_stdin, their_stdout)
        os.close(their_stdin)
        os.close(their_stdout)
        workers.append(Worker(pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")))
    return workers


def _be_worker(stdin: int, stdout: int) -> NoReturn:
    """What execnet's ``python -c`` does, with a warm server at hand."""
    status = 1
    try:
        warm_server.be_forked()
        for source, target in ((stdin, 0), (stdout, 1)):
            os.dup2(source, target)
            os.close(source)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            os.setsid()
            for target in (0, 1):
                os.dup2(os.open(os.devnull, os.O_RDWR), target)
            warm_server.be_forked()
            warm_server.serve(theirs)
            os._exit(0)
        theirs.close()
        warm.inherited.append(ours)
        sys.argv = ["-c"]
        if line := sys.stdin.readline():  # empty: pytest did not come so far as to want workers
            exec(eval(line), {"__name__": "__main__"})
        status = 0
    except Exception:  # noqa: BLE001 - whatever it dies of is to be read
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> int:
    number, *args = sys.argv[1:]
    for name in IMPORTED:
        importlib.import_module(name)
    warm_server.prepare()
    waiting = fork_workers(int(number))

    class ForkedIO(gateway_io.Popen2IOMaster):
        def __init__(self, args: list[str], execmodel: Any) -> None:
            if not waiting:  # one has died, and xdist wants another
                super().__init__(args, execmodel)
                return
            self.popen = worker = waiting.pop()
            gateway_base.Popen2IO.__init__(self, worker.stdin, worker.stdout, execmodel=execmodel)

    gateway_io.Popen2IOMaster = ForkedIO
    # "Already imported, cannot be rewritten": no assertion of anyio's is of interest.
    ignored = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    return pytest.main(["--numprocesses", number, "-W", ignored, *args])


if __name__ == "__main__":
    sys.exit(main())
