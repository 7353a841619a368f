"""The proxies that are measured, each a process of its own on one core, started, waited for and ended here."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
NGINX_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass(frozen=True)
class Ports:
    prefill: int
    decode: int
    proxy: int


@dataclass(frozen=True)
class Contestant:
    """``has_both_legs``: it makes both legs of a request; else it only passes the decode leg on. ``headers``: what its
    requests carry besides."""

    name: str
    has_both_legs: bool
    command: Callable[[Ports, Path], Sequence[str]]
    environment: Callable[[Ports], Mapping[str, str]] = lambda ports: {}
    headers: Sequence[str] = ()

    @property
    def is_installed(self) -> bool:
        return self.name not in EXECUTABLES or shutil.which(EXECUTABLES[self.name]) is not None


EXECUTABLES = {"nginx": "nginx", "haproxy": "haproxy", "vllm-router": "vllm-router"}


def _tandem(ports: Ports, folder: Path) -> Sequence[str]:
    nodes = ["--prefill", _url(ports.prefill), "--decode", _url(ports.decode)]
    return [sys.executable, "-m", "proxy", "--port", str(ports.proxy), "--max-concurrency", "4096", *nodes]


def _nginx(ports: Ports, folder: Path) -> Sequence[str]:
    paths = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in NGINX_TEMPORARY)
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; worker_processes 1; error_log stderr crit; pid {folder}/nginx.pid;\n"
        "events { worker_connections 8192; }\n"
        f"http {{ access_log off;\n{paths}"
        f"upstream decode {{ server 127.0.0.1:{ports.decode}; keepalive 64; }}\n"
        f"server {{ listen 127.0.0.1:{ports.proxy}; keepalive_requests 1000000; location / {{\n"
        "proxy_pass http://decode; proxy_http_version 1.1; proxy_set_header Connection ''; proxy_buffering off; } } }\n"
    )
    return ["nginx", "-p", str(folder), "-c", str(config)]


def _haproxy(ports: Ports, folder: Path) -> Sequence[str]:
    config = folder / "haproxy.cfg"
    config.write_text(
        "global\n nbthread 1\n maxconn 8192\n"
        "defaults\n mode http\n timeout connect 2s\n timeout client 60s\n timeout server 60s\n option http-no-delay\n"
        f"frontend clients\n bind 127.0.0.1:{ports.proxy}\n default_backend nodes\n"
        f"backend nodes\n http-reuse always\n server decode 127.0.0.1:{ports.decode}\n"
    )
    return ["haproxy", "-db", "-q", "-f", str(config)]


def _vllm_router(ports: Ports, folder: Path) -> Sequence[str]:
    nodes = ["--vllm-pd-disaggregation", "--prefill", _url(ports.prefill), "--decode", _url(ports.decode)]
    return ["vllm-router", "--host", "127.0.0.1", "--port", str(ports.proxy), *nodes]


CONTESTANTS = (
    # The same prompt again and again would stay on the decode node, which has it: one leg.
    Contestant("tandem", True, _tandem, headers=("x-tandem-placement: remote",)),
    Contestant(
        "fastapi+httpx",
        True,
        lambda ports, folder: [sys.executable, "-m", "benchmarks.proxy.plain"],
        lambda ports: {
            "PREFILL_URL": _url(ports.prefill),
            "DECODE_URL": _url(ports.decode),
            "PORT": str(ports.proxy),
        },
    ),
    Contestant("vllm-router", True, _vllm_router),
    Contestant("nginx", False, _nginx),
    Contestant("haproxy", False, _haproxy),
)


class Process:
    """One started program and its children."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pids(self) -> list[int]:
        pids = [self._process.pid]
        for children in Path(f"/proc/{pids[0]}/task").glob("*/children"):
            pids += [int(pid) for pid in children.read_text().split()]
        return pids

    def cpu_seconds(self) -> float:
        """Processor time so far of the threads that there are, to the nanosecond (``/proc/PID/stat`` counts 10 ms)."""
        stats = (stat for pid in self.pids for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9

    def num_writes(self) -> int:
        """Writing system calls so far: what is sent in one piece is one."""
        lines = (line for pid in self.pids for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return sum(int(line.split()[1]) for line in lines if line.startswith("syscw:"))

    def resident_mib(self) -> float:
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids)
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def running(
    command: Sequence[str], ports: Sequence[int], core: int, environment: Mapping[str, str]
) -> Iterator[Process]:
    """``command`` on ``core``, from when it listens on ``ports``."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "TANDEM_LOG_LEVEL": "error", **environment},
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    started = Process(process)
    try:
        for port in ports:
            _wait_listening(process, port)
        yield started
    finally:
        started.stop()


@contextlib.contextmanager
def contestant_running(contestant: Contestant, ports: Ports, core: int) -> Iterator[Process]:
    with tempfile.TemporaryDirectory() as folder:
        command = contestant.command(ports, Path(folder))
        with running(command, [ports.proxy], core, contestant.environment(ports)) as process:
            yield process


def _wait_listening(process: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"{process.args!r} does not listen on port {port}")
        time.sleep(0.05)


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
