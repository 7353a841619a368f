"""Images through proxy, prefill node, NIXL and decode node: transformers' own answers, from a decode node that has
never seen an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from common.wire.routes import CHAT_ROUTE
from tests.e2e.conftest import NODE_FLAGS
from tests.support import images
from tests.support.client import metric, post, wait_settled
from tests.support.images import image_part, picture
from tests.support.reference import tolerance
from tests.support.service import Service

FAMILY = "qwen3_5"
TOKENS = 16
A, B, C = picture(21), picture(22, 80, 32), picture(23, 33, 70)
SAME_SIZE = picture(24)
Part = str | bytes


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def user(*parts: Part) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [text_part(each) if isinstance(each, str) else image_part(each) for each in parts],
    }


@dataclass(frozen=True)
class ChatAnswer:
    body: Mapping[str, Any]

    @property
    def token_ids(self) -> list[int]:
        return list(self.body["choices"][0]["token_ids"])

    @property
    def logprobs(self) -> list[float]:
        return [each["logprob"] for each in self.body["choices"][0]["logprobs"]["content"]]

    @property
    def text(self) -> str:
        return str(self.body["choices"][0]["message"]["content"])

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self.body["prompt_token_ids"])

    @property
    def cached_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])


@dataclass(frozen=True)
class Site:
    service: Service

    def ask(self, *messages: Mapping[str, Any], url: str | None = None, **fields: Any) -> ChatAnswer:
        body = {
            "messages": list(messages),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "return_token_ids": True,
        }
        return ChatAnswer(post(url or self.service.url, CHAT_ROUTE, {**body, **fields}))

    def check(self, answer: ChatAnswer, pictures: Sequence[bytes]) -> None:
        """It is stock's answer to its own prompt with these pictures."""
        expected = images.stock_generate(answer.prompt_token_ids, pictures, TOKENS, family=FAMILY)
        mismatch = expected.mismatch(answer.token_ids, answer.logprobs, tolerance(FAMILY))
        assert mismatch is None, mismatch

    def num_encoded(self) -> float:
        return sum(metric(node, "images_encoded_total", source="computed") for node in self.service.prefill)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    flags = [*NODE_FLAGS, "--max-num-batched-tokens", "40"]  # cuts images
    with Service(images.image_checkpoint(FAMILY), prefill_flags=flags, decode_flags=NODE_FLAGS) as running:
        yield Site(running)


def test_chat_when_it_has_images_then_answers_equal_transformers_cold_repeated_and_in_a_second_turn(site: Site) -> None:
    first = user("What is this?", A, "And this?", B)
    cold = site.ask(first)
    site.check(cold, [A, B])
    repeated = site.ask(first)
    assert (repeated.token_ids, repeated.cached_tokens) == (cold.token_ids, len(cold.prompt_token_ids))
    encoded = site.num_encoded()
    assert encoded == 2
    turn = [first, {"role": "assistant", "content": cold.text}, user("Now this.", C)]
    second = site.ask(*turn)
    site.check(second, [A, B, C])
    assert second.cached_tokens >= len(cold.prompt_token_ids)
    assert site.num_encoded() == encoded + 1
    # The other image of the same size shares nothing from its start on, and is another image.
    other = site.ask(user("What is this?", SAME_SIZE, "And this?", B))
    site.check(other, [SAME_SIZE, B])
    assert other.cached_tokens <= other.prompt_token_ids.index(images.PAD_ID)
    assert other.token_ids != cold.token_ids
    wait_settled(*site.service.prefill, *site.service.decode)
