"""The built-in model through the running service: what it recalls comes from transferred blocks and state."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo_model.corpus import documentation
from benchmarks.demo_model.evaluate import (
    QUESTIONS,
    RecallItem,
    held_out_text,
    phrased_items,
    recall_items,
)
from benchmarks.demo_model.tokens import Encoder
from common.demo_model import FOLDER
from tests.support.client import metric, post, together, wait_settled
from tests.support.hangup import wait_until
from tests.support.service import ROOT, Service, start_node, wait_ready

BARS = {100: 0.95, 500: 0.95, 1000: 0.90, 2000: 0.80}
NUM_ITEMS = 20
PHRASED_BAR, EXACT_BAR = 0.90, 0.85
FLAGS = ("--max-num-batched-tokens", "1024", "--max-model-len", "4096", "--kv-cache-memory", "128MiB")
PHRASE = "The code word is "


@pytest.fixture(scope="module")
def demo() -> Iterator[Service]:
    """One prefill and one decode node with the built-in model as ``tandem up`` runs it, in its own bfloat16."""
    with Service(FOLDER, prefill_flags=FLAGS, decode_flags=FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def text() -> str:
    return held_out_text(documentation())


@pytest.fixture(scope="module")
def some_text() -> str:
    """Enough of it for a few prompts."""
    return held_out_text(documentation(with_sources=False))


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(AutoTokenizer.from_pretrained(FOLDER))


def ask(service: Service, messages: Sequence[dict[str, str]], salt: str) -> tuple[str, dict[str, object]]:
    """The greedy answer and its trace."""
    body = {"messages": list(messages), "max_tokens": 24, "temperature": 0, "cache_salt": salt}
    answer = post(service.url, "/v1/chat/completions", body)
    return answer["choices"][0]["message"]["content"], answer["tandem"]


def ask_damaged(service: Service, item: RecallItem, target: str) -> str:
    url = service.decode[0].url + "/internal/v1/test/damage"
    httpx.post(url, json={"target": target}, timeout=30).raise_for_status()
    answer, trace = ask(service, item.messages, f"damage: {target}")
    assert trace["placement"] == "remote"
    assert (trace["prefill_cached_tokens"], trace["decode_cached_tokens"]) == (0, 0)
    return answer


@pytest.mark.full  # the test below asks in every phrasing, from far away
@pytest.mark.parametrize("distance", BARS)
def test_recall_of_held_out_words_when_asked_through_the_service_then_reaches_the_bar(
    demo: Service, encoder: Encoder, text: str, distance: int
) -> None:
    items = recall_items(encoder, text, distance, NUM_ITEMS, seed=distance)
    answers = together([lambda item=item: ask(demo, item.messages, "recall") for item in items])
    for _, trace in answers:
        assert trace["placement"] == "remote"
        assert trace["transferred_states"] == 1
        assert int(str(trace["transferred_blocks"])) > distance // 16
    right = sum(answer == item.answer for item, (answer, _) in zip(items, answers, strict=True))
    assert right >= BARS[distance] * NUM_ITEMS, [answer for answer, _ in answers]


@pytest.mark.parametrize("num_items", [1, *(pytest.param(each, marks=pytest.mark.full) for each in (4, 40))])
def test_recall_when_asked_in_five_phrasings_of_which_two_were_never_trained_then_reaches_the_bar(
    demo: Service, encoder: Encoder, num_items: int, request: pytest.FixtureRequest
) -> None:
    text = request.getfixturevalue("some_text" if num_items == 1 else "text")
    items = [item for question in QUESTIONS for item in phrased_items(encoder, text, num_items, question)]
    # Few at once: a prompt that waits for too long in a queue is rightly computed elsewhere.
    answers = []
    for few in (items[start : start + 20] for start in range(0, len(items), 20)):
        answers += together([lambda item=item: ask(demo, item.messages, "phrased") for item in few])
    assert all(trace["placement"] == "remote" for _, trace in answers)
    # The word is what must be recalled; a thing called by another of its names is a smaller fault.
    recalled = sum(item.word in answer for item, (answer, _) in zip(items, answers, strict=True))
    assert recalled >= PHRASED_BAR * len(items), [answer for answer, _ in answers]
    exact = sum(answer == item.answer for item, (answer, _) in zip(items, answers, strict=True))
    assert exact >= EXACT_BAR * len(items), [answer for answer, _ in answers]


def readme_request() -> dict[str, Any]:
    """The body of the request that README.md shows."""
    [body] = re.findall(r"curl .*?-d '\n(.*?)'\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return json.loads(body)


def test_request_of_the_readme_when_sent_then_is_answered_as_it_says(demo: Service) -> None:
    answer = post(demo.url, "/v1/chat/completions", readme_request())
    assert answer["choices"][0]["message"]["content"] == f"{PHRASE}amber falcon."


def test_answers_when_compared_with_stock_transformers_on_the_same_files_then_are_equal(
    demo: Service, encoder: Encoder, some_text: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    stock = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).eval()
    for item in recall_items(encoder, some_text, 300, 2, seed=902):
        ids = tokenizer.apply_chat_template(item.messages, add_generation_prompt=True, return_tensors="pt")
        output = stock.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert ask(demo, item.messages, "stock")[0] == tokenizer.decode(output, skip_special_tokens=True)


@pytest.mark.full
@pytest.mark.parametrize("target", ["state", "blocks"])
def test_control_when_the_moved_state_or_blocks_are_zeroed_then_fewer_than_half_are_recalled(
    demo: Service, encoder: Encoder, text: str, target: str
) -> None:
    items = recall_items(encoder, text, 100, NUM_ITEMS, seed=901)
    whole = [ask(demo, item.messages, "no damage")[0] for item in items]
    assert sum(answer == item.answer for item, answer in zip(items, whole, strict=True)) >= 0.9 * NUM_ITEMS
    answers = [ask_damaged(demo, item, target) for item in items]
    # Counted wherever the word stands: a spoilt phrase before the right word is no proof.
    recalled = sum(item.word in answer for item, answer in zip(items, answers, strict=True))
    assert recalled < 0.5 * NUM_ITEMS, answers


def chat_turns(items: Sequence[tuple[str, str]], text: str) -> list[tuple[str, str]]:
    """Three questions, the first after facts and text, and their answers."""
    facts = " ".join(f"The code word of the {place} is {word}." for place, word in items)
    questions = [f"What is the code word of the {place}?" for place, _ in items]
    questions[0] = f"{facts}\n\n{text}\n\n{questions[0]}"
    return [(question, f"{PHRASE}{word}.") for question, (_, word) in zip(questions, items, strict=True)]


def test_chat_of_three_turns_when_asked_with_the_openai_client_then_is_right_and_served_from_cache(
    demo: Service, encoder: Encoder, some_text: str
) -> None:
    facts = [("mill", "amber falcon"), ("harbour", "quiet lantern"), ("castle", "golden otter")]
    messages: list[dict[str, str]] = []
    before = 0
    with openai.OpenAI(base_url=demo.url + "/v1", api_key="unused", max_retries=0, timeout=120) as client:
        model = client.models.list().data[0].id
        for turn, (question, expected) in enumerate(chat_turns(facts, encoder.first(some_text, 400))):
            messages.append({"role": "user", "content": question})
            answer = client.chat.completions.create(
                model=model,
                messages=messages,  # type: ignore[arg-type]
                max_completion_tokens=24,
                temperature=0,
            )
            assert answer.choices[0].message.content == expected
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            # All that the prefill node had computed: the prompt of the turn before.
            assert answer.usage.prompt_tokens_details.cached_tokens >= before
            assert (answer.usage.prompt_tokens_details.cached_tokens > 400) == (turn > 0)
            before = answer.usage.prompt_tokens
            messages.append({"role": "assistant", "content": expected})


@pytest.mark.full
def test_recall_when_the_prefill_node_was_killed_between_the_turns_then_is_right(
    demo: Service, encoder: Encoder, text: str
) -> None:
    facts = [("tower", "silver fox"), ("bridge", "brave panda"), ("museum", "cold river")]
    turns = chat_turns(facts, encoder.first(text[20_000:], 300))
    prefill = demo.prefill[0]
    messages: list[dict[str, str]] = []
    for turn, (question, expected) in enumerate(turns):
        messages.append({"role": "user", "content": question})
        answer, _ = ask(demo, messages, "killed")
        assert answer == expected
        messages.append({"role": "assistant", "content": answer})
        if turn == 0:
            prefill.process.stop(signal.SIGKILL)
        elif turn == 1:
            port = int(prefill.url.rpartition(":")[2])
            prefill.process = start_node("prefill", FOLDER, prefill.process.log.parent, *FLAGS, port=port).process
            wait_ready(prefill)
            wait_until(lambda: metric(demo.proxy, "node_up") == 2, "the proxy to see both nodes")
    wait_settled(*demo.prefill, *demo.decode)
