"""What the API needs of a tokenizer, round a Hugging Face tokenizer object that the caller loaded.

``TextCodec`` is the one place where prompts become token ids: plain text, chat messages through the model's template,
and back for ``/detokenize`` and log-probabilities. It is stateless but for the object it wraps; fast tokenizers may be
called from several threads. Whatever a template raises is the request's fault (400): templates refuse roles and
orders of turns.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from common.errors import ContextLengthError, ContextOverflow, ImageRefusedError, InvalidRequestError
from common.images.rules import ImageRules
from common.openai.bodies.values import Prompt, check_tokens_together
from common.openai.logprobs import TokenPiece
from common.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest, check_token_ids
from common.text.answer_stream import AnswerStream
from common.text.answers.detection import DETECTED, Overrides, detect
from common.text.answers.formats import AnswerFormat, ToolTypes
from common.text.answers.grammar import Budget, Thinking, thinking_of
from common.text.answers.history import call_arguments, with_calls_in_content
from common.text.answers.parser import AnswerParser
from common.text.answers.reader import marker_character
from common.text.boundaries import Conversation, semantic_boundaries
from common.text.byte_runs import ByteRuns, RunDecoder, Vocabulary
from common.text.detokenizer import REPLACEMENT, Decoder, StopStrings, TextStream
from common.text.system_messages import Dialogue, alternatives
from common.wire.fields import shown


class Tokenizer(Vocabulary, Protocol):
    """The methods used of a Hugging Face tokenizer."""

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]: ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any: ...

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str: ...

    def __len__(self) -> int: ...


def special_ids_of(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that ``skip_special_tokens`` leaves out of a text.

    ``all_special_ids`` has those that are named in a configuration; the Rust backend leaves out every added token that
    its ``tokenizer.json`` flags as special, as the markers of calls and of reasoning may be.
    """
    ids = {int(token_id) for token_id in tokenizer.all_special_ids if token_id is not None}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Backend):
        ids |= {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    return frozenset(ids)


# Arguments of apply_chat_template that a client must not set: they change the result's type, its cost, or the template.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
MAX_CHARS_PER_TOKEN = 32
"""Characters per token of the context. A longer text is taken not to fit: tokenising it to find out would cost seconds
and gigabytes."""
USUAL_CHARS_PER_TOKEN = 4
"""Of English in common vocabularies. A text with more of them is counted in pieces first, up to the context's length:
the objects of a whole text's tokens take memory, and the interpreter's lock when they are made and freed."""
PIECE_CHARS = 100_000
"""Characters of one piece: 10 to 50 ms."""
TAIL_TOKENS = (64, 1024, 16_384)
"""Of a prompt, in which the beginning of the assistant's turn is looked for; most have it in the first."""
CUT_TOKENS = 8
"""More tokens than a cut may add to a text."""
_NAMES_DEVELOPER = re.compile(r"""["']developer["']""")
"""In a template's source."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of the GPT-2 byte-level alphabet: printable bytes are themselves, the rest follow from 256
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class TextCodec:
    """Text and chat messages to token ids and back, for one model.

    Args:
        tokenizer: a Hugging Face tokenizer.
        vocab_size: rows of the model's embedding, which may be more than the tokenizer knows.
        max_model_len: the model's context; None: texts of any length are tokenised.
        backend: what ``tokenizer`` is a plain wrapper round, if it is one
            (``common.text.tokenizer_document.plain_backend``): its batches take a third of the time, and release the
            interpreter's lock, so that a long text does not hold up the event loop from a thread.
        trusts_templates: a request may bring a template of its own.
        answers: formats of answers that are named instead of found.
        image_rules: how many tokens an image takes; a text says why the model takes none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int | None = None,
        backend: Backend | None = None,
        trusts_templates: bool = False,
        answers: Overrides = DETECTED,
        image_rules: ImageRules | str = "it is a model of text",
    ) -> None:
        self.tokenizer = tokenizer
        self.image_rules = image_rules
        self.vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._backend = backend
        self._trusts_templates = trusts_templates
        self.answer_overrides = answers
        self.special_ids = special_ids_of(tokenizer)
        runs = ByteRuns(tokenizer, self.special_ids)
        self.decoder: Decoder = RunDecoder(tokenizer, runs)
        """Of ids to text; every text of an answer is made by it."""
        self._whole_decoder = self.decoder if backend is None else RunDecoder(_Batches(backend), runs)
        self._byte_of = _byte_level_alphabet()
        # At most one entry per token of the vocabulary.
        self._pieces: dict[int, TokenPiece] = {}

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How the model's answers are written. Blocks at first, for some milliseconds."""
        return detect(self._render_probe, lambda text: self._single_token(text) is not None, self.answer_overrides)

    def _render_probe(
        self, messages: Sequence[Mapping[str, Any]], *, variables: Mapping[str, Any], **options: Any
    ) -> str | None:
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, return_dict=False, **options, **variables
            )
        except Exception:  # noqa: BLE001  # a template may raise anything about what it does not know
            return None
        return text if isinstance(text, str) else None

    def _single_token(self, text: str) -> int | None:
        ids = self.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and list(self.tokenizer.convert_ids_to_tokens(ids)) == [text] else None

    @cached_property
    def _marker_ids(self) -> dict[str, int]:
        """Markers of the answers' format that are special tokens."""
        tools, reasoning = self.answer_format.tools, self.answer_format.reasoning
        names = (*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ()))
        ids = {name: self._single_token(name) for name in names}
        return {name: token_id for name, token_id in ids.items() if token_id in self.special_ids}

    def marker_id(self, marker: str) -> int | None:
        """The special token of a marker; None where it is text."""
        return self._marker_ids.get(marker)

    def thinking_budget(self, num_tokens: int) -> Budget | None:
        """Of a model that reasons."""
        reasoning = self.answer_format.reasoning
        if reasoning is None:
            return None
        special_ids = {token_id for token_id in self.special_ids if token_id < self.vocab_size}
        return Budget(num_tokens, self._single_token(reasoning.markers[1]), special_ids)

    def thinking_at(self, prompt_token_ids: Sequence[int]) -> Thinking:
        """Whether an answer to the prompt begins inside reasoning."""
        header = self.answer_format.header
        if self.answer_format.reasoning is None:
            return Thinking.ABSENT
        for num_tokens in TAIL_TOKENS:
            text = self.decode(prompt_token_ids[-num_tokens:])
            start = text.rfind(header) if header else 0
            if start >= 0 or num_tokens >= len(prompt_token_ids):
                break
        return thinking_of(text[max(0, start) + len(header) :], self.answer_format)

    def answer_stream(
        self,
        stop: StopStrings,
        *,
        types: ToolTypes | None,
        thinking: Thinking,
        min_tokens: int,
        skip_special_tokens: bool,
        context_token_ids: Sequence[int],
    ) -> AnswerStream:
        """For one answer. ``types``: of the tools that it may call; None: of none."""
        names = self._marker_ids
        characters = {name: marker_character(index) for index, name in enumerate(names)}
        parser = AnswerParser(
            self.answer_format,
            has_tools=types is not None,
            in_reasoning=thinking is Thinking.OPEN,
            types=types or ToolTypes(),
            characters=characters,
        )
        text = TextStream(self.decoder, (), skip_special_tokens, context_token_ids=context_token_ids)
        markers = {token_id: (characters[name], name) for name, token_id in names.items()}
        return AnswerStream(text, parser, markers, stop, min_tokens=min_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""
        if self._backend is not None:
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return ids
        return [int(token_id) for token_id in self.tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def encode_prompt(self, prompt: Prompt, *, add_special_tokens: bool = True, is_cut: bool = False) -> list[int]:
        """Token ids of a completion prompt. ``is_cut``: it may have more than the context holds.

        Raises:
            InvalidRequestError: a given id is not in the vocabulary, or the text has no tokens or is far too long.
        """
        if isinstance(prompt, str):
            self.check_length("prompt", prompt, is_cut=is_cut)
            token_ids = self.encode(prompt, add_special_tokens=add_special_tokens)
            if not token_ids:
                raise InvalidRequestError(f"prompt {shown(prompt)} has no tokens", param="prompt")
            return token_ids
        check_token_ids("prompt", prompt, self.vocab_size)
        return list(prompt)

    def encode_prompts(self, request: CompletionRequest, prompts: Sequence[Prompt] | None = None) -> list[list[int]]:
        """Token ids of each prompt of ``request``, or of ``prompts`` as of its own.

        Raises:
            InvalidRequestError: for one of them, or because they have too many tokens together.
        """
        all_ids: list[list[int]] = []
        num_tokens = 0
        special, is_cut = request.add_special_tokens is not False, request.truncate_prompt_tokens is not None
        for prompt in request.prompts if prompts is None else prompts:
            token_ids = self.encode_prompt(prompt, add_special_tokens=special, is_cut=is_cut)
            all_ids.append(self._cut(request, token_ids))
            num_tokens += len(all_ids[-1])
            check_tokens_together(num_tokens, num_prompts=len(all_ids))
        return all_ids

    def encode_chat(self, request: ChatRequest) -> list[int]:
        """Token ids of a chat request, through the model's template, which writes one placeholder for each image.

        Raises:
            InvalidRequestError: no template, a reserved template argument, the template refused the messages, or what
                it made of them is far too long.
        """
        if request.chat_template is not None and not self._trusts_templates:
            raise InvalidRequestError(
                "chat_template is allowed only where nodes are started with --trust-request-chat-template",
                param="chat_template",
                code="unsupported_parameter",
            )
        reserved = sorted(RESERVED_TEMPLATE_KWARGS.intersection(request.chat_template_kwargs))
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {', '.join(reserved)}", param="chat_template_kwargs"
            )
        try:
            _, text = self._taken(request, self._dialogue(request))
        # A template is a program of the model's: it may raise anything, always because of these messages.
        except Exception as exc:
            raise InvalidRequestError(
                f"the chat template refused the messages: {type(exc).__name__}: {exc}", param="messages"
            ) from exc
        self.check_length("messages", text, is_cut=request.truncate_prompt_tokens is not None)
        token_ids = self.encode(text, add_special_tokens=bool(request.add_special_tokens))
        if not token_ids:
            raise InvalidRequestError("messages have no tokens", param="messages")
        return self._cut(request, token_ids)

    def check_images(self, request: ChatRequest) -> None:
        """Raises ImageRefusedError for images and a model that takes none."""
        if request.images and isinstance(self.image_rules, str):
            name = request.images[0].name
            raise ImageRefusedError(
                f"{name}: this model takes no images: {self.image_rules}", reason="model", param=name
            )

    def _cut(self, request: GenerationRequest, token_ids: list[int]) -> list[int]:
        return token_ids if self._max_model_len is None else request.truncated(token_ids, self._max_model_len)

    def check_length(self, name: str, text: str, *, is_cut: bool = False) -> None:
        """Raises ContextLengthError for a text that is far too long to be tokenised. ``is_cut``: only so much of its
        tokens is used as the context holds."""
        if self._max_model_len is None:
            return
        if len(text) > self._max_model_len * MAX_CHARS_PER_TOKEN:
            num_tokens = math.ceil(len(text) / MAX_CHARS_PER_TOKEN)
            about = f" ({len(text)} characters, at most {MAX_CHARS_PER_TOKEN} in each)"
            raise ContextLengthError(name, ContextOverflow(self._max_model_len, num_tokens), about=about)
        if is_cut or len(text) <= max(PIECE_CHARS, self._max_model_len * USUAL_CHARS_PER_TOKEN):
            return
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            num_tokens += len(self.encode(text[start : start + PIECE_CHARS], add_special_tokens=False)) - CUT_TOKENS
            if num_tokens > self._max_model_len:
                about = " where it was counted no further"
                raise ContextLengthError(name, ContextOverflow(self._max_model_len, num_tokens), about=about)

    def _dialogue(self, request: ChatRequest) -> Dialogue:
        """The request's, in roles that the template knows."""
        messages: Sequence[Mapping[str, Any]] = request.messages
        if any(message["role"] == "developer" for message in messages) and not self._knows_developer(request):
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        return Dialogue(messages, request.cache_marks)

    def _taken(self, request: ChatRequest, given: Dialogue) -> tuple[Dialogue, str]:
        """The first form of the request's dialogue that the template takes, and its text. Raises what the template
        raises of the given one."""
        try:
            return given, self._whole_text(request, given)
        except Exception:
            for other in alternatives(given):
                with contextlib.suppress(Exception):
                    return other, self._whole_text(request, other)
            raise

    def _whole_text(self, request: ChatRequest, dialogue: Dialogue) -> str:
        return self.render(
            request,
            dialogue.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )

    def render(
        self,
        request: ChatRequest,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """Text of ``messages`` with the request's tools and arguments; with images, what the model's processor writes
        for one. Raises what the template raises."""
        text: str = self.tokenizer.apply_chat_template(
            [self._for_template(message) for message in messages],
            tools=[dict(tool) for tool in request.tools] if request.tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            return_dict=False,
            **({"documents": [dict(each) for each in request.documents]} if request.documents else {}),
            **({"chat_template": request.chat_template} if request.chat_template is not None else {}),
            **self._effort_variables(request),
            **request.chat_template_kwargs,
        )
        rules = self.image_rules
        if request.images and isinstance(rules, ImageRules) and rules.marker:
            return text.replace(*rules.marker)
        return text

    def _knows_developer(self, request: ChatRequest) -> bool:
        """Whether the template does: another one would drop what the developer says, or write a role that the model has
        never seen."""
        source = self.tokenizer.get_chat_template(request.chat_template, request.tools or None)
        return _NAMES_DEVELOPER.search(source) is not None

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with its calls as the template needs them."""
        tools = self.answer_format.tools if message.get("tool_calls") else None
        if tools is None:
            return dict(message)
        if not tools.is_rendered:
            return with_calls_in_content(message, tools.layout)
        calls = [
            {**call, "function": {**call["function"], "arguments": call_arguments(call, as_text=tools.takes_text)}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    def _effort_variables(self, request: ChatRequest) -> dict[str, Any]:
        """``reasoning_effort`` as templates know it; what the request says to the template itself comes first."""
        effort = request.reasoning.effort
        if effort is None:
            return {}
        variables = dict.fromkeys(self.answer_format.switches, effort != "none") | {"reasoning_effort": effort}
        return {name: value for name, value in variables.items() if name not in request.chat_template_kwargs}

    def chat_boundaries(
        self, request: ChatRequest, token_ids: list[int], image_ends: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Positions in ``token_ids``, the tokens of ``encode_chat``, worth a kept state; the most reusable first, as in
        ``image_ends``."""
        if request.add_special_tokens or request.truncate_prompt_tokens is not None:
            return ()  # the places of a conversation's parts in its text are not those in its tokens
        dialogue = self._dialogue(request)
        if any(True for _ in alternatives(dialogue)):
            # Parts of the prompt are rendered in the form in which the template took the whole.
            with contextlib.suppress(Exception):
                dialogue, _ = self._taken(request, dialogue)
        conversation = Conversation(
            messages=dialogue.messages,
            marks=dialogue.marks,
            has_tools=bool(request.tools),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        return semantic_boundaries(conversation, token_ids, _ChatRenderer(self, request), image_ends)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of whole sequences; invalid bytes become replacement characters."""
        return self._whole_decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> TokenPiece:
        """One token by itself; ``token_id`` is one of the model's."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def _make_piece(self, token_id: int) -> TokenPiece:
        is_special = token_id in self.special_ids
        raw = self.tokenizer.convert_ids_to_tokens([token_id])[0]
        if raw is None:
            return TokenPiece(token_id, "", b"", is_special)
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        if raw.startswith("\u2581"):  # some decoders drop a blank that a text begins with
            text = " " * (len(raw) - len(raw.lstrip("\u2581"))) + text.lstrip(" ")
        if REPLACEMENT not in text:
            return TokenPiece(token_id, text, text.encode(), is_special)
        data = self._raw_bytes(raw, text)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return TokenPiece(token_id, text, data, is_special)

    def bad_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The sequences of tokens that ``words`` are: at the beginning of a text, and after a blank where that makes
        one sequence of the same length with another first token (as vLLM has it)."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            plain = tuple(self.encode(word.lstrip(), add_special_tokens=False))
            blank = tuple(self.encode(" " + word.lstrip(), add_special_tokens=False))
            found |= dict.fromkeys(each for each in (plain,) if each)
            if blank and len(blank) == len(plain) and blank[0] != plain[0]:
                found[blank] = None
        return tuple(found)

    def pieces(self, token_ids: Sequence[int]) -> list[TokenPiece]:
        return [self.piece(token_id) for token_id in token_ids]

    def _raw_bytes(self, raw: str, text: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(raw)
        if match is not None:
            return bytes([int(match.group(1), 16)])
        if all(char in self._byte_of for char in raw):
            return bytes(self._byte_of[char] for char in raw)
        return text.encode()


class _Batches:
    """A ``Decoder`` that releases the interpreter's lock."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])


class _ChatRenderer:
    """``common.text.boundaries.ChatRenderer`` of one request."""

    def __init__(self, codec: TextCodec, request: ChatRequest) -> None:
        self._codec = codec
        self._request = request

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> str | None:
        try:
            return self._codec.render(
                self._request,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except Exception:  # noqa: BLE001  # a template may raise anything about a part of a conversation
            return None

    def encode(self, text: str) -> list[int]:
        return self._codec.encode(text, add_special_tokens=False)
