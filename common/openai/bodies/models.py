"""Every field of ``POST /v1/completions`` and ``POST /v1/chat/completions`` that acts, in the order of the docs.

Each route has two models: the fields that make the prompt, which is all that a prefill leg reads, and with them those
that make the answer. What only our own processes send each other (``common.wire``) is declared nowhere here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from common.openai.bodies.base import Body, declare
from common.openai.bodies.values import (
    AllowedTokenIds,
    BadWords,
    ChatMessage,
    Choice,
    Documents,
    LogitBias,
    LogprobTokenIds,
    Prompts,
    ResponseFormat,
    Stop,
    StopTokenIds,
    StructuredOutputs,
    TemplateKwargs,
    Tools,
)
from common.wire.fields import MAX_TOKEN_ID

MAX_N = 128
"""Continuations of one prompt; OpenAI's bound."""
MAX_LOGPROBS = 20
"""Alternatives per token; OpenAI's bound for chats."""
MAX_TOKENS = 2**31 - 1
"""Largest ``max_tokens`` and ``min_tokens``; the model's own bound is checked later."""
MAX_TEMPLATE_CHARS = 200_000
"""Characters of a template that a request brings."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# ``common.openai.messages`` checks them, where it is known whether there are tokens in their place.
_Spelling = Annotated[Any, PlainValidator(lambda value: value, json_schema_input_type=Any)]
_Messages = Annotated[Any, PlainValidator(lambda value: value, json_schema_input_type=list[ChatMessage])]
# ``common.openai.constraint`` checks them.
_ResponseFormat = Annotated[Any, PlainValidator(lambda value: value, json_schema_input_type=ResponseFormat | None)]
_StructuredOutputs = Annotated[
    Any, PlainValidator(lambda value: value, json_schema_input_type=StructuredOutputs | None)
]


class StreamOptions(Body):
    include_usage: bool | None = declare("OpenAI", "One more event, without choices, says `usage`.", means=False)
    continuous_usage_stats: bool | None = declare(
        "vLLM", "Each event says `usage` so far; needs `include_usage`.", means=False
    )


# --- the prompt -------------------------------------------------------------------------------------------------------


class PromptBody(Body):
    """What both routes read of a prompt."""

    model: str | None = declare("OpenAI", "The served model's name, or an alias of it. Empty: the served model.")
    cache_salt: str | None = declare(
        "vLLM", "Prefixes are shared only between requests of the same salt.", min_length=1, max_length=1024
    )
    priority: int | None = declare(
        "vLLM", "Lower is served earlier, in the queues of proxy and nodes.", means=0, ge=-(2**31), le=2**31 - 1
    )
    add_special_tokens: bool | None = declare(
        "vLLM",
        "The tokenizer adds its special tokens to a text. Default: true for completions, false for chats, whose "
        "template writes them.",
    )
    truncate_prompt_tokens: int | None = declare(
        "vLLM",
        "Keeps this many tokens of a longer prompt, from 1 on; -1: as many as the context holds beside `max_tokens` "
        "(without it: beside one token).",
        ge=-1,
        le=MAX_TOKENS,
    )
    truncation_side: Literal["left", "right"] | None = declare(
        "vLLM", "Where `truncate_prompt_tokens` cuts: `left` keeps the last tokens, `right` the first.", means="left"
    )


class CompletionPromptBody(PromptBody):
    prompt: Prompts = declare("OpenAI", "A text, token ids, or a list of either. Required.", is_required=True)


class ChatPromptBody(PromptBody):
    messages: _Messages = declare(
        "OpenAI",
        "The conversation; content is text, or a list of text and `image_url` parts. `cache_control` on a message or "
        "part marks what later prompts will share. Required.",
        is_required=True,
    )
    tools: Tools = declare("OpenAI", "Functions that the model may call; the template shows them.")
    tool_choice: Choice = declare(
        "OpenAI", "Whether calls are left to the model, forbidden, required, or which one. Default: `auto` with tools."
    )
    reasoning_effort: ReasoningEffort | None = declare("OpenAI", "Reaches templates that know it.")
    add_generation_prompt: bool | None = declare("vLLM", "The template opens the assistant's turn.", means=True)
    continue_final_message: bool | None = declare(
        "vLLM", "The answer continues the last message instead of beginning one.", means=False
    )
    chat_template_kwargs: TemplateKwargs = declare("vLLM", "Variables for the template.", default={})
    chat_template: str | None = declare(
        "vLLM",
        "A template in place of the model's, where the nodes trust requests (`--trust-request-chat-template`).",
        min_length=1,
        max_length=MAX_TEMPLATE_CHARS,
    )
    documents: Documents = declare("vLLM", "Documents for templates that know retrieval.")


# --- the answer -------------------------------------------------------------------------------------------------------


class AnswerFields(Body):
    """What both routes read of an answer."""

    max_tokens: int | None = declare(
        "OpenAI", "Longest answer. Default: 16 for completions, the rest of the context for chats.", ge=0, le=MAX_TOKENS
    )
    max_completion_tokens: int | None = declare("OpenAI", "Goes before `max_tokens`.", ge=0, le=MAX_TOKENS)
    min_tokens: int | None = declare("vLLM", "No end and no stop before this many.", means=0, ge=0, le=MAX_TOKENS)
    temperature: float | None = declare("OpenAI", "0 is greedy.", means=1.0, ge=0, le=2)
    top_p: float | None = declare("OpenAI", "Draws from the likeliest tokens with this share.", means=1.0, gt=0, le=1)
    top_k: int | None = declare("vLLM", "Draws from this many; 0 and -1: from all.", means=0, ge=-1, le=MAX_TOKEN_ID)
    min_p: float | None = declare("vLLM", "Least share of the most likely token's.", means=0.0, ge=0, le=1)
    seed: int | None = declare(
        "OpenAI", "The same request gives the same tokens, whatever runs beside it.", ge=-(2**63), le=2**63 - 1
    )
    presence_penalty: float | None = declare("OpenAI", "Off a token that the answer has.", means=0.0, ge=-2, le=2)
    frequency_penalty: float | None = declare(
        "OpenAI", "Off a token each time that the answer has it.", means=0.0, ge=-2, le=2
    )
    repetition_penalty: float | None = declare(
        "vLLM", "Divides the score of tokens that prompt or answer have.", means=1.0, ge=0.01, le=100
    )
    response_format: _ResponseFormat = declare("OpenAI", "What the answer is: text, JSON, or as a JSON schema says.")
    structured_outputs: _StructuredOutputs = declare(
        "vLLM", "One of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`; or as `guided_...`."
    )
    logit_bias: LogitBias = declare("OpenAI", "Token id to what is added to its score, -100 to 100.", default={})
    allowed_token_ids: AllowedTokenIds = declare("vLLM", "Only these are drawn.")
    bad_words: BadWords = declare("vLLM", "Words that the answer must not have.", default=())
    stop: Stop = declare("OpenAI", "Up to 16 texts that end the answer.", default=())
    stop_token_ids: StopTokenIds = declare("vLLM", "Tokens that end the answer.", default=frozenset())
    include_stop_str_in_output: bool | None = declare("vLLM", "The text keeps the stop string.", means=False)
    ignore_eos: bool | None = declare("vLLM", "The model's end tokens do not end the answer.", means=False)
    guided_json: _Spelling = declare("vLLM", "Old name of `structured_outputs.json`.")
    guided_json_object: _Spelling = declare("vLLM", "Old name of `structured_outputs.json_object`.")
    guided_regex: _Spelling = declare("vLLM", "Old name of `structured_outputs.regex`.")
    guided_choice: _Spelling = declare("vLLM", "Old name of `structured_outputs.choice`.")
    guided_grammar: _Spelling = declare("vLLM", "Old name of `structured_outputs.grammar`.")
    guided_whitespace_pattern: _Spelling = declare("vLLM", "Old name of `structured_outputs.whitespace_pattern`.")
    n: int | None = declare("OpenAI", "Answers to each prompt, which is computed once.", means=1, ge=1, le=MAX_N)
    best_of: int | None = declare("OpenAI", "At most `n`: more candidates than answers are not made.", ge=1)
    stream: bool | None = declare("OpenAI", "Server-sent events instead of one object.", means=False)
    stream_options: StreamOptions | None = declare("OpenAI", "Only with `stream`.")
    skip_special_tokens: bool | None = declare("vLLM", "The text leaves special tokens out.", means=True)
    return_token_ids: bool | None = declare(
        "vLLM", "Choices say `token_ids`, the prompt's are `prompt_token_ids`.", means=False
    )
    return_tokens_as_token_ids: bool | None = declare(
        "vLLM", "Log-probabilities name tokens `token_id:ID`.", means=False
    )
    logprob_token_ids: LogprobTokenIds = declare(
        "vLLM", "Tokens whose log-probabilities are told at each place, instead of the most likely ones."
    )
    prompt_logprobs: int | None = declare(
        "vLLM", "Log-probabilities of the prompt's tokens, with this many alternatives.", ge=0, le=MAX_LOGPROBS
    )
    request_id: str | None = declare(
        "vLLM",
        "The request's id where no `X-Request-Id` header gives it.",
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9._:\-]+$",
    )


class CompletionBody(CompletionPromptBody, AnswerFields):
    """``POST /v1/completions``."""

    echo: bool | None = declare("OpenAI", "The answer begins with the prompt.", means=False)
    logprobs: int | None = declare(
        "OpenAI", "Log-probabilities of the tokens, with this many alternatives.", ge=0, le=MAX_LOGPROBS
    )


class ChatBody(ChatPromptBody, AnswerFields):
    """``POST /v1/chat/completions``."""

    logprobs: bool | None = declare("OpenAI", "Log-probabilities of the tokens.", means=False)
    top_logprobs: int | None = declare("OpenAI", "Alternatives at each place; needs `logprobs`.", ge=0, le=MAX_LOGPROBS)
    echo: bool | None = declare(
        "vLLM", "The answer begins with the last message, if that is the assistant's.", means=False
    )
    parallel_tool_calls: bool | None = declare("OpenAI", "Whether an answer may have several calls.", means=True)
    include_reasoning: bool | None = declare("vLLM", "The answer says its reasoning.", means=True)
    thinking_token_budget: int | None = declare(
        "vLLM", "Most tokens of reasoning; -1: any number.", ge=-1, le=MAX_TOKENS
    )


# --- tokens -----------------------------------------------------------------------------------------------------------


class TokenizeBody(ChatPromptBody):
    """``POST /tokenize``: a text in ``prompt``, or a conversation."""

    prompt: str | None = declare("vLLM", "A text; without it `messages`.")
    messages: _Messages = declare("vLLM", "A conversation, with the fields of a chat that make its prompt.")
    return_token_strs: bool | None = declare("vLLM", "The tokens as texts too.", means=False)


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = declare("vLLM", "The served model's name.")
    tokens: list[int] = declare("vLLM", "Token ids. Required.", default=[])
