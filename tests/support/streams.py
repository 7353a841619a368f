"""Clients that read streams which may go on at another node, and what strikes the node meanwhile."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.reference import random_tokens
from tests.support.service import Node, Service

NUM_STREAMS = 20
NUM_TOKENS = 1000
KINDS: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"logprobs": 1, "return_token_ids": True},
    {"temperature": 0.8, "top_p": 0.9, "seed": 11, "min_tokens": 100},
)


@dataclass
class Stream:
    """One client: everything it got."""

    body: dict[str, Any]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    ids: set[Any] = field(default_factory=set)
    usage: Any = None
    error: Any = None
    is_done: bool = False
    num_events: int = 0
    pause_s: float = 0.0  # the longest between two events
    _last_s: float | None = None

    def run(self, url: str) -> Stream:
        with httpx.stream("POST", url + "/v1/completions", json=self.body, timeout=60) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line:
                    self._take(line)
        return self

    def _take(self, line: str) -> None:
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            self.is_done = True
            return
        now = time.monotonic()
        self.pause_s = max(self.pause_s, now - (self._last_s or now))
        self._last_s = now
        event = json.loads(line[6:])
        self.error = event.get("error")
        self.usage = event.get("usage", self.usage)
        self.ids.add((event.get("id"), event.get("created")))
        for choice in event.get("choices", ()):
            self.num_events += 1
            self.text += choice["text"]
            self.token_ids += choice.get("token_ids") or []
            self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
            self.ends += [choice["finish_reason"]] if choice["finish_reason"] else []

    def assert_like(self, other: Stream) -> None:
        assert self.error is None, self.error
        assert self.text == other.text
        assert self.token_ids == other.token_ids
        assert self.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert (self.ends, self.usage, self.num_events) == (other.ends, other.usage, other.num_events)
        assert len(self.ids) == 1
        assert self.is_done


def bodies(seed: int, salt: str) -> list[dict[str, Any]]:
    common = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, "cache_salt": salt}
    return [
        {
            **common,
            "prompt": random_tokens(40 + 17 * index, seed + index),
            "stream_options": {"include_usage": True},
            **KINDS[index % len(KINDS)],
        }
        for index in range(NUM_STREAMS)
    ]


def run_all(url: str, streams: Sequence[Stream]) -> Sequence[Stream]:
    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(lambda stream: stream.run(url), streams))


def run_and_strike(service: Service, streams: Sequence[Stream], node: Node, number: int) -> None:
    """Sends ``number`` to ``node`` when all streams are on their way."""

    def strike() -> None:
        while min(stream.num_events for stream in streams) < 5:
            time.sleep(0.01)
        assert not all(stream.is_done for stream in streams)
        os.kill(node.process.pid, number)

    striker = threading.Thread(target=strike)
    striker.start()
    run_all(service.url, streams)
    striker.join()
