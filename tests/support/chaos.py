"""A service under fire: nodes that are killed and frozen while clients of every kind go on, and what it cost.

Each answer is checked against stock transformers: right, or a typed error, within a deadline. What a process holds
(open files, resident memory) is read from /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from common.wire.routes import COMPLETIONS_ROUTE
from tests.support.client import completion_body
from tests.support.hangup import OpenRequest
from tests.support.reference import Greedy, Reference, random_tokens
from tests.support.service import Node, Service, wait_ready

ANSWER_TIMEOUT_S = 60.0
"""A request without an end after this hangs."""
NUM_STANDING = 12
"""Connections that stand still half-way at a time."""
ERRORS = {
    429: {"queue_full"},
    502: {"transfer_failed", "peer_restarted", "peer_unreachable"},
    503: {"no_node"},
    504: {"deadline_exceeded"},
}
"""What a client may be told while nodes die, by status."""


@dataclass(frozen=True)
class Question:
    """A prompt and what stock transformers answers, which takes seconds for a long one. With another ``cache_salt`` the
    same prompt is new to every node."""

    prompt: list[int]
    expected: Greedy
    cache_salt: str | None = None

    def ask_again(self, reference: Reference, seed: int, num_tokens: int) -> Question:
        """The next turn: this prompt, its answer, and something new."""
        prompt = [*self.prompt, *self.expected.token_ids, *random_tokens(20 + seed % 13, seed)]
        return Question(prompt, reference.greedy(prompt, num_tokens))


def make_questions(reference: Reference, count: int, num_tokens: int, seed: int) -> list[Question]:
    """Prompts of 30 to 400 tokens: some share long stems, half are second turns of others."""
    draw = random.Random(seed)
    stems = [random_tokens(300, seed + index) for index in range(4)]
    questions: list[Question] = []
    for index in range(count):
        if index % 2:
            questions.append(questions[-1].ask_again(reference, seed + 50 + index, num_tokens))
            continue
        prompt = draw.choice(stems)[: draw.randrange(16, 300)] + random_tokens(
            draw.randrange(8, 100), seed + 50 + index
        )
        questions.append(Question(prompt, reference.greedy(prompt, num_tokens)))
    return questions


@dataclass
class Tally:
    """What the clients saw. ``wrong`` and ``hung`` say what, not only how often."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str) -> None:
        with self._lock:
            self.counts[outcome] += 1

    def add_wrong(self, what: str) -> None:
        self.add("wrong")
        self.wrong.append(what)

    def add_hung(self, what: str) -> None:
        self.add("hung")
        self.hung.append(what)


def ask(url: str, question: Question, reference: Reference, tally: Tally, *, stream: bool) -> None:
    """One request, read to its end and judged."""
    salt = {} if question.cache_salt is None else {"cache_salt": question.cache_salt}
    body = completion_body(question.prompt, len(question.expected.token_ids), stream=stream, **salt)
    started_s = time.monotonic()
    try:
        token_ids, logprobs, error = (_read_stream if stream else _read_whole)(url, body)
    except httpx.TimeoutException:
        tally.add_hung(f"no end after {time.monotonic() - started_s:.1f} s, {len(question.prompt)} tokens")
        return
    except httpx.HTTPError as exc:
        tally.add_wrong(f"the proxy broke the connection: {exc!r}")
        return
    if error is not None:
        judge_error(*error, tally)
    elif (mismatch := question.expected.mismatch(token_ids, logprobs, reference.tolerance)) is not None:
        tally.add_wrong(f"{len(question.prompt)} tokens: {mismatch}")
    else:
        tally.add("right")


def ask_all(
    url: str, questions: Sequence[Question], reference: Reference, tally: Tally, *, at_once: int, stream: bool = False
) -> None:
    """Each question once, ``at_once`` of them at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        for asked in [pool.submit(ask, url, each, reference, tally, stream=stream) for each in questions]:
            asked.result()


def judge_error(status: int, error: Any, tally: Tally) -> None:
    """``status`` 200: an error event in a stream."""
    code = error.get("code") if isinstance(error, dict) else None
    known = set().union(*ERRORS.values()) if status == 200 else ERRORS.get(status, set())
    if code in known:
        tally.add(f"{status} {code}")
    else:
        tally.add_wrong(f"status {status}: {json.dumps(error)[:300]}")


Read = tuple[list[int], list[float], tuple[int, Any] | None]


def _read_whole(url: str, body: dict[str, Any]) -> Read:
    response = httpx.post(url + COMPLETIONS_ROUTE, json=body, timeout=ANSWER_TIMEOUT_S)
    if response.status_code != 200:
        return [], [], (response.status_code, response.json().get("error"))
    [choice] = response.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], None


def _read_stream(url: str, body: dict[str, Any]) -> Read:
    token_ids: list[int] = []
    logprobs: list[float] = []
    with httpx.stream("POST", url + COMPLETIONS_ROUTE, json=body, timeout=ANSWER_TIMEOUT_S) as response:
        if response.status_code != 200:
            response.read()
            return [], [], (response.status_code, response.json().get("error"))
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return token_ids, logprobs, None
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return token_ids, logprobs, (200, event["error"])
            for choice in event["choices"]:
                token_ids += choice["token_ids"]
                logprobs += choice["logprobs"]["token_logprobs"]
    return token_ids, logprobs, (200, "the stream ended without [DONE] and without an error")


def hang_up(url: str, question: Question, moment_s: float) -> None:
    """A client that leaves in the middle."""
    body = completion_body(question.prompt, 300, stream=True)
    with contextlib.suppress(OSError), OpenRequest(url, COMPLETIONS_ROUTE, body):
        threading.Event().wait(moment_s)


@contextlib.contextmanager
def clients(
    url: str, questions: Sequence[Question], reference: Reference, tally: Tally, *, count: int, seed: int
) -> Iterator[None]:
    """``count`` clients ask one thing after the other while the block runs; one request in six is left in the middle.
    One more is hostile.

    Leaving the block waits until each has read its last answer.
    """
    done = threading.Event()

    def run(draw: random.Random) -> None:
        while not done.is_set():
            question = draw.choice(questions)
            if draw.random() < 1 / 6:
                hang_up(url, question, draw.random() * 0.5)
                tally.add("left")
            else:
                ask(url, question, reference, tally, stream=draw.random() < 0.5)

    threads = [threading.Thread(target=run, args=(random.Random(seed + index),)) for index in range(count)]
    threads.append(threading.Thread(target=be_hostile, args=(url, random.Random(seed), tally, done)))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(ANSWER_TIMEOUT_S + 30)


HOSTILE_BODIES = (
    b"{" * 100_000,
    b'{"prompt": ' + b"[" * 50_000,
    b'{"prompt": "\\ud800", "max_tokens": ' + b"9" * 4000 + b"}",
    json.dumps({"prompt": ["x"] * 2048, "n": 128}).encode(),
    json.dumps({"prompt": [7] * 1_000_000}).encode(),
    json.dumps({"prompt": "x", "stop": ["y" * 1000] * 1000}).encode(),
    json.dumps({"prompt": "x", "logit_bias": {str(token): 1 for token in range(50_000)}}).encode(),
    json.dumps({"prompt": [5, 6, 7], "max_tokens": -1, "temperature": "hot"}).encode(),
    json.dumps(
        {"prompt": [5] * 50, "kv_transfer_params": {"do_remote_prefill": True, "tandem_output_row": "AA=="}}
    ).encode(),
)
"""Requests that no client means: refused with a 4xx, or answered, but never a fault of the service."""


def send_hostile(url: str, body: bytes, tally: Tally) -> None:
    try:
        response = httpx.post(url + COMPLETIONS_ROUTE, content=body, timeout=ANSWER_TIMEOUT_S)
        if response.status_code >= 500 and response.status_code not in ERRORS:
            tally.add_wrong(f"{body[:40]!r}: status {response.status_code}: {response.text[:200]}")
        tally.add("hostile")
    except httpx.TimeoutException:
        tally.add_hung(f"{body[:40]!r}: no end")
    except httpx.HTTPError:  # refused before the body was read to its end
        tally.add("hostile cut")


def be_hostile(url: str, draw: random.Random, tally: Tally, done: threading.Event) -> None:
    """Hostile bodies one after the other; between them connections that stand still half-way, or are reset."""
    host = urlsplit(url)
    address = (str(host.hostname), int(host.port or 80))
    standing: list[socket.socket] = []
    while not done.is_set():
        send_hostile(url, draw.choice(HOSTILE_BODIES), tally)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        with contextlib.suppress(OSError):  # the proxy is being started again
            standing.append(socket.create_connection(address))
            standing[-1].sendall(head[: draw.randrange(len(head))])
        if len(standing) > NUM_STANDING:
            left = standing.pop(draw.randrange(len(standing)))
            if draw.random() < 0.5:  # closed by a reset
                left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            left.close()
            tally.add("half open")
        done.wait(draw.random() * 0.2)
    for each in standing:
        each.close()


def strike(service: Service, node: Node, *, freeze_s: float) -> None:
    """Kills a node, ``freeze_s`` after it was frozen (0: at once), and waits until a new process is ready."""
    if freeze_s:
        os.kill(node.process.pid, signal.SIGSTOP)
        time.sleep(freeze_s)
    node.process.kill()
    service.start_again(node)
    wait_ready(node)


def num_open_files(node: Node) -> int:
    return len(list(Path(f"/proc/{node.process.pid}/fd").iterdir()))


def resident_mib(node: Node) -> float:
    for line in Path(f"/proc/{node.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0
