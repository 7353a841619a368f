"""The demo model's tokenizer, and conversations as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.demo_model.words import ADJECTIVES, NOUNS, PLACES, SETTINGS
from common.models.synthetic import CHAT_TEMPLATE, END_TOKEN, PAD_TOKEN, SPECIAL_TOKENS

VOCAB_SIZE = 2048
MAX_LENGTH = 32768
END_ID = SPECIAL_TOKENS.index(END_TOKEN)
_WORD_COUNT = 400
"""How often each exercise word is shown to the tokenizer, so that most become one token."""
_TEMPLATE_WORDS = ("word", "\nWhat", "\nHow", "\nCount", "\nRepeat", "\nNoted", "\nThe")

FILLER_MARK = "\x02"
"""Stands before and after filler in an exercise's text, and never in what the model reads."""

Turn = tuple[str, str]
"""(role, content)"""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; digits stand alone. ``texts`` must hold no held-out documentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = chain.from_iterable(
        repeat(f" {word}", _WORD_COUNT) for word in ADJECTIVES + NOUNS + PLACES + SETTINGS + _TEMPLATE_WORDS
    )
    tokenizer.train_from_iterator(chain(texts, words), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """Loss weights of a conversation's tokens. ``prompt``: of its own words, which are random by nature; ``filler``: of
    documentation inside of it; ``answer``: of what the assistant says, its end included."""

    prompt: float = 0.1
    filler: float = 1.0
    answer: float = 2.0


class Encoder:
    """Text and turns to token ids, as the chat template renders them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._encode = tokenizer.backend_tokenizer.encode
        self._roles = {role: SPECIAL_TOKENS.index(f"<|{role}|>") for role in ("system", "user", "assistant", "tool")}

    def text(self, text: str) -> list[int]:
        return list(self._encode(text, add_special_tokens=False).ids)

    def first(self, text: str, num_tokens: int) -> str:
        """The part of ``text`` that its first ``num_tokens`` tokens stand for."""
        offsets = self._encode(text, add_special_tokens=False).offsets[:num_tokens]
        return text[: offsets[-1][1]] if offsets else ""

    def turns(self, turns: Sequence[Turn], weights: Weights) -> tuple[list[int], list[float]]:
        """Token ids, and the loss weight of each as a target. Filler's marks are left out."""
        ids: list[int] = []
        targets: list[float] = []
        for role, content in turns:
            parts = content.split(FILLER_MARK)  # every second part is filler
            encoding = self._encode("".join(parts), add_special_tokens=False)
            own = weights.answer if role == "assistant" else weights.prompt
            by_char = list(
                chain.from_iterable(repeat(own if i % 2 == 0 else weights.filler, len(p)) for i, p in enumerate(parts))
            )
            ids += [self._roles[role], *encoding.ids, END_ID]
            targets += [weights.prompt, *(by_char[start] for start, _ in encoding.offsets), own]
        return ids, targets
