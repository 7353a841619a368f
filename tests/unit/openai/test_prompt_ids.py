"""``tandem_prompt``: what a node takes from its proxy in place of messages."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.openai.prompt_ids import PROMPT_IDS_KEY, PromptIds, read_prompt_ids
from common.openai.protocol import parse_chat

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "chat_template_kwargs": {"style": "terse"},
    "add_generation_prompt": False,
    "max_tokens": 3,
    "cache_salt": "s",
}


def test_body_with_ids_has_all_but_what_a_template_reads() -> None:
    body = PromptIds((5, 6, 7), (2,)).put_into(CHAT)
    assert body.pop("tools") == CHAT["tools"]  # calls are read with them
    assert body == {"max_tokens": 3, "cache_salt": "s", PROMPT_IDS_KEY: {"token_ids": (5, 6, 7), "boundaries": [2]}}
    request = parse_chat(body, is_from_peer=True)
    assert request.prompt_ids == PromptIds((5, 6, 7), (2,))
    assert (request.messages, request.cache_marks, request.cache_salt) == ((), (), "s")


def test_ids_of_a_stranger_are_an_unknown_field() -> None:
    request = parse_chat({**CHAT, PROMPT_IDS_KEY: {"token_ids": [1]}})
    assert (request.prompt_ids, len(request.messages)) == (None, 1)
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat(PromptIds((1,)).put_into(CHAT))
    assert caught.value.param == "messages"


def test_request_without_ids_needs_messages_of_a_peer_too() -> None:
    assert read_prompt_ids({PROMPT_IDS_KEY: None}) is None
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat({PROMPT_IDS_KEY: None}, is_from_peer=True)
    assert caught.value.param == "messages"
