"""A whole service whose nodes are on GPUs: the built-in model in float32, over NIXL from pool to pool, with the answers
of the same service on CPUs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.demo_model.corpus import documentation
from benchmarks.demo_model.evaluate import RecallItem, held_out_text, recall_items
from benchmarks.demo_model.tokens import Encoder
from common.demo_model import FOLDER
from tests.support.client import info, post, wait_settled
from tests.support.service import Node, Process, Service, free_port, wait_ready

pytestmark = pytest.mark.cuda

NODE_FLAGS = ("--dtype", "float32", "--max-num-batched-tokens", "1024", "--max-model-len", "4096")
START_S = 300.0
"""Seconds for torch, CUDA and the kernels that are compiled at the first start."""
NUM_ITEMS = 4


@pytest.fixture(scope="module")
def items() -> list[RecallItem]:
    from transformers import AutoTokenizer

    encoder = Encoder(AutoTokenizer.from_pretrained(FOLDER))
    return recall_items(encoder, held_out_text(documentation()), 500, NUM_ITEMS, seed=77)


def chat(url: str, items: list[RecallItem]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each item two turns: (choice, trace). The second asks for the same once more."""
    found = []
    for item in items:
        messages = list(item.messages)
        for _ in range(2):
            body = {"messages": messages, "max_tokens": 24, "temperature": 0, "logprobs": True}
            answer = post(url, "/v1/chat/completions", body)
            found.append((answer["choices"][0], answer["tandem"]))
            content = answer["choices"][0]["message"]["content"]
            messages = [*messages, {"role": "assistant", "content": content}, item.messages[-1]]
    return found


@pytest.fixture(scope="module")
def on_cpus(items: list[RecallItem]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    flags = (*NODE_FLAGS, "--kv-cache-memory", "256MiB")
    with Service(FOLDER, prefill_flags=flags, decode_flags=flags) as service:
        return chat(service.url, items)


def check_equal(found: list[Any], wanted: list[Any]) -> None:
    for (choice, _), (stock, _) in zip(found, wanted, strict=True):
        assert choice["message"]["content"] == stock["message"]["content"]
        for entry, other in zip(choice["logprobs"]["content"], stock["logprobs"]["content"], strict=True):
            assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-3)


@pytest.fixture
def up() -> Iterator[str]:
    """``tandem up`` with no size of the pools: they get what the share leaves. On one GPU both nodes share it."""
    port = free_port(100, 200)
    words = ["up", "--port", str(port), "--device", "cuda", *NODE_FLAGS]
    words += ["--gpu-memory-utilization", "0.1", "--policy", "round_robin"]
    with tempfile.TemporaryDirectory() as folder:
        process = Process([sys.executable, "-m", "common.cli", *words], Path(folder) / "up.log")
        node = Node("up", f"http://127.0.0.1:{port}", process)
        try:
            wait_ready(node, START_S)
            yield node.url
        except BaseException:
            sys.stderr.write(process.tail(20_000))
            raise
        finally:
            process.stop()


@pytest.mark.timeout(900)
def test_up_when_its_nodes_are_on_gpus_then_states_move_between_their_pools_and_answers_are_those_of_cpus(
    up: str, items: list[RecallItem], on_cpus: list[Any]
) -> None:
    found = chat(up, items)
    for number, (_, trace) in enumerate(found):
        assert trace["placement"] == "remote"
        assert (trace["transferred_states"], trace["transferred_blocks"] > 0) == (1, True)
        if number % 2:
            # Of the second turn's prompt the first is there: on the prefill node and on the decode node.
            assert trace["prefill_cached_tokens"] > 500
            assert trace["decode_cached_tokens"] > 500
    check_equal(found, on_cpus)


@pytest.mark.timeout(900)
def test_answer_when_the_state_that_was_moved_is_zeroed_in_the_gpu_then_is_another(
    items: list[RecallItem], on_cpus: list[Any]
) -> None:
    """The control, and the digests of all that is moved."""
    flags = (*NODE_FLAGS, "--device", "cuda", "--kv-cache-memory", "256MiB", "--kv-transfer-verify", "all")
    with Service(FOLDER, prefill_flags=flags, decode_flags=flags) as service:
        assert info(service.decode[0])["num_slots"] > 1
        first = chat(service.url, items[:1])
        check_equal(first, on_cpus[:2])
        damage = service.decode[0].url + "/internal/v1/test/damage"
        same = 0
        for item, (wanted, _) in zip(items[1:], on_cpus[2::2], strict=True):
            httpx.post(damage, json={"target": "state"}, timeout=30).raise_for_status()
            [(choice, trace), _] = chat(service.url, [item])
            assert trace["transferred_states"] == 1
            same += choice["message"]["content"] == wanted["message"]["content"]
        assert same < NUM_ITEMS - 1
        wait_settled(*service.prefill, *service.decode)
