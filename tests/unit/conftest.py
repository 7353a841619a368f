"""Tokenizers that tests of several folders read with; made only where a test asks for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    from tests.unit.text.vocabulary import train_byte_level

    return train_byte_level()


@pytest.fixture(scope="session")
def sentencepiece() -> PreTrainedTokenizerFast:
    from tests.unit.text.vocabulary import byte_fallback

    return byte_fallback()
