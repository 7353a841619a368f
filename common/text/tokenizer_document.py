"""How a node tells others to make its token ids and key chains: ``GET /internal/v1/tokenizer``.

1 the node takes its tokenizer apart (``common.node.routes.tokenizer_route``) and adds *probes*: texts and chats with
the ids that its own tokenizer makes of them, 2 the reader rebuilds a tokenizer from the parts, 3 it must reproduce
every probe, else it leaves tokenising to the nodes. The key chain's parameters hold with or without a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as Backend

from common.errors import InvalidRequestError
from common.images.rules import ImageRules
from common.openai.protocol import ChatRequest, parse_chat
from common.text.answers.detection import AUTO, Overrides
from common.text.light_tokenizer import LightTokenizer
from common.text.tokenizer import TextCodec
from common.wire.fields import Fields
from common.wire.routes import TOKENIZER_ROUTE

# Texts and chats whose token ids both sides compare: blanks, accents, other scripts, code, names of special tokens.
PROBE_TEXTS = (
    "Hello, world!  How are you?",
    " leading and trailing ",
    "",
    "line one\nline two\r\n\n\tindented\t\t2024-01-31 3.14159 1e-9",
    "naïve café Ångström ﬁ Ｆｕｌｌ e\u0301 \u00e9",  # noqa: RUF001 - what normalisers change
    "日本語のテキスト 中文 한국어 العربية हिन्दी ไทย",
    "👩‍👩‍👧 🏳️‍🌈 \U000f0000 \u200b\ufeff",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # <|not_special|>",
    "<s></s><|end|><|im_start|>user<|eot_id|><pad><unk>[INST] [/INST]",
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'What the weather is "like" <there> & when',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
_SYSTEM = {"role": "system", "content": "You are brief."}
_USER = {"role": "user", "content": "What is the weather?  \nTell me, naïve 日本!"}
_ANSWER = {"role": "assistant", "content": " Sunny. "}
PROBE_CHATS: tuple[Mapping[str, Any], ...] = (
    {"messages": [_USER]},
    {"messages": [_SYSTEM, _USER]},
    {"messages": [_SYSTEM, _USER, _ANSWER, {"role": "user", "content": "<|end|> And tomorrow?"}]},
    {"messages": [_USER], "add_generation_prompt": False},
    {"messages": [_USER, _ANSWER], "continue_final_message": True},
    {"messages": [_USER, {**_ANSWER, "reasoning_content": "clouds?"}, _USER]},
    {"messages": [_SYSTEM, _USER], "tools": [_TOOL]},
    {
        "messages": [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "{\"sky\": \"blue\"}", "tool_call_id": "call_1"},
        ],
        "tools": [_TOOL],
    },
    {"messages": [_ANSWER, _ANSWER]},
    {"messages": [{"role": "user", "content": [_IMAGE, {"type": "text", "text": "And it?"}, _IMAGE]}, _ANSWER, _USER]},
)  # fmt: skip


class UnusableTokenizerError(ValueError):
    """A node's tokenizer cannot be made here, or makes other ids here than there."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a ``LightTokenizer`` is made of, and how the original answers the probes.

    Attributes:
        text_ids: for each of PROBE_TEXTS the ids with special tokens, then those without.
        chat_ids: for each of PROBE_CHATS the ids, None where the template refuses it.
    """

    tokenizer_json: str
    chat_template: str | None
    tool_template: str | None
    special_tokens: Mapping[str, str]
    special_ids: tuple[int, ...]
    split_special_tokens: bool
    answers: Overrides
    text_ids: tuple[tuple[int, ...], ...]
    chat_ids: tuple[tuple[int, ...] | None, ...]

    def create_tokenizer(self) -> LightTokenizer:
        return LightTokenizer(
            self.tokenizer_json,
            chat_template=self.chat_template,
            tool_template=self.tool_template,
            special_tokens=self.special_tokens,
            special_ids=self.special_ids,
            split_special_tokens=self.split_special_tokens,
        )


@dataclass(frozen=True, slots=True)
class TokenizerDocument:
    """The route's answer.

    Attributes:
        fingerprint: the node's, as in its info.
        root_key, block_size: of the key chain (``common.kv_cache.keys``).
        keeps_boundaries: the node keeps states at semantic boundaries, so it wants to know them.
        parts: None when the tokenizer cannot be taken apart, for ``reason``.
        image_rules: as of ``TextCodec``.
    """

    fingerprint: str
    root_key: bytes
    block_size: int
    vocab_size: int
    max_model_len: int
    keeps_boundaries: bool
    parts: TokenizerParts | None = None
    reason: str | None = None
    image_rules: ImageRules | str = "it is a model of text"

    def to_json(self) -> dict[str, Any]:
        parts = self.parts
        return {
            "fingerprint": self.fingerprint,
            "root_key": self.root_key.hex(),
            "block_size": self.block_size,
            "vocab_size": self.vocab_size,
            "max_model_len": self.max_model_len,
            "keeps_boundaries": self.keeps_boundaries,
            "reason": self.reason,
            "images": self.image_rules if isinstance(self.image_rules, str) else self.image_rules.to_json(),
            "tokenizer": None
            if parts is None
            else {
                "tokenizer_json": parts.tokenizer_json,
                "chat_template": parts.chat_template,
                "tool_template": parts.tool_template,
                "special_tokens": dict(parts.special_tokens),
                "special_ids": parts.special_ids,
                "split_special_tokens": parts.split_special_tokens,
                "tool_call_parser": parts.answers.tools,
                "reasoning_parser": parts.answers.reasoning,
                "text_ids": parts.text_ids,
                "chat_ids": parts.chat_ids,
            },
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> TokenizerDocument:
        """Raises UnusableTokenizerError for a body that is no such document."""
        try:
            return cls._read(body)
        except (InvalidRequestError, TypeError, ValueError, AttributeError, LookupError) as exc:
            raise UnusableTokenizerError(f"{TOKENIZER_ROUTE} answers what cannot be read: {exc}") from exc

    @classmethod
    def _read(cls, body: Mapping[str, Any]) -> TokenizerDocument:
        fields = Fields(body)
        block_size, vocab_size = fields.integer("block_size", ge=1), fields.integer("vocab_size", ge=1)
        max_model_len, fingerprint = fields.integer("max_model_len", ge=1), fields.string("fingerprint")
        if block_size is None or vocab_size is None or max_model_len is None or fingerprint is None:
            raise ValueError("block_size, vocab_size, max_model_len and fingerprint are required")
        raw, images = body.get("tokenizer"), body.get("images")
        return cls(
            fingerprint=fingerprint,
            root_key=bytes.fromhex(body["root_key"]),
            block_size=block_size,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            keeps_boundaries=fields.boolean("keeps_boundaries"),
            parts=_read_parts(raw) if isinstance(raw, Mapping) else None,
            reason=fields.string("reason"),
            image_rules=ImageRules.from_json(images) if isinstance(images, Mapping) else str(images),
        )


def _read_parts(raw: Mapping[str, Any]) -> TokenizerParts:
    fields = Fields(raw, prefix="tokenizer.")
    tokenizer_json = fields.string("tokenizer_json")
    if tokenizer_json is None:
        raise ValueError("tokenizer.tokenizer_json is required")
    return TokenizerParts(
        tokenizer_json=tokenizer_json,
        chat_template=fields.string("chat_template"),
        tool_template=fields.string("tool_template"),
        special_tokens=MappingProxyType({str(k): str(v) for k, v in (fields.mapping("special_tokens") or {}).items()}),
        special_ids=tuple(int(token_id) for token_id in raw["special_ids"]),
        split_special_tokens=fields.boolean("split_special_tokens"),
        answers=Overrides(fields.string("tool_call_parser") or AUTO, fields.string("reasoning_parser") or AUTO),
        text_ids=tuple(tuple(map(int, ids)) for ids in raw["text_ids"]),
        chat_ids=tuple(None if ids is None else tuple(map(int, ids)) for ids in raw["chat_ids"]),
    )


# --- probes -----------------------------------------------------------------------------------------------------------


def probe_texts(codec: TextCodec) -> tuple[tuple[int, ...], ...]:
    """``TokenizerParts.text_ids`` of a codec."""
    return tuple(
        tuple(codec.encode(text, add_special_tokens=special)) for text in PROBE_TEXTS for special in (True, False)
    )


def probe_chats(codec: TextCodec) -> tuple[tuple[int, ...] | None, ...]:
    """``TokenizerParts.chat_ids`` of a codec."""
    return tuple(_chat_ids(codec, parse_chat(body)) for body in PROBE_CHATS)


def _chat_ids(codec: TextCodec, request: ChatRequest) -> tuple[int, ...] | None:
    try:
        return tuple(codec.encode_chat(request))
    except InvalidRequestError:
        return None


def plain_backend(tokenizer: Any) -> Backend | None:
    """The ``tokenizers`` object that a transformers tokenizer is a plain wrapper round, by its answers to the probes;
    None when it is more."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        return None
    for text in PROBE_TEXTS:
        for special in (True, False):
            ids = list(tokenizer.encode(text, add_special_tokens=special))
            [encoding] = backend.encode_batch_fast([text], add_special_tokens=special)
            [decoded] = backend.decode_batch([ids], skip_special_tokens=special)
            if encoding.ids != ids or decoded != tokenizer.decode(ids, skip_special_tokens=special):
                return None
    return backend


def create_codec(document: TokenizerDocument) -> TextCodec:
    """A codec that makes the node's own ids; blocks, for seconds with a large vocabulary.

    Raises:
        UnusableTokenizerError: there is no tokenizer, it cannot be made here, or it fails a probe.
    """
    parts = document.parts
    if parts is None:
        raise UnusableTokenizerError(document.reason or "the node has no tokenizer")
    try:
        codec = TextCodec(
            parts.create_tokenizer(),
            vocab_size=document.vocab_size,
            max_model_len=document.max_model_len,
            answers=parts.answers,
            image_rules=document.image_rules,
        )
        text_ids, chat_ids = probe_texts(codec), probe_chats(codec)
    # Two libraries read content that they did not make: whatever they raise, the nodes tokenise.
    except Exception as exc:
        raise UnusableTokenizerError(f"its tokenizer cannot be made here: {type(exc).__name__}: {exc}") from exc
    _compare("text", PROBE_TEXTS, parts.text_ids, text_ids, per_probe=2)
    _compare("chat", PROBE_CHATS, parts.chat_ids, chat_ids, per_probe=1)
    return codec


def _compare(
    kind: str, probes: Sequence[object], theirs: Sequence[object], ours: Sequence[object], per_probe: int
) -> None:
    if len(theirs) != len(ours):
        raise UnusableTokenizerError(f"its {kind} probes are {len(theirs)}, here they are {len(ours)}")
    for index, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if their != our:
            number = index // per_probe
            raise UnusableTokenizerError(f"{kind} probe {number} of {len(probes)} gives other token ids here")
