from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.openai.protocol import parse_chat
from common.text.tokenizer import TextCodec
from tests.unit.text.vocabulary import EOS


@pytest.fixture
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer, vocab_size=len(tokenizer) + 8)


def chat(content: str = "hello", role: str = "user", **fields: Any) -> Any:
    return parse_chat({"messages": [{"role": role, "content": content}], **fields})


def test_chat_is_rendered_through_the_template(codec: TextCodec) -> None:
    assert codec.decode(codec.encode_chat(chat())) == "<user>hello<assistant>"
    assert codec.decode(codec.encode_chat(chat(add_generation_prompt=False))) == "<user>hello"
    styled = chat(chat_template_kwargs={"style": "terse"}, tools=[{"a": 1}])
    assert codec.decode(codec.encode_chat(styled)) == '<user>hello[{"a": 1}]terse<assistant>'


def test_template_that_refuses_is_the_requests_fault(codec: TextCodec) -> None:
    with pytest.raises(InvalidRequestError, match="no tools") as caught:
        codec.encode_chat(chat(role="tool"))
    assert caught.value.param == "messages"


def test_model_without_template_refuses_chat(sentencepiece: Any) -> None:
    with pytest.raises(InvalidRequestError, match="template"):
        TextCodec(sentencepiece, vocab_size=300).encode_chat(chat())


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "return_tensors", "tools", "max_length"])
def test_reserved_template_argument_is_refused(codec: TextCodec, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        codec.encode_chat(chat(chat_template_kwargs={name: "x"}))
    assert caught.value.param == "chat_template_kwargs"


def test_prompt_ids_are_bounded_by_the_models_vocabulary(codec: TextCodec) -> None:
    assert codec.encode_prompt((1, 2)) == [1, 2]
    assert codec.decode(codec.encode_prompt("hello é")) == "hello é"
    with pytest.raises(InvalidRequestError, match=str(codec.vocab_size)):
        codec.encode_prompt((codec.vocab_size,))


def test_pieces_of_a_split_character_have_its_bytes_and_one_char(codec: TextCodec) -> None:
    pieces = codec.pieces(codec.encode("a😀é"))
    assert b"".join(piece.data for piece in pieces).decode() == "a😀é"
    assert sum(piece.num_chars for piece in pieces) == 3
    assert pieces[1].text == "bytes:\\xf0"


def test_piece_of_a_special_unknown_and_byte_token(codec: TextCodec, tokenizer: Any, sentencepiece: Any) -> None:
    end = codec.piece(tokenizer.eos_token_id)
    assert (end.text, end.is_special) == (EOS, True)
    assert codec.piece(len(tokenizer) + 3).text == ""
    other = TextCodec(sentencepiece, vocab_size=len(sentencepiece))
    byte, word = sentencepiece.convert_tokens_to_ids(["<0xE2>", "\u2581world"])
    assert other.piece(byte).data == b"\xe2"
    assert other.piece(word).text == " world"
