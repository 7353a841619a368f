"""What a node has is not computed by another, and not moved twice: turn two of a conversation through the prefill node,
which pulls what the decode node generated; and the exact bytes of each move, for several kinds of model, and for nodes
of one process and of several ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from common.models.synthetic import CHAT_TEMPLATE, END_TOKEN, PAD_TOKEN, SPECIAL_TOKENS
from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support import foreign
from tests.support.client import (
    Answer,
    complete,
    completion_body,
    computed_prompt_tokens,
    info,
    metric,
    payload_bytes,
    post,
    wait_settled,
)
from tests.support.models import RECURRENT_FAMILIES, VOCAB_SIZE, checkpoint
from tests.support.reference import Reference, random_tokens, reference
from tests.support.service import Node, Service

BLOCK_SIZE = 16
NUM_TOKENS = 24


@dataclass(frozen=True)
class Site:
    family: str
    service: Service
    reference: Reference

    @property
    def prefill(self) -> Node:
        return self.service.prefill[0]

    @property
    def decode(self) -> Node:
        return self.service.decode[0]

    @property
    def num_states(self) -> int:
        """States that a handoff moves."""
        return int(self.family in RECURRENT_FAMILIES)

    def assert_equals_stock(self, prompt: Sequence[int], answer: Answer) -> None:
        greedy = self.reference.greedy(prompt, len(answer.token_ids()))
        assert greedy.mismatch(answer.token_ids(), answer.logprobs(), self.reference.tolerance) is None


SITES = [
    # family, processes of the prefill node, of the decode node
    (FAMILY, 1, 1),
    (FAMILY, 2, 1),
    (FAMILY, 1, 2),
    (FAMILY, 2, 2),
    (FAMILY, 2, 4),
    ("qwen3_5", 1, 1),
    ("qwen3_5", 2, 1),
    ("qwen3_5", 1, 2),
    ("kimi_linear", 2, 1),
    ("kimi_linear", 1, 2),
    ("llama", 1, 1),
]
NUM_QUICK = 1


@pytest.fixture(
    scope="module",
    params=[*SITES[:NUM_QUICK], *(pytest.param(each, marks=pytest.mark.full) for each in SITES[NUM_QUICK:])],
    ids=lambda site: "-".join(map(str, site)),
)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    family, *sizes = request.param
    if request.param == SITES[0]:
        yield Site(family, request.getfixturevalue("service"), reference(family))
        return
    flags = (*NODE_FLAGS, "--kv-transfer-verify", "all" if family == "llama" else "sample")
    prefill_flags, decode_flags = ((*flags, "--tensor-parallel-size", str(size)) for size in sizes)
    with Service(checkpoint(family), prefill_flags=prefill_flags, decode_flags=decode_flags) as running:
        assert [info(node)["tensor_parallel_size"] for node in (running.prefill[0], running.decode[0])] == sizes
        yield Site(family, running, reference(family))


def pull_source(node: Node) -> dict[str, str]:
    return {"url": node.url, "epoch": str(info(node)["epoch"])}


@dataclass(frozen=True)
class Moved:
    """Since ``Counters`` was made: prompt tokens computed, bytes read by kind, answers of sources by result."""

    computed: float
    kv_bytes: float
    state_bytes: float
    hits: float


class Counters:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._start = self._read()

    def _read(self) -> list[float]:
        node = self._node
        return [
            *computed_prompt_tokens([node]),
            *(metric(node, "transfer_bytes_total", direction="in", kind=kind) for kind in ("kv", "state")),
            metric(node, "source_queries_total", result="hit"),
        ]

    def since(self) -> Moved:
        return Moved(*(now - start for now, start in zip(self._read(), self._start, strict=True)))


def by_hand(site: Site, prompt: Sequence[int], **leg_fields: Any) -> Answer:
    """Prefill leg, then decode leg, as another project's proxy sends them."""
    params = foreign.prefill(site.prefill.url, {**completion_body(prompt, NUM_TOKENS), **leg_fields})
    response = foreign.decode(site.decode.url, completion_body(prompt, NUM_TOKENS), params)
    assert response.status_code == 200, response.text
    return Answer(response.json())


@pytest.mark.parametrize("way", ["proxy", "legs"])
def test_turn_two_when_sent_through_the_prefill_node_then_it_computes_only_the_new_tokens(site: Site, way: str) -> None:
    turn_one = random_tokens(203, seed=1511 if way == "proxy" else 1513)
    answer_one = complete(site.service.url, turn_one, 33)
    site.assert_equals_stock(turn_one, answer_one)
    turn_two = turn_one + answer_one.token_ids() + random_tokens(41, seed=1512)
    num_known = len(turn_one) + 33 - 1  # the last token of the answer was sampled, never computed
    prefill, decode = Counters(site.prefill), Counters(site.decode)
    if way == "proxy":
        answer_two = complete(site.service.url, turn_two, NUM_TOKENS)
        assert answer_two.trace["placement"] == "remote"
    else:
        answer_two = by_hand(site, turn_two, tandem_sources=[pull_source(site.decode)])
    site.assert_equals_stock(turn_two, answer_two)
    pulled = prefill.since()
    assert pulled.hits == 1
    assert pulled.computed == len(turn_two) - num_known
    # The prefill node has turn one's full blocks; the reply's come over, with the state at its end.
    num_blocks = -(-num_known // BLOCK_SIZE) - len(turn_one) // BLOCK_SIZE
    assert pulled.kv_bytes == payload_bytes(site.prefill, num_blocks, 0)
    assert pulled.state_bytes == payload_bytes(site.prefill, 0, site.num_states)
    # Back on the decode node only what it had not computed itself.
    num_blocks = -(-len(turn_two) // BLOCK_SIZE) - num_known // BLOCK_SIZE
    handed_over = decode.since()
    assert handed_over.computed == 0
    assert handed_over.kv_bytes == payload_bytes(site.decode, num_blocks, 0)
    assert handed_over.state_bytes == payload_bytes(site.decode, 0, site.num_states)
    assert answer_two.cached_tokens == num_known
    wait_settled(site.prefill, site.decode)


def test_repeat_when_the_prompt_is_the_same_then_no_byte_moves(site: Site) -> None:
    prompt = random_tokens(333, seed=1521)
    complete(site.service.url, prompt, NUM_TOKENS)
    counters = [Counters(node) for node in (site.prefill, site.decode)]
    again = complete(site.service.url, prompt, NUM_TOKENS)
    site.assert_equals_stock(prompt, again)
    assert again.trace["transferred_bytes"] == 0
    for counter in counters:
        moved = counter.since()
        assert (moved.computed, moved.kv_bytes, moved.state_bytes) == (0, 0, 0)


def test_shared_prefix_when_the_rest_is_new_then_the_missing_blocks_and_one_state_move(site: Site) -> None:
    shared = random_tokens(400, seed=1531)
    complete(site.service.url, shared + random_tokens(99, seed=1532), NUM_TOKENS)
    decode = Counters(site.decode)
    prompt = shared + random_tokens(150, seed=1533)
    answer = complete(site.service.url, prompt, NUM_TOKENS)
    site.assert_equals_stock(prompt, answer)
    moved = decode.since()
    num_blocks = -(-550 // BLOCK_SIZE) - 400 // BLOCK_SIZE
    assert moved.kv_bytes == payload_bytes(site.decode, num_blocks, 0)
    assert moved.state_bytes == payload_bytes(site.decode, 0, site.num_states)
    assert answer.trace["transferred_bytes"] == payload_bytes(site.decode, num_blocks, site.num_states)


def test_sources_when_none_is_of_use_then_the_prompt_is_computed_and_nothing_fails(site: Site) -> None:
    source = pull_source(site.decode)
    for seed, url, result in (
        (1541, source["url"], "miss"),
        (1542, "http://127.0.0.1:9", "failed"),
        (1543, "http://10.1.2.3:8100", "refused"),
    ):
        prompt = random_tokens(120, seed)
        before = metric(site.prefill, "source_queries_total", result=result)
        answer = by_hand(site, prompt, tandem_sources=[{**source, "url": url}])
        assert metric(site.prefill, "source_queries_total", result=result) == before + 1
        site.assert_equals_stock(prompt, answer)
    wait_settled(site.prefill, site.decode)


def test_sources_when_the_epoch_is_of_an_earlier_life_then_not_used(site: Site) -> None:
    prompt = random_tokens(130, seed=1551)
    complete(site.decode.url, prompt, 4)  # placed locally: only the decode node has it
    before = metric(site.prefill, "source_queries_total", result="mismatch")
    source = {**pull_source(site.decode), "epoch": "12345"}
    prefill = Counters(site.prefill)
    answer = by_hand(site, [*prompt, 9, 9], tandem_sources=[source])
    assert metric(site.prefill, "source_queries_total", result="mismatch") == before + 1
    assert prefill.since().computed == 132
    site.assert_equals_stock([*prompt, 9, 9], answer)
    wait_settled(site.prefill, site.decode)


def test_question_when_its_reader_gave_up_before_it_was_read_then_nothing_is_leased(site: Site) -> None:
    """A busy node reads a question after the word that nobody waits for its answer any more."""
    prompt = random_tokens(110, seed=1571)
    params = foreign.prefill(site.prefill.url, completion_body(prompt))
    foreign.release(site.prefill.url, params)
    question = {
        "prompt_token_ids": prompt,
        "cache_salt": None,
        "fingerprint": params["tandem_fingerprint"],
        "prefix_key": params["tandem_prefix_key"],
        "have": 0,
    }
    leases = "/internal/v1/leases/release"
    found = post(site.prefill.url, "/internal/v1/pull", {"id": "content-in-time", **question})
    assert found["remote_num_tokens"] == 110
    assert post(site.prefill.url, leases, {"lease_ids": ["content-in-time"], "may_come": True}) == {"unknown": []}
    unknown = post(site.prefill.url, leases, {"lease_ids": ["content-too-late"], "may_come": True})
    assert unknown == {"unknown": ["content-too-late"]}
    found = post(site.prefill.url, "/internal/v1/pull", {"id": "content-too-late", **question})
    assert found["remote_num_tokens"] == 0
    wait_settled(site.prefill)


def test_local_leg_when_another_node_has_the_prefix_then_it_is_pulled(site: Site) -> None:
    prompt = random_tokens(210, seed=1561)
    params = foreign.prefill(site.prefill.url, completion_body(prompt))
    foreign.release(site.prefill.url, params)
    decode = Counters(site.decode)
    longer = [*prompt, *random_tokens(20, seed=1562)]
    answer = complete(site.decode.url, longer, NUM_TOKENS, tandem_sources=[pull_source(site.prefill)])
    site.assert_equals_stock(longer, answer)
    moved = decode.since()
    assert (moved.hits, moved.computed) == (1, 20)
    assert moved.kv_bytes == payload_bytes(site.decode, -(-210 // BLOCK_SIZE), 0)
    assert moved.state_bytes == payload_bytes(site.decode, 0, site.num_states)
    assert answer.trace["transferred_blocks"] == -(-210 // BLOCK_SIZE)
    wait_settled(site.prefill, site.decode)


# --- chat


@pytest.fixture(scope="module")
def character_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny hybrid with a tokenizer that gives each answer's text its own tokens back: one character, one token."""
    folder = tmp_path_factory.mktemp("characters") / "model"
    shutil.copytree(checkpoint(FAMILY), folder)
    characters = [chr(code) for code in (*range(32, 127), *range(0x4E00, 0x4E00 + VOCAB_SIZE))]
    names = [*SPECIAL_TOKENS, *characters][:VOCAB_SIZE]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return folder


@pytest.mark.full
def test_chat_when_its_tokenizer_round_trips_then_turn_two_computes_from_the_end_of_the_reply(
    character_checkpoint: Path,
) -> None:
    options = {
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
        "logit_bias": {str(index): -100 for index in range(len(SPECIAL_TOKENS))},
    }
    messages = [{"role": "user", "content": "Where was the state of this conversation kept while nobody spoke?"}]
    with Service(character_checkpoint, prefill_flags=NODE_FLAGS, decode_flags=NODE_FLAGS) as service:
        prefill, decode = service.prefill[0], service.decode[0]
        first = post(service.url, "/v1/chat/completions", {"messages": messages, **options})
        num_known = int(first["usage"]["prompt_tokens"]) + 40 - 1
        messages += [first["choices"][0]["message"], {"role": "user", "content": "And where is it now?"}]
        counters = Counters(prefill)
        second = post(service.url, "/v1/chat/completions", {"messages": messages, **options})
        num_prompt = int(second["usage"]["prompt_tokens"])
        assert counters.since().computed == num_prompt - num_known
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == num_known
        alone = post(decode.url, "/v1/chat/completions", {"messages": messages, **options, "cache_salt": "alone"})
        assert second["choices"][0]["message"] == alone["choices"][0]["message"]
        wait_settled(prefill, decode)
