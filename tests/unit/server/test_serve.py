"""What a server does before its first request: TLS, open files, the number of connections."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import select
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from common.errors import ConfigError
from common.server import serve
from common.server.connection import BoundedProtocol
from common.server.serve import FAILED_STATUS, SIGNAL_STATUS, Tls, bind_socket, raise_file_limit, run_app
from tests.support.certificate import make_certificate
from tests.support.http_server import wait_for
from tests.support.service import ROOT, Process, child_environment, free_port

START_S = 120.0
"""In which a process of the service listens, on a machine that is busy with everything else."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Signed by itself, for localhost."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def file_limit() -> Iterator[int]:
    """A soft limit of 256 open files; the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def start_proxy(folder: Path, *flags: str, **environment: str) -> tuple[Process, int]:
    port = free_port()
    argv = [sys.executable, "-m", "proxy", "--port", str(port), "--decode", "http://127.0.0.1:9", *flags]
    return Process(argv, folder / "proxy.log", **environment), port


def test_proxy_when_given_a_certificate_then_serves_https_and_nothing_else(tmp_path: Path, certificate: Tls) -> None:
    files = ("--ssl-certfile", certificate.certfile, "--ssl-keyfile", str(certificate.keyfile))
    process, port = start_proxy(tmp_path, *files)
    try:
        context = ssl.create_default_context(cafile=certificate.certfile)
        with httpx.Client(verify=context, trust_env=False) as client:

            def answers() -> bool:
                try:
                    return client.get(f"https://127.0.0.1:{port}/health").json() == {"status": "ok"}
                except httpx.ConnectError:
                    return False

            wait_for(answers, "the proxy", START_S)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
    finally:
        process.stop()


def test_certificate_when_unusable_then_the_flag_and_the_reason_are_named(tmp_path: Path, certificate: Tls) -> None:
    other_key = tmp_path / "other.pem"
    subprocess.run(["openssl", "genrsa", "-out", str(other_key), "2048"], check=True, capture_output=True)
    for bad in (Tls(str(tmp_path / "none.pem")), Tls(certificate.certfile), Tls(certificate.certfile, str(other_key))):
        with pytest.raises(ConfigError, match="--ssl-certfile"):
            bad.check()
    certificate.check()


def test_port_when_it_is_taken_or_the_host_is_not_here_then_error_names_the_flag() -> None:
    with bind_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        for host, said in (("127.0.0.1", f"--port {port}"), ("203.0.113.7", "--host 203.0.113.7")):
            with pytest.raises(ConfigError) as refused:
                bind_socket(host, port)
            assert refused.value.message.startswith(f"{said}: cannot listen on {host}:{port}: ")
            assert refused.value.param == said.split()[0]


@pytest.mark.parametrize("error", [ConfigError("--x 1: at most 0"), ValueError("a mistake of ours")])
def test_app_when_its_start_fails_then_an_error_of_ours_is_raised_and_any_other_printed_with_its_place(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        raise error
        yield

    is_ours = isinstance(error, ConfigError)
    with pytest.raises(ConfigError if is_ours else SystemExit) as caught:
        run_app(Starlette(lifespan=lifespan), bind_socket("127.0.0.1", 0))
    assert (caught.value is error) == is_ours
    assert ("Traceback" in caplog.text) == (not is_ours)
    assert ("a mistake of ours" in caplog.text) == (not is_ours)


FAILING = """
import asyncio, contextlib, sys, time
from starlette.applications import Starlette
from common.errors import NodeUnavailableError
from common.server import serve
from common.server.drain import Drain

serve.FAILED_END_S = 1.0
drain = Drain("node", 20.0, cut_off=lambda error: print("cut off:", error.message, flush=True))

@contextlib.asynccontextmanager
async def lifespan(_):
    asyncio.get_running_loop().call_later(0.2, drain.fail, NodeUnavailableError("the engine stopped"))
    yield
    print("closing", flush=True)
    if sys.argv[1] == "blocks":
        time.sleep(600)
    elif sys.argv[1] == "waits":
        await asyncio.to_thread(time.sleep, 600)

app = Starlette(lifespan=lifespan)
app.state.drain = drain
serve.end_process(serve.run_app(app, serve.bind_socket("127.0.0.1", 0)))
"""


@pytest.mark.parametrize("closing", ["ends", "blocks", "waits"])
def test_app_when_it_fails_then_the_process_ends_with_a_status_of_its_own_even_if_closing_hangs(closing: str) -> None:
    argv = [sys.executable, "-c", FAILING, closing]
    result = subprocess.run(argv, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=60)
    assert result.returncode == FAILED_STATUS, result.stderr
    assert result.stdout.splitlines() == ["cut off: the engine stopped", "closing"]


def be_first_process() -> None:
    """As the first process of a container is, that has no handler: signals are ignored."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("program", "number"), [("decode_node", signal.SIGTERM), ("proxy", signal.SIGTERM), ("proxy", signal.SIGINT)]
)
def test_process_when_a_signal_comes_while_it_starts_then_ends_though_nobody_handles_signals_for_it(
    program: str, number: signal.Signals, tmp_path: Path
) -> None:
    """What it loads, and the proxy's keys, come from a pipe into which nothing is written."""
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    flags = {
        "decode_node": ("--model", str(tmp_path), "--device", "cpu"),
        "proxy": ("--decode", "http://127.0.0.1:9", "--api-key-file", str(pipe)),
    }
    argv = [sys.executable, "-m", program, "--port", "0", *flags[program]]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            argv, cwd=ROOT, env=child_environment(), stdout=log, stderr=log, preexec_fn=be_first_process
        ) as process,
    ):
        try:
            with contextlib.ExitStack() as stack:

                def is_reading() -> bool:
                    assert process.poll() is None, (tmp_path / "log").read_text()
                    try:
                        stack.callback(os.close, os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
                    except OSError as exc:
                        if exc.errno != errno.ENXIO:  # nobody reads
                            raise
                        return False
                    return True

                wait_for(is_reading, program, START_S)

                def has_ended() -> bool:
                    # Again and again: one that comes to another thread, or just before the read begins, wakes nobody.
                    process.send_signal(number)
                    return process.poll() is not None

                wait_for(has_ended, f"the end of {program}", START_S)
                assert process.returncode == SIGNAL_STATUS + number
        finally:
            process.kill()


def test_server_when_a_connection_was_accepted_as_it_stopped_then_ends_it_before_its_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes that come on one while the loop closes fail the whole process."""
    # uvicorn tells all connections that there are to end, once; this one came just after.
    monkeypatch.setattr(BoundedProtocol, "shutdown", lambda self: None)
    sock = bind_socket("127.0.0.1", 0)
    config = uvicorn.Config(
        Starlette(), http=BoundedProtocol, lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=1
    )
    server = serve._Server(config, None)

    def connect() -> bytes:
        wait_for(lambda: server.started, "the server")
        with socket.create_connection(sock.getsockname(), timeout=20) as client:
            try:
                wait_for(lambda: server.server_state.connections, "the connection")
            finally:
                server.should_exit = True
            with contextlib.suppress(ConnectionResetError):
                return client.recv(1)
        return b""

    with sock, ThreadPoolExecutor(1) as threads:
        received = threads.submit(connect)
        server.run(sockets=[sock])
        assert not server.server_state.connections
        assert received.result(20) == b""


def test_file_limit_when_the_system_allows_more_then_is_raised(file_limit: int) -> None:
    assert raise_file_limit(300, flag="--x") == 300
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
    assert raise_file_limit(100, flag="--x") == 300  # never lowered


def test_file_limit_when_the_system_allows_less_then_warned(file_limit: int, caplog: pytest.LogCaptureFixture) -> None:
    if file_limit == resource.RLIM_INFINITY:
        pytest.skip("the system has no limit")
    with caplog.at_level(logging.WARNING):
        assert raise_file_limit(file_limit + 1, flag="--max-concurrency") == file_limit
    assert f"--max-concurrency may need {file_limit + 1} open files, the system allows {file_limit}" in caplog.text


def test_connections_when_at_the_limit_then_further_ones_are_refused_and_earlier_ones_served(tmp_path: Path) -> None:
    """The smallest proxy there is takes 1 + 0 requests and 256 connections that only ask."""
    process, port = start_proxy(tmp_path, "--max-concurrency", "1", "--max-queue-size", "0")
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    open_sockets: list[socket.socket] = []

    def connect() -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        open_sockets.append(sock)
        return sock

    def listens() -> bool:
        try:
            connect()
        except ConnectionRefusedError:
            return False
        return True

    try:
        wait_for(listens, "the proxy", START_S)
        while len(open_sockets) < 300:
            connect()
        wait_for(lambda: select.select(open_sockets, [], [], 0)[0], "a refusal")
        refused = select.select(open_sockets, [], [], 0)[0]
        assert 0 < len(refused) < 60
        head, _, body = refused[0].recv(4096).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        open_sockets[0].sendall(request)
        assert open_sockets[0].recv(4096).startswith(b"HTTP/1.1 200")
    finally:
        for sock in open_sockets:
            sock.close()
        process.stop()
