"""``python -m tests.support.warm_server``: forks nodes and proxies that need not import torch or FastAPI again.

Importing them takes most of a start, and the tests start a hundred of them. The server imports their modules once,
stays at one thread, and forks a child for each request on its standard input's socket. What the child then runs is
``python -m prefill_node``, ``decode_node`` or ``proxy`` with its flags, in a session and with an environment of its
own: all that it skips is the import. (Cold starts are tested where starting is: the CLI, ``tandem up``, deploy.)

A request is one JSON line, {"module", "argv", "environment", "cwd", "log"}; its answers are one JSON line each,
{"pid"} when it runs and {"pid", "status"} when it has ended, with the status of ``os.waitstatus_to_exitcode``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

from tests.support.warm import die_with_parent

PRELOADED = ("common.node.app", "proxy.app")


def serve(connection: socket.socket) -> None:
    """Until the other end closes; its children end with it (``PR_SET_PDEATHSIG``, which the child sets)."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    requests = connection.makefile("rb", buffering=0)
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    line = requests.readline()
                    if not line:
                        return
                    pid = os.fork()
                    if pid == 0:
                        _run(json.loads(line), connection, woken, wake)
                    _send(connection, {"pid": pid})
                else:
                    with contextlib.suppress(BlockingIOError):
                        woken.recv(4096)
                    _reap(connection)


def _reap(connection: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _send(connection, {"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _send(connection: socket.socket, message: dict[str, int]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _run(request: dict[str, Any], *sockets: socket.socket) -> NoReturn:
    """The child: becomes what ``python -m module argv`` is after its imports."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        be_forked()
        for each in sockets:
            os.close(each.detach())
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        for target in (1, 2):
            os.dup2(log, target)
        os.close(log)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = [request["module"], *request["argv"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except Exception:  # noqa: BLE001 - whatever a node dies of, its log says it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def be_forked() -> None:
    """What a process has to do first when it is a fork."""
    # Python before 3.13 keeps the parent's number of it, by which a loop's lag looks up what its thread ran.
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    die_with_parent()


def prepare() -> None:
    """What each process imports, and makes once of its API; children have it then."""
    for name in PRELOADED:
        importlib.import_module(name)

    from common.openai.openapi import ENDPOINTS
    from common.server.app import make_docs
    from proxy.app import DIALECT_ENDPOINTS

    make_docs("Tandem prefill node", ENDPOINTS)
    make_docs("Tandem decode node", ENDPOINTS)
    make_docs("Tandem proxy", (*ENDPOINTS, *DIALECT_ENDPOINTS))
    # A fork copies one thread only: a second one could hold a lock for ever in the child.
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()


def main() -> None:
    prepare()
    serve(socket.socket(fileno=sys.stdin.fileno()))


if __name__ == "__main__":
    main()
