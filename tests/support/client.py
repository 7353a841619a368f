"""Plain HTTP against a running service: requests whose answers carry token ids, log-probabilities and the trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from common.wire.headers import TRACE_HEADER
from common.wire.routes import COMPLETIONS_ROUTE, INFO_ROUTE, METRICS_ROUTE
from tests.support.service import Node

T = TypeVar("T")

REQUEST_TIMEOUT_S = 240.0
SETTLE_TIMEOUT_S = 20.0
TRACE_HEADERS = {TRACE_HEADER: "1"}
Prompt = str | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Answer:
    """The body of a 200 from ``/v1/completions``."""

    body: Mapping[str, Any]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return list(self.body["choices"])

    @property
    def trace(self) -> dict[str, Any]:
        return dict(self.body["tandem"])

    @property
    def cached_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])

    def token_ids(self, choice: int = 0) -> list[int]:
        return list(self.body["choices"][choice]["token_ids"])

    def logprobs(self, choice: int = 0) -> list[float]:
        """Of the tokens of ``token_ids``; the first of an echoed prompt has none (None)."""
        return list(self.body["choices"][choice]["logprobs"]["token_logprobs"])


def completion_body(prompt: Prompt, num_tokens: int = 48, **fields: Any) -> dict[str, Any]:
    """Greedy, exactly ``num_tokens`` tokens, with their ids and log-probabilities; ``fields`` go on top."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    return {**body, **fields}


def post(url: str, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a 200; anything else fails with the answer's text."""
    response = httpx.post(url + route, json=body, headers=TRACE_HEADERS, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == 200, f"{route}: {response.status_code} {response.text[:2000]}"
    return dict(response.json())


def complete(url: str, prompt: Prompt, num_tokens: int = 48, **fields: Any) -> Answer:
    return Answer(post(url, COMPLETIONS_ROUTE, completion_body(prompt, num_tokens, **fields)))


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """All at once, each on a thread of its own; results in order, the first error is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def metric(node: Node, name: str, /, **labels: str) -> float:
    """Sum of the samples of ``tandem_NAME`` that have these labels; 0 without any."""
    text = _get(node.url + METRICS_ROUTE).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(s.value for s in samples if s.name == "tandem_" + name and labels.items() <= s.labels.items())


def computed_prompt_tokens(nodes: Sequence[Node]) -> list[float]:
    """Prompt tokens that each node computed since its start."""
    return [metric(node, "prompt_tokens_total", source="computed") for node in nodes]


def info(node: Node) -> dict[str, Any]:
    return dict(_get(node.url + INFO_ROUTE).json())


def _get(url: str) -> httpx.Response:
    # Loading certificates that plain HTTP does not need takes 20 ms: longer than what some callers wait for.
    return httpx.get(url, timeout=30, verify=False).raise_for_status()


def payload_bytes(node: Node, num_blocks: int | Sequence[int], num_states: int) -> int:
    """What ``node`` reads, all its ranks together. ``num_blocks``: of the first attention group, or of each."""
    sizes = info(node)
    counts = [num_blocks] if isinstance(num_blocks, int) else num_blocks
    blocks = sum(count * int(group["block_bytes"]) for count, group in zip(counts, sizes["groups"], strict=False))
    return int(sizes["tensor_parallel_size"]) * (blocks + num_states * int(sizes["slot_bytes"]))


def wait_settled(*nodes: Node) -> None:
    """Waits until no node holds memory for a request or a lease (releases come just after the answer); every invariant
    holds then."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    for node in nodes:
        while True:
            state: dict[str, Any] = node.check_cache()
            busy = sum(state[pool].get(kind, 0) for pool in ("blocks", "slots") for kind in BUSY_STATES)
            if not (busy or state["leases"] or state["sequences"]):
                break
            assert time.monotonic() < deadline, f"{node.role} still holds memory: {state}"
            time.sleep(0.05)
        assert state["ok"], state["violations"]
        sizes = info(node)
        # Null entries are not counted.
        totals = {"blocks": sum(group["num_blocks"] - 1 for group in sizes["groups"]), "slots": sizes["num_slots"] - 1}
        for pool, total in totals.items():
            assert state[pool]["free"] + state[pool]["cached"] == total, (node.role, state)


BUSY_STATES = ("held", "leased", "quarantined")
