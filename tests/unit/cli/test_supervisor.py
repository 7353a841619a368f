"""The supervisor with children of a few lines, its deadlines made short."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from pathlib import Path

import pytest

from common.cli.supervisor import ChildSpec, Supervisor, check_port_free, describe_status
from common.errors import ConfigError
from tests.support.service import free_port

SERVE = """
import http.server, os, signal, sys, time
def end(*_):
    asked = time.time()
    if "slow" in sys.argv: time.sleep(0.4)
    open(sys.argv[2] + ".end", "w").write(f"{asked} {time.time()}")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[2], "a").write(f"{os.getpid()}\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if "unready" in sys.argv else 200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Harness:
    """Runs one supervisor over serving children; ``pids(name)`` are the lives that a child had so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = io.StringIO()
        self.ready: list[str] = []
        self.all_ready = asyncio.Event()
        self.stop = asyncio.Event()

    def spec(self, name: str, *words: str, is_restarted: bool = True) -> ChildSpec:
        port = free_port()
        argv = (sys.executable, "-c", SERVE, str(port), str(self.folder / name), *words)
        return ChildSpec(name, argv, f"http://127.0.0.1:{port}", is_restarted)

    def pids(self, name: str) -> list[int]:
        path = self.folder / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def run(self, *specs: ChildSpec, startup_timeout_s: float = 30, stop_deadline_s: float = 5) -> asyncio.Task[int]:
        supervisor = Supervisor(
            specs,
            environ=os.environ,
            startup_timeout_s=startup_timeout_s,
            on_ready=lambda spec: self.ready.append(spec.name),
            on_all_ready=self.all_ready.set,
            log=self.log,
            stop_deadline_s=stop_deadline_s,
            first_backoff_s=0.01,
        )
        return asyncio.create_task(supervisor.run(self.stop))

    def assert_all_gone(self, *names: str) -> None:
        for name in names:
            for pid in self.pids(name):
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)


def test_run_when_stopped_then_children_are_gone_and_status_0(tmp_path: Path) -> None:
    async def scenario() -> None:
        harness = Harness(tmp_path)
        task = harness.run(harness.spec("a"), harness.spec("b", is_restarted=False))
        await asyncio.wait_for(harness.all_ready.wait(), 30)
        assert sorted(harness.ready) == ["a", "b"]
        harness.stop.set()
        assert await task == 0
        harness.assert_all_gone("a", "b")

    asyncio.run(scenario())


def test_run_when_stopped_then_nodes_are_asked_after_the_proxy_has_drained(tmp_path: Path) -> None:
    async def scenario() -> None:
        harness = Harness(tmp_path)
        task = harness.run(harness.spec("node"), harness.spec("proxy", "slow", is_restarted=False))
        await asyncio.wait_for(harness.all_ready.wait(), 30)
        harness.stop.set()
        assert await task == 0
        node_asked_s, _ = map(float, (tmp_path / "node.end").read_text().split())
        proxy_asked_s, proxy_ended_s = map(float, (tmp_path / "proxy.end").read_text().split())
        assert proxy_ended_s - proxy_asked_s >= 0.4
        assert node_asked_s >= proxy_ended_s

    asyncio.run(scenario())


def test_run_when_child_ignores_sigterm_then_killed_after_the_deadline(tmp_path: Path) -> None:
    async def scenario() -> None:
        harness = Harness(tmp_path)
        task = harness.run(harness.spec("a", "deaf"), stop_deadline_s=0.2)
        await asyncio.wait_for(harness.all_ready.wait(), 30)
        harness.stop.set()
        assert await task == 0
        harness.assert_all_gone("a")

    asyncio.run(scenario())


def test_run_when_never_ready_then_status_1_after_the_timeout(tmp_path: Path) -> None:
    async def scenario() -> None:
        harness = Harness(tmp_path)
        assert await harness.run(harness.spec("a", "unready"), startup_timeout_s=1.0) == 1
        assert "not ready after 1 s" in harness.log.getvalue()
        harness.assert_all_gone("a")

    asyncio.run(scenario())


def test_run_when_a_ready_child_dies_before_all_are_then_says_which_and_why_and_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        harness = Harness(tmp_path)
        task = harness.run(harness.spec("a"), harness.spec("b", "unready"), startup_timeout_s=3600)
        while "a" not in harness.ready or not harness.pids("b"):
            await asyncio.sleep(0.01)
        os.kill(harness.pids("a")[0], signal.SIGKILL)
        assert await asyncio.wait_for(task, 30) == 1
        assert "error: a was killed by SIGKILL while others were starting" in harness.log.getvalue()
        assert not harness.all_ready.is_set()
        harness.assert_all_gone("a", "b")

    asyncio.run(scenario())


def test_run_when_stopped_before_ready_then_status_0(tmp_path: Path) -> None:
    async def scenario() -> None:
        harness = Harness(tmp_path)
        task = harness.run(harness.spec("a", "unready"))
        while not harness.pids("a"):
            await asyncio.sleep(0.01)
        harness.stop.set()
        assert await asyncio.wait_for(task, 30) == 0
        harness.assert_all_gone("a")

    asyncio.run(scenario())


def test_run_when_child_dies_again_and_again_then_waits_grow(tmp_path: Path) -> None:
    async def scenario() -> None:
        harness = Harness(tmp_path)
        task = harness.run(harness.spec("a"))
        for life in range(3):
            while harness.ready.count("a") <= life:
                await asyncio.sleep(0.01)
            os.kill(harness.pids("a")[life], 9)
        while harness.ready.count("a") <= 3:
            await asyncio.sleep(0.01)
        harness.stop.set()
        assert await task == 0
        log = harness.log.getvalue()
        for delay in ("0.01", "0.02", "0.04"):
            assert f"a was killed by SIGKILL; restarting it in {delay} s" in log
        harness.assert_all_gone("a")

    asyncio.run(scenario())


def test_run_when_program_does_not_exist_then_error_and_others_are_stopped(tmp_path: Path) -> None:
    async def scenario() -> None:
        harness = Harness(tmp_path)
        broken = ChildSpec("b", (sys.executable, "-m", "no_such_module"), "http://127.0.0.1:9", True)
        assert await harness.run(harness.spec("a"), broken) == 1
        assert "No module named no_such_module" in harness.log.getvalue()
        harness.assert_all_gone("a")

    asyncio.run(scenario())


def test_describe_status_names_signals() -> None:
    assert describe_status(2) == "exited with status 2"
    assert describe_status(-11) == "was killed by SIGSEGV"


def test_check_port_free_when_host_is_not_ours_then_config_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.7:1234"):
        check_port_free("203.0.113.7", 1234, "--port 1234")
