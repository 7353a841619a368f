"""The health check of containers."""

from __future__ import annotations

import http.server
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.cli.probe import main
from tests.support.certificate import make_certificate


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def port() -> Iterator[str]:
    yield from serve(http.server.HTTPServer(("127.0.0.1", 0), Handler))


def serve(server: http.server.HTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield str(server.server_address[1])
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", ""])
def test_probe_when_process_is_well_then_status_0(port: str, host: str) -> None:
    assert main(["/health"], {"TANDEM_HOST": host, "TANDEM_PORT": port}) == 0


def test_probe_when_process_serves_https_then_asks_so_whatever_name_the_certificate_has(tmp_path: Path) -> None:
    tls = make_certificate(tmp_path)
    assert tls.keyfile is not None
    server = http.server.HTTPServer(("127.0.0.2", 0), Handler)  # the certificate is for 127.0.0.1
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certfile, tls.keyfile)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    for port in serve(server):
        environment = {"TANDEM_HOST": "127.0.0.2", "TANDEM_PORT": port, "TANDEM_SSL_CERTFILE": tls.certfile}
        assert main(["/health"], environment) == 0
        assert main(["/ready"], environment) == 1


class ServerOnIpv6(http.server.HTTPServer):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        """Without asking the network for a name of the address."""
        socketserver.TCPServer.server_bind(self)


@pytest.mark.parametrize("host", ["::1", "::"])
def test_probe_when_the_host_is_an_ipv6_address_then_asks_there(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        server = ServerOnIpv6(("::1", 0), Handler)
    except OSError as exc:
        pytest.skip(f"no IPv6 on this machine: {exc}")
    for port in serve(server):
        environment = {"TANDEM_HOST": host, "TANDEM_PORT": port}
        assert main(["/health"], environment) == 0, capsys.readouterr().err
        assert main(["/ready"], environment) == 1
        assert f"http://[::1]:{port}/ready: HTTP Error 503" in capsys.readouterr().err


def test_probe_when_process_is_not_ready_then_status_1_and_the_reason(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["/ready"], {"TANDEM_PORT": port}) == 1
    assert "503" in capsys.readouterr().err


def test_probe_when_nobody_listens_then_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/health"], {"TANDEM_PORT": "9"}) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_probe_when_called_wrong_then_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {"TANDEM_PORT": "9"}) == 2
    assert main(["health"], {"TANDEM_PORT": "9"}) == 2
    assert main(["/health"], {}) == 2
    assert "TANDEM_PORT" in capsys.readouterr().err
