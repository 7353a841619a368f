from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from common.errors import InvalidRequestError
from common.models.synthetic import build_tokenizer
from common.node.routes.tokenizer_route import take_apart
from common.openai.protocol import parse_chat, parse_completion
from common.text.tokenizer import TextCodec
from tests.support.chat_templates import TEMPLATES
from tests.unit.text.vocabulary import EOS, byte_fallback

FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer, vocab_size=len(tokenizer) + 8)


def chat(content: str = "hello", role: str = "user", **fields: Any) -> Any:
    return parse_chat({"messages": [{"role": role, "content": content}], **fields})


def test_chat_is_rendered_through_the_template(codec: TextCodec) -> None:
    assert codec.decode(codec.encode_chat(chat())) == "<user>hello<assistant>"
    assert codec.decode(codec.encode_chat(chat(add_generation_prompt=False))) == "<user>hello"
    styled = chat(chat_template_kwargs={"style": "terse"}, tools=[FUNCTION])
    assert codec.decode(codec.encode_chat(styled)) == f"<user>hello{json.dumps([FUNCTION])}terse<assistant>"


def test_chat_when_special_tokens_or_documents_are_asked_for_then_has_them(tokenizer: Any) -> None:
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer), trusts_templates=True)
    template = "{% for each in documents %}[{{ each.text }}]{% endfor %}{{ messages[0].content }}"
    asked = chat(chat_template=template, documents=[{"text": "a"}, {"text": "b"}])
    assert codec.decode(codec.encode_chat(asked)) == "[a][b]hello"
    plain, special = (codec.encode_chat(chat(add_special_tokens=each)) for each in (None, True))
    assert special == codec.encode(codec.decode(plain), add_special_tokens=True)


def test_template_of_a_request_when_requests_are_not_trusted_then_is_refused(codec: TextCodec) -> None:
    with pytest.raises(InvalidRequestError, match="--trust-request-chat-template") as refused:
        codec.encode_chat(chat(chat_template="x"))
    assert refused.value.param == "chat_template"


@pytest.mark.parametrize(
    ("most", "max_tokens", "expected"), [(2, None, 2), (-1, None, 9), (-1, 6, 4), (50, None, None)]
)
def test_prompt_when_longer_than_asked_for_then_is_cut(
    tokenizer: Any, most: int, max_tokens: int | None, expected: int | None
) -> None:
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer), max_model_len=10)
    ids = list(range(20, 50))
    for side in ("left", "right"):
        fields = {"truncate_prompt_tokens": most, "max_tokens": max_tokens, "truncation_side": side}
        request = parse_completion({"prompt": ids, **fields})
        if expected is None:
            with pytest.raises(InvalidRequestError, match="context of 10"):
                codec.encode_prompts(request)
            continue
        [cut] = codec.encode_prompts(request)
        assert cut == (ids[-expected:] if side == "left" else ids[:expected])
        assert codec.encode_prompts(parse_completion({"prompt": codec.decode(ids), **fields}))[0] != []


def test_special_tokens_of_a_text_when_not_asked_for_then_are_left_out(sentencepiece: Any) -> None:
    codec = TextCodec(sentencepiece, vocab_size=len(sentencepiece))
    for special in (True, False):
        request = parse_completion({"prompt": "world", "add_special_tokens": special})
        assert codec.encode_prompts(request) == [codec.encode("world", add_special_tokens=special)]


def test_developer_when_the_template_does_not_name_it_then_is_the_system() -> None:
    chats = [chat("brief", role, tools=tools) for tools in ([], [FUNCTION]) for role in ("system", "developer")]
    for name in ("'developer'", '"developer"', ""):
        tokenizer = build_tokenizer(300, 1000)
        branch = f"{{% if message.role == {name} %}}as told: {{% endif %}}" if name else "{# the app's developer #}"
        tokenizer.chat_template = f"{{% for message in messages %}}{branch}[{{{{ message.role }}}}]{{% endfor %}}"
        codec = TextCodec(tokenizer, vocab_size=len(tokenizer))
        parts = take_apart(codec)
        for each in (codec, TextCodec(parts.create_tokenizer(), vocab_size=len(tokenizer))):
            system, developer, *others = map(each.encode_chat, chats)
            assert [system, developer] == others
            assert each.decode(system) == "[system]"
            assert each.decode(developer) == ("as told: [developer]" if name else "[system]")


def _refusing(condition: str) -> str:
    """A template that takes no system message where ``condition`` holds, and no conversation without a user."""
    return (
        f"{{%- for m in messages -%}}{{%- if m.role == 'system' and {condition} -%}}"
        "{{- raise_exception('no system message here') -}}{%- endif -%}"
        "{{- '[' + m.role + ':' + m.content + ']' -}}{%- endfor -%}"
        "{%- if not messages | selectattr('role', 'equalto', 'user') | list -%}"
        "{{- raise_exception('no user') -}}{%- endif -%}"
    )


@pytest.mark.parametrize(
    ("condition", "roles", "expected"),
    [
        ("not loop.first", "sdus", "[system:0\n1][user:2][user:3]"),
        ("not loop.first", "sdu", "[system:0\n1][user:2]"),
        ("not loop.first", "sus", "[system:0][user:1][user:2]"),
        ("not loop.first", "us", "[user:0][user:1]"),
        ("not loop.first and loop.previtem.role != 'system'", "sdus", "[system:0][system:1][user:2][user:3]"),
        ("false", "sdus", "[system:0][system:1][user:2][system:3]"),
        ("true", "su", None),
        ("not loop.first", "ss", None),
    ],
)
def test_system_messages_when_the_template_refuses_them_then_are_joined_or_the_users(
    condition: str, roles: str, expected: str | None
) -> None:
    tokenizer = build_tokenizer(300, 1000)
    tokenizer.chat_template = _refusing(condition)
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer))
    names = {"s": "system", "d": "developer", "u": "user"}
    request = parse_chat({"messages": [{"role": names[each], "content": str(i)} for i, each in enumerate(roles)]})
    for each in (codec, TextCodec(take_apart(codec).create_tokenizer(), vocab_size=len(tokenizer))):
        if expected is not None:
            assert each.decode(each.encode_chat(request)) == expected
            continue
        with pytest.raises(InvalidRequestError, match="no system message here"):  # the first refusal
            each.encode_chat(request)


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


def test_piece_of_several_blanks_when_the_decoder_strips_one_then_has_all() -> None:
    tokenizer = byte_fallback()
    tokenizer.add_tokens(["\u2581\u2581\u2581"])
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer))
    blanks = tokenizer.convert_tokens_to_ids("\u2581\u2581\u2581")
    assert codec.piece(blanks).data == b"   "
    assert codec.piece(blanks).num_chars == 3


def test_thinking_budget_when_the_tokenizer_has_more_tokens_than_the_model_then_names_none_of_them() -> None:
    tokenizer = build_tokenizer(300, 1000)
    tokenizer.chat_template = TEMPLATES["hermes_thinking"]
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("<one>", "<two>")])
    budget = TextCodec(tokenizer, vocab_size=301).thinking_budget(5)
    assert budget is not None
    assert max(budget.special_ids) == 300
