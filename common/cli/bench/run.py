"""``tandem bench``: load a running service and say what a client saw.

1 check the flags, 2 ask the service for its model and version (it need not answer), 3 warm up, 4 send: a fixed number
of requests at a time (a closed loop: latencies are those at this concurrency), or each at its own random time (an open
loop: what waits in the service waits in the figures), 5 report. A conversation's next turn is sent when the one before
was answered. Ctrl-C ends 4 at once and reports what was measured until then; a second one ends the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.metadata
import json
import platform
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from common.cli.bench.client import MAX_EVENT_BYTES, BenchClient, Sample
from common.cli.bench.progress import Progress
from common.cli.bench.report import as_text, distribution, row, summarize
from common.cli.bench.settings import BenchSettings, parse_settings
from common.cli.bench.workload import Conversation, conversations, join
from common.errors import ConfigError
from common.wire.routes import MODELS_ROUTE, VERSION_ROUTE

DISTRIBUTION = "tandem-serve"
INTERRUPTED_STATUS = 130
"""Exit status after Ctrl-C, as shells have it: 128 and the number of SIGINT."""
SERVER_INFO_TIMEOUT_S = 5.0
"""Seconds for the service to name its models and version."""
LAG_INTERVAL_S = 0.02
"""Seconds between two measurements of this program's own delay."""


def run_bench(argv: Sequence[str]) -> int:
    """Run the command; status 0, 1 when a request failed, 130 after Ctrl-C."""
    settings = parse_settings(argv)
    if settings.json_file not in (None, "-"):
        _check_writable(settings.json_file)
    run = asyncio.run(_run(settings))
    report = _report(settings, run)
    text = json.dumps(report, indent=2) + "\n"
    if settings.json_file == "-":
        sys.stdout.write(text)
    else:
        sys.stdout.write(as_text(report))
        if settings.json_file is not None:
            with open(settings.json_file, "w", encoding="utf-8") as file:
                file.write(text)
    if run.is_interrupted:
        return INTERRUPTED_STATUS
    return 0 if report["figures"]["failed"] == 0 else 1


@dataclass(slots=True)
class Run:
    """What a run has gathered. ``num_in_flight`` after the end: requests that an interrupt gave up."""

    samples: list[Sample] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    server: dict[str, Any] = field(default_factory=dict)
    started_at: str = ""
    seconds: float = 0.0
    num_in_flight: int = 0
    is_interrupted: bool = False

    @property
    def num_failed(self) -> int:
        return sum(sample.error is not None for sample in self.samples)


async def _run(settings: BenchSettings) -> Run:
    run = Run(started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    progress = Progress(sys.stderr, settings.requests, is_shown=settings.shows_progress)
    async with _session(settings) as session:
        run.server = await _server_info(session)
        models = run.server["models"]
        client = BenchClient(session, settings, settings.model or (models[0] if models else None))
        work = asyncio.create_task(_work(client, settings, run, progress))
        with _interrupted_by_signal(work, run):
            lag = asyncio.create_task(_watch_lag(run))
            try:
                await asyncio.wait({work})
            finally:
                for task in (work, lag):
                    task.cancel()
                await asyncio.gather(work, lag, return_exceptions=True)
                progress.close()
        if not run.is_interrupted:
            work.result()
    return run


async def _work(client: BenchClient, settings: BenchSettings, run: Run, progress: Progress) -> None:
    if settings.warmup:
        before = conversations(settings, settings.warmup, f"{settings.seed} warmup")
        await _send_all(client, settings, before, Run(), Progress(sys.stderr, settings.warmup, is_shown=False))
    start_s = time.perf_counter()
    try:
        await _send_all(client, settings, conversations(settings, settings.requests, str(settings.seed)), run, progress)
    finally:
        run.seconds = time.perf_counter() - start_s


async def _send_all(
    client: BenchClient, settings: BenchSettings, todo: Iterator[Conversation], run: Run, progress: Progress
) -> None:
    """A closed loop, or with a request rate an open one."""
    run_start_s = time.perf_counter()

    async def hold(conversation: Conversation) -> None:
        prompt = None
        for turn, (addition, max_tokens) in enumerate(
            zip(conversation.additions, conversation.max_tokens, strict=True)
        ):
            prompt = addition if prompt is None else join(prompt, addition)
            run.num_in_flight += 1
            answer = await client.send(prompt, max_tokens, turn=turn, run_start_s=run_start_s)
            run.num_in_flight -= 1  # not in a finally: who is cancelled was in flight
            run.samples.append(answer.sample)
            if answer.sample.error is not None:
                # What would have followed cannot be asked; it counts as failed, so that requests add up.
                rest = len(conversation.additions) - turn - 1
                run.samples += [Sample(turn=turn + 1 + i, error="an earlier turn failed") for i in range(rest)]
            progress.update(num_done=len(run.samples), num_failed=run.num_failed, num_in_flight=run.num_in_flight)
            if answer.sample.error is not None:
                return
            prompt = join(prompt, answer.text if settings.is_text else answer.token_ids)

    async def work_through() -> None:
        for conversation in todo:  # one iterator for all workers
            await hold(conversation)

    async with asyncio.TaskGroup() as group:
        if settings.request_rate is None:
            for _ in range(settings.concurrency):
                group.create_task(work_through())
            return
        for conversation in todo:
            await asyncio.sleep(max(0.0, run_start_s + conversation.start_s - time.perf_counter()))
            group.create_task(hold(conversation))


@contextlib.asynccontextmanager
async def _session(settings: BenchSettings) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"content-type": "application/json"}
    if settings.api_key is not None:
        headers["authorization"] = f"Bearer {settings.api_key}"
    timeout = aiohttp.ClientTimeout(total=None, sock_read=settings.timeout_s, sock_connect=settings.timeout_s)
    async with aiohttp.ClientSession(
        settings.url,
        headers=headers,
        timeout=timeout,
        connector=aiohttp.TCPConnector(limit=0),  # nothing may wait for a connection
        read_bufsize=MAX_EVENT_BYTES,
    ) as session:
        yield session


async def _server_info(session: aiohttp.ClientSession) -> dict[str, Any]:
    """Names of the served models and the versions of the service, as far as it answers."""
    models = await _get(session, MODELS_ROUTE)
    data = models.get("data") if isinstance(models, dict) else None
    names = [each["id"] for each in data if isinstance(each, dict) and isinstance(each.get("id"), str)] if data else []
    return {"models": names, "version": await _get(session, VERSION_ROUTE)}


async def _get(session: aiohttp.ClientSession, route: str) -> Any:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
        async with session.get(route, timeout=aiohttp.ClientTimeout(SERVER_INFO_TIMEOUT_S)) as response:
            if response.status == 200:
                return await response.json(content_type=None)
    return None


@contextlib.contextmanager
def _interrupted_by_signal(work: asyncio.Task[None], run: Run) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        run.is_interrupted = True
        work.cancel()
        for number in numbers:
            loop.remove_signal_handler(number)  # the next one ends the program

    try:
        for number in numbers:
            loop.add_signal_handler(number, stop)
    except (RuntimeError, ValueError):  # not the main thread, which alone gets signals
        pass
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _watch_lag(run: Run) -> None:
    """Measures how late this program's own event loop is, which every latency contains."""
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(LAG_INTERVAL_S)
        run.lags_s.append(max(0.0, time.perf_counter() - before_s - LAG_INTERVAL_S))


def _report(settings: BenchSettings, run: Run) -> dict[str, Any]:
    report: dict[str, Any] = {
        "tool": "tandem bench",
        "version": _own_version(),
        "python": platform.python_version(),
        "started_at": run.started_at,
        "settings": settings.shown(),
        "server": run.server,
        "interrupted": run.is_interrupted,
        "unfinished": run.num_in_flight,
        "client_lag_seconds": distribution(run.lags_s),
        "figures": summarize(run.samples, run.seconds),
    }
    if settings.wants_rows:
        report["rows"] = [row(sample) for sample in run.samples]
    return report


def _own_version() -> str | None:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_writable(path: str | None) -> None:
    assert path is not None
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as exc:
        raise ConfigError(f"--json {path}: {exc.strerror}", param="--json") from exc
