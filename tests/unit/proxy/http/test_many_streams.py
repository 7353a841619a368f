"""A thousand streams at once through one proxy process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.ports import free_ports
from benchmarks.proxy.__main__ import make_body
from benchmarks.proxy.contestants import Process, running
from benchmarks.proxy.load import User, make_leg
from common.server.pacer import Pacer
from common.wire.routes import COMPLETIONS_ROUTE

NUM_STREAMS = 1000
MAX_RESIDENT_MIB = 400.0
MAX_HEALTH_SHARE = 0.05
"""Of all that the requests take of a processor. It is 0.02; where all may begin in one turn, 0.24."""
TICK_S = 0.01  # of the system's count of processor time
# How long the trivial nodes take to accept and answer on a busy machine is not what is looked at.
PATIENT = ("--connect-timeout-seconds", "20", "--health-interval-seconds", "60")


@contextlib.contextmanager
def probing(port: int, process: Process) -> Iterator[list[float]]:
    """Seconds of each GET /health on one connection, by a thread that does nothing else: by the clock, or of the
    proxy's own processor time where that is less. Time that other programs took is not the proxy's."""
    waits: list[float] = []
    may_stop = threading.Event()

    def probe() -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            while not may_stop.wait(0.02):
                started_s, started_cpu_s = time.perf_counter(), process.cpu_seconds()
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = b""
                while b'"ok"}' not in answer:  # head and body may come apart
                    answer += sock.recv(4096)
                waits.append(min(time.perf_counter() - started_s, process.cpu_seconds() - started_cpu_s + TICK_S))

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield waits
    finally:
        may_stop.set()
        thread.join()


async def ask_all(port: int) -> int:
    users = [User([[make_leg(port, COMPLETIONS_ROUTE, make_body(256))]]) for _ in range(NUM_STREAMS)]
    try:
        return len(await asyncio.gather(*(user.ask() for user in users)))  # each of them to its last chunk
    finally:
        for user in users:
            user.close()


@pytest.mark.full
def test_thousand_streams_when_open_at_once_then_all_complete_in_little_memory_and_health_answers() -> None:
    prefill, decode, port = free_ports(3)
    flags = [str(prefill), str(decode), "--pull", "--pause", "0.4"]
    upstream = [sys.executable, "-m", "benchmarks.proxy.upstream", *flags]
    nodes = ["--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"]
    proxy = [sys.executable, "-m", "proxy", "--port", str(port), *nodes, *PATIENT]
    with running(upstream, [prefill, decode], 1, {}), running(proxy, [port], 0, {}) as process:
        time.sleep(2)
        started_cpu_s = process.cpu_seconds()
        with probing(port, process) as waits:
            num_answered = asyncio.run(ask_all(port))
        cpu_s = process.cpu_seconds() - started_cpu_s
        resident_mib = process.resident_mib()
    print({"health_max_s": max(waits), "cpu_s": cpu_s, "num_probes": len(waits), "resident_mib": resident_mib})
    assert num_answered == NUM_STREAMS
    assert resident_mib < MAX_RESIDENT_MIB
    assert max(waits) < MAX_HEALTH_SHARE * cpu_s


def test_pacer_when_many_come_at_once_then_few_begin_in_a_turn_in_order_and_the_gone_take_no_place() -> None:
    async def scenario() -> list[list[int]]:
        pacer, begun, turns = Pacer(2), [], []

        async def request(number: int) -> None:
            await pacer.turn()
            begun.append(number)

        tasks = [asyncio.create_task(request(number)) for number in range(7)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        while not all(task.done() for task in tasks):
            turns.append(list(begun))
            await asyncio.sleep(0)
        turns.append(list(begun))
        await pacer.turn()  # and it goes on
        return turns

    turns = asyncio.run(scenario())
    assert turns[-1] == [0, 1, 2, 4, 5, 6]
    assert max(len(after) - len(before) for before, after in itertools.pairwise(turns)) <= 2
