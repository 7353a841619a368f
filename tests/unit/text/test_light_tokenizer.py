"""The rebuilt tokenizer gives the ids and the texts of the one it was taken from."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.errors import InvalidRequestError
from common.node.routes.tokenizer_route import take_apart
from common.openai.protocol import ChatRequest, parse_chat
from common.text.tokenizer import TextCodec
from common.text.tokenizer_document import (
    PROBE_CHATS,
    PROBE_TEXTS,
    TokenizerDocument,
    UnusableTokenizerError,
    create_codec,
)
from tests.support.models import FAMILIES, checkpoint
from tests.unit.text.vocabulary import CORPUS, byte_fallback, train_byte_level

CHATML = """{%- macro head(role) %}<|im_start|>{{ role }}
{% endmacro -%}
{%- set ns = namespace(last=-1, seen=false) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- head('system') }}Tools (today is {{ strftime_now('%Y') }}):
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.index0 > 0 %}{{ raise_exception('system comes first') }}{% endif %}
    {%- if message.content is not defined and not message.tool_calls %}{% continue %}{% endif %}
    {{- head(message.role) }}
    {%- if message.reasoning_content and loop.index0 > ns.last %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {% generation %}{{- message.content | default('') | trim }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {{- '<call>' + (call.function | tojson(indent=2)) + '</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{%- if enable_thinking is defined and not enable_thinking %}
<think></think>{% endif %}{% endif %}"""
WITH_BOS = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def with_post_processor() -> PreTrainedTokenizerFast:
    """A normaliser, added tokens that strip, a token put before every text, two named templates."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = {"default": WITH_BOS, "tool_use": CHATML}
    return made


def chatml() -> PreTrainedTokenizerFast:
    made = train_byte_level()
    made.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    made.add_tokens(["<think>", "</think>"])
    made.chat_template = CHATML
    return made


def words() -> PreTrainedTokenizerFast:
    """Lower-casing WordPiece that cleans its text and truncates, without a template."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "hello": 1, "##o": 2, "w": 3, "##orld": 4}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def of_checkpoint(family: str) -> Callable[[], Any]:
    return lambda: AutoTokenizer.from_pretrained(checkpoint(family))


SHORT = ("demo", "granitemoehybrid")
KINDS: dict[str, Callable[[], Any]] = {
    "byte_level": train_byte_level,
    "byte_fallback": byte_fallback,
    "post_processor": with_post_processor,
    "chatml": chatml,
    "words": words,
    **{family: of_checkpoint(family) for family in ("demo", *FAMILIES)},
}
CASES = [pytest.param(name, marks=() if name not in FAMILIES or name in SHORT else pytest.mark.full) for name in KINDS]


def document_of(tokenizer: Any, **fields: Any) -> TokenizerDocument:
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer) + 8)
    document = TokenizerDocument("f", b"root", 16, codec.vocab_size, 4096, True, parts=take_apart(codec))
    return TokenizerDocument.from_json(json.loads(json.dumps(document.to_json())))


def texts() -> Iterator[str]:
    yield from PROBE_TEXTS
    rng = random.Random(7)
    alphabet = "aabcde  ,.\n\t'\"<>|/[]{}0189éßÅ日本語한🙂👩‍👧\u0301\u200b\ufb01\uff21\uff22" + "".join(CORPUS)[:80]
    specials = ("<|end|>", "<|user|>", "<s>", "</s>", "<|im_start|>", " <think> ", "  ")
    for _ in range(150):
        parts = ["".join(rng.choices(alphabet, k=rng.randint(0, 60))), rng.choice(specials), rng.choice(CORPUS)[:30]]
        rng.shuffle(parts)
        yield "".join(parts[: rng.randint(1, 3)])


def chats() -> Iterator[ChatRequest]:
    yield from map(parse_chat, PROBE_CHATS)
    rng = random.Random(8)
    some = [text for text in texts() if text]
    for _ in range(80):
        messages: list[dict[str, Any]] = [{"role": "system", "content": rng.choice(some)}] * rng.randint(0, 1)
        for role in ("user", "assistant") * rng.randint(1, 3):
            messages.append({"role": role, "content": rng.choice(some)})
            if role == "assistant" and rng.random() < 0.4:
                messages[-1][rng.choice(["reasoning_content", "thinking", "reasoning"])] = rng.choice(some)
        body: dict[str, Any] = {"messages": messages[: rng.randint(1, len(messages))]}
        kind = rng.random()
        if kind < 0.2:
            body |= {"add_generation_prompt": False}
        elif kind < 0.4 and body["messages"][-1]["role"] == "assistant":
            body |= {"continue_final_message": True}
        if rng.random() < 0.3:
            body["tools"] = [{"type": "function", "function": {"name": rng.choice(some), "z": [1, None, {"ä": 2.5}]}}]
        if rng.random() < 0.3:
            body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5, "style": "x"}
        yield parse_chat(body)


def outcome(codec: TextCodec, request: ChatRequest) -> tuple[object, object]:
    try:
        token_ids = codec.encode_chat(request)
    except InvalidRequestError:
        return "refused", None
    return token_ids, codec.chat_boundaries(request, token_ids)


@pytest.mark.parametrize("kind", CASES)
def test_rebuilt_tokenizer_gives_the_originals_ids_boundaries_and_texts(kind: str) -> None:
    original = KINDS[kind]()
    theirs = TextCodec(original, vocab_size=len(original) + 8)
    ours = create_codec(document_of(original))
    assert len(ours.tokenizer) == len(original)
    for text in texts():
        for special in (True, False):
            token_ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == token_ids
            if kind != "words":  # which cleans the spaces of what it decodes
                assert ours.decode(token_ids, skip_special_tokens=special) == theirs.decode(
                    token_ids, skip_special_tokens=special
                )
    outcomes = [outcome(theirs, request) for request in chats()]
    assert [outcome(ours, request) for request in chats()] == outcomes
    if original.chat_template is not None:
        assert sum(token_ids != "refused" for token_ids, _ in outcomes) > 40
        assert sum(bool(boundaries) for _, boundaries in outcomes) > 20


def test_special_tokens_when_the_tokenizer_json_alone_has_them_then_both_sides_know_them() -> None:
    original = chatml()
    starts, ends = original.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    theirs, ours = TextCodec(original, vocab_size=len(original)), create_codec(document_of(original))
    assert not {starts, ends} & set(original.all_special_ids)
    assert ours.special_ids == theirs.special_ids == {original.eos_token_id, starts, ends}
    for codec in (theirs, ours):
        assert codec.decode([starts, *codec.encode("a"), ends], skip_special_tokens=True) == "a"
        assert codec.piece(ends).is_special
        assert not codec.piece(*codec.encode("<think>")).is_special


def test_run_of_bytes_when_its_last_character_is_cut_then_both_sides_have_the_others() -> None:
    original = byte_fallback()
    theirs, ours = TextCodec(original, vocab_size=len(original)), create_codec(document_of(original))
    token_ids = theirs.encode("\u20ac\u20ac")[:-1]
    assert theirs.decode(token_ids) == ours.decode(token_ids) == "\u20ac\ufffd"


def test_template_that_may_not_then_neither_renders() -> None:
    made = train_byte_level()
    for template in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}",
        "{% set ns = namespace(_a=1) %}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}",
        "{{ dict.__init__ }}{{ namespace.__init__.__globals__ }}",
        "{{ missing.field }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ):
        made.chat_template = template
        request = parse_chat({"messages": [{"role": "user", "content": "a"}]})
        theirs, ours = TextCodec(made, vocab_size=500), create_codec(document_of(made))
        assert outcome(ours, request)[0] == outcome(theirs, request)[0] == "refused", template


def test_template_argument_that_transformers_takes_itself_is_refused() -> None:
    made = train_byte_level()
    theirs, ours = TextCodec(made, vocab_size=500), create_codec(document_of(made))
    for name in ("conversations", "self", "conversation"):
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: "x"}}
        assert outcome(theirs, parse_chat(body))[0] == outcome(ours, parse_chat(body))[0] == "refused"


def test_documents_when_a_chat_has_some_then_both_render_them() -> None:
    made = train_byte_level()
    made.chat_template = (
        "{% for each in documents or [] %}[{{ each.title }}: {{ each.text }}]{% endfor %}{{ messages[0].content }}"
    )
    theirs, ours = TextCodec(made, vocab_size=500), create_codec(document_of(made))
    body = {"messages": [{"role": "user", "content": "hello"}]}
    documents = [{"title": "a", "text": "x"}, {"title": "b", "text": "y"}]
    for codec in (theirs, ours):
        assert codec.decode(codec.encode_chat(parse_chat({**body, "documents": documents}))) == "[a: x][b: y]hello"
        assert codec.decode(codec.encode_chat(parse_chat(body))) == "hello"


# --- what cannot be rebuilt is not used -------------------------------------------------------------------------------


class Slow:
    """A tokenizer that is no wrapper round a tokenizer.json."""

    all_special_ids = ()


def test_tokenizer_without_a_tokenizer_json_is_not_taken_apart() -> None:
    with pytest.raises(UnusableTokenizerError, match=r"Slow is not made of a tokenizer\.json"):
        take_apart(TextCodec(Slow(), vocab_size=5))  # type: ignore[arg-type]


def test_templates_without_a_default_are_not_taken_apart() -> None:
    made = train_byte_level()
    made.chat_template = {"one": "x", "tool_use": "y"}
    with pytest.raises(UnusableTokenizerError, match="no default"):
        take_apart(TextCodec(made, vocab_size=500))


class Shouting(PreTrainedTokenizerFast):
    """A class that does more than its tokenizer.json says."""

    def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        return super().encode(text.upper(), *args, **kwargs)


def test_tokenizer_whose_class_does_more_fails_its_probes() -> None:
    made = train_byte_level()
    made.__class__ = Shouting
    with pytest.raises(UnusableTokenizerError, match="text probe 0"):
        create_codec(document_of(made))


def broken(document: TokenizerDocument, **parts: Any) -> TokenizerDocument:
    assert document.parts is not None
    return dataclasses.replace(document, parts=dataclasses.replace(document.parts, **parts))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"tokenizer_json": "{}"}, "cannot be made here"),
        ({"chat_template": "{% if %}"}, "cannot be made here: TemplateSyntaxError"),
        ({"chat_template": "{{ messages[0].content }}"}, "chat probe 0"),
        ({"chat_ids": ()}, "chat probes are 0"),
        ({"special_tokens": {}}, "chat probe"),
        ({"split_special_tokens": True}, "text probe"),
    ],
)
def test_document_that_says_something_else_is_not_used(parts: dict[str, Any], message: str) -> None:
    made = with_post_processor()
    made.chat_template = WITH_BOS
    with pytest.raises(UnusableTokenizerError, match=message):
        create_codec(broken(document_of(made), **parts))


def test_document_without_a_tokenizer_says_why() -> None:
    document = TokenizerDocument("f", b"root", 16, 5, 4096, True, reason="the model has no tokenizer")
    with pytest.raises(UnusableTokenizerError, match="the model has no tokenizer"):
        create_codec(TokenizerDocument.from_json(document.to_json()))


SIZES = {"fingerprint": "f", "block_size": 1, "vocab_size": 1, "max_model_len": 1}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {**SIZES, "block_size": 0, "root_key": "ab"},
        {**SIZES, "root_key": "xyz"},
        SIZES,
        {**SIZES, "root_key": "ab", "tokenizer": {}},
        {**SIZES, "root_key": "ab", "tokenizer": {"tokenizer_json": "a"}},
    ],
)
def test_answer_that_is_no_document_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(UnusableTokenizerError):
        TokenizerDocument.from_json(body)
