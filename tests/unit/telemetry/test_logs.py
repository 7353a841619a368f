"""Log lines: what they say of the request and the process, and that JSON stays JSON."""

from __future__ import annotations

import asyncio
import contextvars
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from common.cli.log_sink import LogSink
from common.server.gate import install_middleware
from common.telemetry.context import current_context, enter_request, name_span
from common.telemetry.logs import configure_logging, is_logging_json
from tests.support.http_server import serving
from tests.support.service import ROOT, child_environment

logger = logging.getLogger("tests.telemetry")


@pytest.fixture
def _own_logging() -> Iterator[None]:
    """Gives the process's logging and hooks back as they were."""
    root = logging.getLogger()
    kept = (list(root.handlers), root.level, sys.excepthook)
    yield
    root.handlers[:], sys.excepthook = kept[0], kept[2]
    root.setLevel(kept[1])
    logging.captureWarnings(False)


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.usefixtures("_own_logging")
def test_json_when_a_request_is_traced_then_the_line_has_its_ids() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", role="decode", node="decode-8200", stream=stream)

    def request() -> None:
        enter_request("req-1")
        logger.info("first %d", 1)
        name_span("a" * 32, "b" * 16)
        logger.warning("second\nline")

    contextvars.copy_context().run(request)
    logger.debug("not shown")
    logger.info("third")
    first, second, third = lines_of(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("ts"))
    common = {"logger": "tests.telemetry", "role": "decode", "node": "decode-8200"}
    assert first == {**common, "level": "info", "message": "first 1", "request_id": "req-1"}
    assert (second["message"], second["level"]) == ("second\nline", "warning")
    assert (second["trace_id"], second["span_id"]) == ("a" * 32, "b" * 16)
    assert not {"request_id", "trace_id"} & set(third)
    assert is_logging_json()


@pytest.mark.usefixtures("_own_logging")
def test_json_when_an_exception_is_logged_then_its_traceback_is_one_field() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", role="proxy", node="proxy", stream=stream)
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("failed")
    (line,) = lines_of(stream)
    assert line["message"] == "failed"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: wrong")


@pytest.mark.usefixtures("_own_logging")
def test_text_when_the_message_does_not_name_the_request_then_the_line_does_once() -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream)

    def request() -> None:
        enter_request("req-1")
        logger.info("pulled")
        logger.info("pulled request_id=%s", "req-1")

    contextvars.copy_context().run(request)
    logger.info("idle")
    endings = [line.partition("tests.telemetry: ")[2] for line in stream.getvalue().splitlines()]
    assert endings == ["pulled request_id=req-1", "pulled request_id=req-1", "idle"]
    assert not is_logging_json()


def test_context_when_two_requests_run_at_once_then_each_task_has_its_own() -> None:
    seen: dict[str, str] = {}

    async def one(request_id: str) -> None:
        enter_request(request_id)
        await asyncio.sleep(0)
        await asyncio.create_task(inner(request_id))

    async def inner(request_id: str) -> None:
        context = current_context()
        assert context is not None
        seen[request_id] = context.request_id

    async def both() -> None:
        await asyncio.gather(*(asyncio.create_task(one(name)) for name in ("a", "b")))

    asyncio.run(both())
    assert seen == {"a": "a", "b": "b"}
    assert current_context() is None


def test_middleware_when_a_request_comes_then_its_id_is_in_context() -> None:
    app = FastAPI()
    install_middleware(app)

    @app.get("/id")
    async def read() -> dict[str, str]:
        context = current_context()
        return {"id": context.request_id if context is not None else "none"}

    with serving(app) as server:
        assert httpx.get(server.url + "/id", headers={"X-Request-Id": "req-7"}).json() == {"id": "req-7"}


def test_process_when_it_dies_of_an_exception_then_stderr_is_one_object() -> None:
    code = (
        "from common.telemetry.logs import configure_logging\n"
        "import warnings\n"
        "configure_logging('info', 'json', role='prefill', node='p0')\n"
        "warnings.warn('old')\n"
        "raise RuntimeError('gone')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=child_environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    warned, died = [json.loads(line) for line in result.stderr.splitlines()]
    assert "old" in warned["message"]
    assert (died["level"], died["node"]) == ("critical", "p0")
    assert "RuntimeError: gone" in died["exception"]


def test_log_sink_when_json_then_objects_pass_and_other_lines_are_wrapped() -> None:
    stream = io.StringIO()
    sink = LogSink(stream, "json")
    sink.forward("decode-8200", '{"message": "as it is", "node": "decode-8200"}')
    sink.forward("decode-8200", "[UCX] 1.2 warning")
    sink.forward("decode-8200", "")
    sink.say("error: proxy exited with status 1")
    sink.repeat("shown before")
    first, second, third = lines_of(stream)
    assert first == {"message": "as it is", "node": "decode-8200"}
    assert (second["message"], second["node"]) == ("[UCX] 1.2 warning", "decode-8200")
    assert (third["level"], third["logger"]) == ("error", "tandem up")


def test_log_sink_when_text_then_lines_carry_their_process() -> None:
    stream = io.StringIO()
    sink = LogSink(stream, "text")
    sink.forward("proxy", "hello")
    sink.say("stopping")
    assert stream.getvalue() == "[proxy] hello\ntandem up: stopping\n"
