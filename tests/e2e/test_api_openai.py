"""The official ``openai`` client against a running service: what it sends is understood, what it gets it can read."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.reference import Reference, random_tokens
from tests.support.service import Service

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url + "/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models_list_names_the_one_served_model(client: openai.OpenAI, service: Service) -> None:
    listed = client.models.list().data
    assert [(each.id, each.object) for each in listed] == [(str(service.model), "model")]
    assert listed[0].model_extra is not None
    assert listed[0].model_extra["max_model_len"] == 4096


def test_completion_of_token_ids_when_greedy_then_is_what_transformers_generates(
    client: openai.OpenAI, model: str, reference: Reference
) -> None:
    prompt = random_tokens(60, seed=301)
    body = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=12, temperature=0, logprobs=3, extra_body=body
    )
    [choice] = answer.choices
    assert choice.model_extra is not None
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.finish_reason == "length"
    mismatch = reference.greedy(prompt, 12).mismatch(
        choice.model_extra["token_ids"],
        [float(each) for each in choice.logprobs.token_logprobs if each is not None],
        reference.tolerance,
    )
    assert mismatch is None
    assert choice.logprobs.top_logprobs is not None
    assert all(3 <= len(top) <= 4 for top in choice.logprobs.top_logprobs if top is not None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (60, 12, 72)


def test_completion_when_streamed_with_usage_then_ends_with_the_same_text_and_counts(
    client: openai.OpenAI, model: str
) -> None:
    prompt = "The quick brown fox jumps over the lazy dog and"
    whole = client.completions.create(model=model, prompt=prompt, max_tokens=16, **GREEDY)
    stream = client.completions.create(
        model=model, prompt=prompt, max_tokens=16, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 16)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_list_of_prompts_with_n_when_completed_then_has_numbered_choices_in_order(
    client: openai.OpenAI, model: str
) -> None:
    prompts = [random_tokens(20, seed=302), random_tokens(33, seed=303)]
    alone = [client.completions.create(model=model, prompt=each, max_tokens=6, **GREEDY) for each in prompts]
    answer = client.completions.create(model=model, prompt=prompts, n=2, max_tokens=6, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [alone[0].choices[0].text] * 2 + [alone[1].choices[0].text] * 2
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (53, 24)


def test_chat_when_streamed_then_is_the_whole_answer_in_pieces(client: openai.OpenAI, model: str) -> None:
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "What is a socket?"}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=20, **GREEDY)
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=20, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert whole.choices[0].message.role == "assistant"
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_chat_with_n_and_logprobs_when_sampled_then_gives_different_choices_with_first_token_logprobs(
    client: openai.OpenAI, model: str
) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Say anything."}],
        n=3,
        seed=7,
        temperature=1.0,
        max_completion_tokens=12,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 12
        assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


@pytest.mark.parametrize("stream", [False, True])
def test_bad_field_when_sent_then_client_raises_bad_request(client: openai.OpenAI, model: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="a", temperature=3, stream=stream)
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_value"
    assert caught.value.type == "invalid_request_error"
    assert "temperature must be" in caught.value.message


def test_unknown_model_when_asked_then_client_raises_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "a"}])
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id is not None


@pytest.mark.asyncio
async def test_asynchronous_client_when_it_leaves_a_stream_then_later_answers_are_right(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="unused", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        first = await client.completions.create(model=model, prompt="async def main", max_tokens=8, **GREEDY)
        stream = await client.completions.create(
            model=model, prompt="async def main", max_tokens=2000, stream=True, **GREEDY
        )
        pieces = []
        async with stream:
            async for chunk in stream:
                pieces.append(chunk.choices[0].text)
                if len("".join(pieces)) >= len(first.choices[0].text):
                    break
        assert "".join(pieces).startswith(first.choices[0].text.rstrip("�"))
