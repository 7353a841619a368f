from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from tests.unit.api.vocabulary import byte_fallback, train_byte_level


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_byte_level()


@pytest.fixture(scope="session")
def sentencepiece() -> PreTrainedTokenizerFast:
    return byte_fallback()
