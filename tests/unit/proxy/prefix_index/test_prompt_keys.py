"""Keys of prompts that grow."""

from __future__ import annotations

import pytest

from proxy.prefix_index.prompt_keys import PromptKeys


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 40])
@pytest.mark.parametrize("more", [1, 15, 16, 17, 50])
def test_keys_when_a_prompt_is_followed_by_tokens_then_are_those_of_both(length: int, more: int) -> None:
    token_ids = [7 * index % 100 for index in range(length + more)]
    grown = PromptKeys.of_prompt(b"root", 16, token_ids[:length], "salt").source.followed_by(token_ids[length:])
    assert grown == PromptKeys.of_prompt(b"root", 16, token_ids, "salt")
    assert grown.key_at(length + more) == PromptKeys.of_prompt(b"root", 16, token_ids, "salt").key_at(length + more)
