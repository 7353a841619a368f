"""Texts that cannot fit are refused before they cost anything, and long ones do not hold the interpreter's lock."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import ContextLengthError, InvalidRequestError
from common.openai.bodies import values
from common.openai.protocol import parse_chat, parse_completion
from common.text.tokenizer import MAX_CHARS_PER_TOKEN, PIECE_CHARS, TextCodec
from common.text.tokenizer_document import PROBE_TEXTS, plain_backend
from tests.unit.text.vocabulary import train_byte_level


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_byte_level()


def test_text_when_it_has_too_many_characters_for_the_context_then_refused_untokenised(tokenizer: Any) -> None:
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer), max_model_len=10)
    most = "a" * (10 * MAX_CHARS_PER_TOKEN)
    assert codec.encode_prompt(most)
    chat = parse_chat({"messages": [{"role": "user", "content": most}]})
    for ask, param, num_chars in (
        (lambda: codec.encode_prompt(most + "a"), "prompt", "321"),
        (lambda: codec.encode_chat(chat), "messages", r"\d+"),
    ):
        words = (
            r"This model's maximum context length is 10 tokens\. However, "
            rf"{param} has at least \d+ tokens \({num_chars} characters, at most 32 in each\)\."
        )
        with pytest.raises(InvalidRequestError, match=words) as refused:
            ask()
        assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")
        assert refused.value.overflow is not None
        assert refused.value.overflow.num_prompt_tokens > 10
        assert ContextLengthError.read(str(refused.value)) == refused.value.overflow


def test_text_when_its_tokens_pass_the_context_then_no_more_of_it_is_tokenised_than_shows_it(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer), max_model_len=50_000)
    seen: list[int] = []
    encode = TextCodec.encode

    def watched(self: TextCodec, text: str, *, add_special_tokens: bool = True) -> list[int]:
        seen.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextCodec, "encode", watched)
    words = r"This model's maximum context length is 50000 tokens\. However, prompt has at least (\d+) tokens where "
    with pytest.raises(InvalidRequestError, match=words) as refused:
        codec.encode_prompt("zq" * (8 * PIECE_CHARS))
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.overflow is not None
    assert refused.value.overflow.num_prompt_tokens > refused.value.overflow.max_model_len == 50_000
    assert ContextLengthError.read(str(refused.value)) == refused.value.overflow
    assert seen == [PIECE_CHARS]


def test_texts_when_they_have_too_many_tokens_together_then_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer))
    monkeypatch.setattr(values, "MAX_TOKENS_TOGETHER", 7)
    assert codec.encode_prompts(parse_completion({"prompt": [[1, 2, 3], [4, 5], [6, 7]]})) == [
        [1, 2, 3],
        [4, 5],
        [6, 7],
    ]
    request = parse_completion({"prompt": "as many as follow"})
    with pytest.raises(InvalidRequestError, match="2 prompts must have at most 7 tokens together, got 8") as refused:
        codec.encode_prompts(request, [(1, 2, 3), (4, 5, 6, 7, 8), (9,)])
    assert refused.value.param == "prompt"


def test_backend_when_the_tokenizer_is_a_plain_wrapper_then_it_makes_the_same_of_texts(tokenizer: Any) -> None:
    backend = plain_backend(tokenizer)
    assert backend is not None
    slow, fast = (TextCodec(tokenizer, vocab_size=len(tokenizer), backend=each) for each in (None, backend))
    for text in PROBE_TEXTS:
        ids = slow.encode(text)
        assert fast.encode(text) == ids
        assert fast.decode(ids) == slow.decode(ids)


def test_backend_when_the_tokenizer_does_more_than_wrap_then_it_is_not_used(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **options: encode(text.lower(), **options), raising=False)
    assert plain_backend(tokenizer) is None
    assert plain_backend(object()) is None
