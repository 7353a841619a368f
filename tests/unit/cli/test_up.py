"""``tandem up`` as a process, with the real proxy and stand-ins for the nodes, which need no model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.cli.flags import parse_up
from common.cli.up import child_specs, welcome
from common.config.key_file import read_key_file
from common.config.node import parse_node_config
from common.config.proxy import ProxyConfig
from tests.support.certificate import make_certificate
from tests.support.http_server import wait_for
from tests.support.service import ROOT, child_environment, free_port

# Takes a node's argv; writes down how it was started; answers as a node would.
FAKE_NODE = """
import glob, http.server, json, os, signal, sys, time
role = __package__ or "node"
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
path = f"{flags['node-name']}.json"
with open(path + ".new", "w") as file:
    json.dump({"pid": os.getpid(), "argv": sys.argv[1:], "environ": dict(os.environ),
               "sigint_ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN}, file)
os.replace(path + ".new", path)  # whoever polls for it never reads half of it
if os.environ.get("FAKE_DEATH") == role:
    end = time.monotonic() + 20
    while len(glob.glob("*.json")) < 2 and time.monotonic() < end:
        time.sleep(0.01)  # or the other one is ended before it has written anything
    sys.stderr.write("loading weights\\nno such tensor: lm_head\\n")
    sys.exit(3)
if os.environ.get("FAKE_DEAF") == role:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"node_name": flags["node-name"]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer((flags["host"], int(flags["port"])), Handler).serve_forever()
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


class Up:
    """One ``tandem up``; everything it writes goes to one log."""

    def __init__(self, folder: Path, *argv: str, ignore_sigint: bool = False, **environ: str) -> None:
        for role in ("prefill_node", "decode_node"):
            (folder / role).mkdir(exist_ok=True)
            (folder / role / "__init__.py").touch()
            (folder / role / "__main__.py").write_text(FAKE_NODE)
        self.folder = folder
        self.port = free_port(100, 200)
        self.log = folder / "up.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "common.cli", "up", "--model", "m", "--port", str(self.port), *argv],
                cwd=folder,  # first on the module path: the stand-ins are found before the real nodes
                env=child_environment(PYTHONPATH=str(ROOT), **environ),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignore_sigint else None,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_ready(self) -> Up:
        wait_for(lambda: "Tandem is ready" in self.output or self.process.poll() is not None, "tandem up", 120)
        assert self.process.poll() is None, self.output
        return self

    def wait_exit(self) -> int:
        return self.process.wait(30)

    def node(self, role: str) -> dict[str, Any]:
        port = self.port + {"prefill": 100, "decode": 200}[role]
        started: dict[str, Any] = json.loads((self.folder / f"{role}-{port}.json").read_text())
        return started

    def proxy_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = (pid for pid in map(int, children) if b"\0proxy\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return pid

    def pids(self) -> list[int]:
        return [self.node("prefill")["pid"], self.node("decode")["pid"], self.proxy_pid()]


StartUp = Callable[..., Up]


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[StartUp]:
    running: list[Up] = []

    def start(*argv: str, **settings: Any) -> Up:
        running.append(Up(tmp_path, *argv, **settings))
        return running[-1]

    yield start
    for up in running:
        if up.process.poll() is None:
            up.process.send_signal(signal.SIGTERM)
            up.wait_exit()


@pytest.mark.full  # with real nodes in tests/e2e/test_deploy.py
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.full) for each in (signal.SIGINT, signal.SIGHUP))]
)
def test_up_when_signalled_then_status_0_and_no_child_left(start_up: StartUp, number: signal.Signals) -> None:
    up = start_up(ignore_sigint=True).wait_ready()
    pids = up.pids()
    up.process.send_signal(number)
    assert up.wait_exit() == 0
    assert not any(is_alive(pid) for pid in pids)


def test_up_when_the_proxy_serves_https_then_is_ready_and_says_so(start_up: StartUp, tmp_path: Path) -> None:
    tls = make_certificate(tmp_path)
    up = start_up("--ssl-certfile", tls.certfile, "--ssl-keyfile", str(tls.keyfile)).wait_ready()
    assert f"Tandem is ready at https://127.0.0.1:{up.port}" in up.output
    assert f"curl -N https://127.0.0.1:{up.port}/v1" in up.output


@pytest.mark.full  # with real nodes in tests/e2e/test_deploy.py
def test_up_when_ready_then_says_who_where_and_how_to_call(start_up: StartUp) -> None:
    up = start_up().wait_ready()
    for name, port in ((f"prefill-{up.port + 100}", up.port + 100), ("proxy", up.port)):
        assert f"{name:<14} ready at http://127.0.0.1:{port}\n" in up.output
    assert f"chat: http://127.0.0.1:{up.port}/chat " in up.output
    assert f"curl -N http://127.0.0.1:{up.port}/v1/chat/completions" in up.output
    assert httpx.get(f"http://127.0.0.1:{up.port}/ready", trust_env=False).status_code == 200


def test_up_when_starting_nodes_then_flags_are_in_argv_and_keys_are_not(start_up: StartUp, tmp_path: Path) -> None:
    key_file = tmp_path / "api.key"
    key_file.write_text("very-secret\n")
    up = start_up("--max-num-seqs", "5", "--api-key-file", str(key_file), TANDEM_BLOCK_SIZE="32").wait_ready()
    for role in ("prefill", "decode"):
        started = up.node(role)
        for word in ("--max-num-seqs=5", "--block-size=32", f"--api-key-file={key_file}", "--model=m"):
            assert word in started["argv"]
        assert not any(name.startswith("TANDEM_") for name in started["environ"])
        assert "very-secret" not in json.dumps(started)


@pytest.mark.parametrize("above", ["", "# of the team\n\n  # and its tools\n \n  "])
def test_example_when_keys_are_asked_for_then_its_command_sends_the_first_one(tmp_path: Path, above: str) -> None:
    file = tmp_path / "the team's keys"
    file.write_text(above + "secret-1 \n# old\nsecret-2\n")
    config = ProxyConfig(decode=("http://127.0.0.1:1",), api_key_file=str(file))
    [command] = [line for line in welcome(config).splitlines() if "curl -N" in line]
    shown = "curl() { for word; do printf '%s\\n' \"$word\"; done; }\n" + command
    done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True)
    [header] = [line for line in done.stdout.splitlines() if line.startswith("Authorization: Bearer ")]
    assert header.removeprefix("Authorization: Bearer ").strip() == read_key_file(str(file), "--api-key-file")[0]


def test_up_when_a_node_dies_at_start_then_says_which_and_why(start_up: StartUp) -> None:
    up = start_up(FAKE_DEATH="decode_node")
    assert up.wait_exit() == 1
    assert f"error: decode-{up.port + 200} exited with status 3 while starting" in up.output
    assert "    no such tensor: lm_head\n" in up.output
    assert not is_alive(up.node("prefill")["pid"])


@pytest.mark.parametrize("offset", [0, *(pytest.param(each, marks=pytest.mark.full) for each in (100, 200))])
def test_up_when_a_port_is_in_use_then_says_so_and_starts_nothing(start_up: StartUp, offset: int) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        taken = sock.getsockname()[1]
        up = start_up("--port", str(taken - offset))
        assert up.wait_exit() == 1
    assert f"cannot listen on 127.0.0.1:{taken}: Address already in use" in up.output
    assert not list(up.folder.glob("*.json"))


def test_up_when_a_node_dies_later_then_it_is_restarted_on_its_port(start_up: StartUp) -> None:
    up = start_up().wait_ready()
    first = up.node("prefill")
    os.kill(first["pid"], signal.SIGKILL)
    wait_for(lambda: up.node("prefill")["pid"] != first["pid"], "the restart")
    wait_for(lambda: up.output.count(f"ready at http://127.0.0.1:{up.port + 100}\n") == 2, "the node to be ready again")
    assert f"prefill-{up.port + 100} was killed by SIGKILL; restarting it in 1 s" in up.output
    assert up.node("prefill")["argv"] == first["argv"]


def test_up_when_the_proxy_dies_then_everything_ends_with_status_1(start_up: StartUp) -> None:
    up = start_up().wait_ready()
    pids = up.pids()
    os.kill(up.proxy_pid(), signal.SIGKILL)
    assert up.wait_exit() == 1
    assert "proxy was killed by SIGKILL" in up.output
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.full  # as the supervisor of test_supervisor.py
def test_up_when_a_child_is_deaf_to_sigterm_then_a_second_signal_kills_it(start_up: StartUp) -> None:
    up = start_up(FAKE_DEAF="decode_node").wait_ready()
    pid = up.node("decode")["pid"]
    up.process.send_signal(signal.SIGINT)
    wait_for(lambda: "tandem up: stopping" in up.output, "the first signal to be seen")
    assert is_alive(pid)
    up.process.send_signal(signal.SIGINT)
    assert up.wait_exit() == 0
    assert not is_alive(pid)


def test_up_when_it_has_a_tier_then_every_node_gets_it_and_reads_it_back(tmp_path: Path) -> None:
    words = [f"disk:{tmp_path}?size=1GiB", "shared:/mnt/kv?size=2048GiB", "host:3GiB"]
    words.append("mooncake:store:50051?size=64GiB&lend=8GiB&admin=9004")
    flags = ["--kv-tier", *words, "--kv-tier-write-rate", "8MiB", "--cluster-key-file", "key", "--decode-nodes", "2"]
    nodes = [spec for spec in child_specs(parse_up(flags, {}), "model") if spec.name != "proxy"]
    assert len(nodes) == 3
    for spec in nodes:
        config = parse_node_config(spec.argv[3:], {}, role="any", default_port=1)
        assert [str(tier) for tier in config.kv_tier] == words
        assert config.kv_tier_write_rate == 8 << 20
