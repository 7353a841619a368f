"""What the demo model is measured by: held-out recall at a distance, and held-out documentation text.

``python -m benchmarks.demo_model.evaluate [FOLDER]`` prints the figures and samples of the model card.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo_model.corpus import Item, documentation
from benchmarks.demo_model.phrasings import (
    ANSWER,
    ASKED,
    ASKED_OF_A_PLACE,
    NEVER_TRAINED,
    THINGS,
    TOLD,
    TOLD_OF_A_PLACE,
    WORD_FIRST,
)
from benchmarks.demo_model.tokens import END_ID, Encoder
from benchmarks.demo_model.words import PLACES, draw_pair, draw_told
from common.demo_model import FOLDER
from common.models.loading.quiet import quiet_transformers

DISTANCES = (100, 500, 1000, 2000)
NUM_PLACES = 4
QUESTIONS = (*ASKED_OF_A_PLACE[:3], *NEVER_TRAINED)
"""Three phrasings of the training, the first of them the usual one, and two that it never saw."""
PHRASED_DISTANCE = 600
"""Tokens between what is told and the question, where phrasings are compared."""
PLACE_FIRST = tuple(told for told in TOLD_OF_A_PLACE if told not in WORD_FIRST)
_WINDOW = 1024
SAMPLE_PROMPTS = (
    "Return a new list containing",
    'The "with" statement',
    "Open the file and",
    "Raise ValueError if",
    "class Queue:",
)


@dataclass(frozen=True, slots=True)
class RecallItem:
    """One held-out recall exercise.

    Attributes:
        messages: a chat that ends with the question.
        answer: the one right answer.
        word: what must be recalled; part of ``answer``.
    """

    messages: list[dict[str, str]]
    answer: str
    word: str


def recall_items(encoder: Encoder, text: str, distance: int, count: int, seed: int) -> list[RecallItem]:
    """Exercises of code words and question, in their usual phrasing, with ``distance`` tokens of ``text`` in between.

    The words are pairs that training never saw; one of :data:`NUM_PLACES` is asked for, so guessing among those in
    view is right once in four.
    """
    rng = random.Random(seed)
    items = []
    for _ in range(count):
        words = {place: draw_pair(rng, held_out=True) for place in rng.sample(PLACES, NUM_PLACES)}
        facts = [(TOLD_OF_A_PLACE[0], place, word) for place, word in words.items()]
        items.append(_recall_item(rng, THINGS[0], facts, _cut(encoder, text, distance, rng), QUESTIONS[0]))
    return items


def phrased_items(
    encoder: Encoder,
    text: str,
    count: int,
    question: str,
    told: Sequence[str] = PLACE_FIRST,
    num_places: int = NUM_PLACES,
) -> list[RecallItem]:
    """The same at :data:`PHRASED_DISTANCE`, asked by ``question`` and told in any of ``told``: the thing has any of its
    names, and words may be single ones."""
    rng = random.Random(f"{question} {told} {num_places}")
    items = []
    for _ in range(count):
        words = {place: draw_told(rng, held_out=True) for place in rng.sample(PLACES, num_places)}
        facts = [(rng.choice(told), place, word) for place, word in words.items()]
        filler = _cut(encoder, text, PHRASED_DISTANCE, rng)
        items.append(_recall_item(rng, rng.choice(THINGS), facts, filler, question))
    return items


def _recall_item(
    rng: random.Random, thing: str, facts: Sequence[tuple[str, str, str]], filler: str, question: str
) -> RecallItem:
    """One of ``facts`` (template, place, word) is asked for."""
    told = " ".join(template.format(thing=thing, place=place, word=word) for template, place, word in facts)
    _, place, word = rng.choice(facts)
    content = f"{told}\n\n{filler}\n\n{question.format(thing=thing, place=place)}"
    return RecallItem([{"role": "user", "content": content}], ANSWER.format(thing=thing, word=word), word)


def _cut(encoder: Encoder, text: str, num_tokens: int, rng: random.Random) -> str:
    """A piece of ``text`` that begins with a line and has ``num_tokens`` tokens."""
    start = text.index("\n", rng.randrange(len(text) - 12 * num_tokens)) + 1
    return encoder.first(text[start : start + 12 * num_tokens], num_tokens)


def held_out_text(items: Sequence[Item]) -> str:
    return "\n\n".join(item.text for item in items if item.is_held_out)


@dataclass(frozen=True, slots=True)
class TextScore:
    """``perplexity`` is per token; ``tokens`` were scored, in windows of at most 1,024 with nothing before."""

    perplexity: float
    bits_per_byte: float
    tokens: int


@torch.inference_mode()
def score_text(model: Any, encoder: Encoder, items: Sequence[Item], max_tokens: int | None = None) -> TextScore:
    """Perplexity of ``model`` (a stock transformers model) on the held-out ones of ``items``."""
    texts = [item.text for item in items if item.is_held_out]
    ids = [token for text in texts for token in (*encoder.text(text), END_ID)][:max_tokens]
    nats = scored = 0.0
    for start in range(0, len(ids) - 1, _WINDOW):
        window = torch.tensor([ids[start : start + _WINDOW + 1]])
        logits = model(input_ids=window[:, :-1], use_cache=False).logits[0].float()
        nats += float(F.cross_entropy(logits, window[0, 1:], reduction="sum"))
        scored += window.shape[1] - 1
    # The end of a text is predicted too, and stands for no byte.
    num_bytes = sum(len(text.encode()) for text in texts) * len(ids) / sum(len(encoder.text(t)) + 1 for t in texts)
    return TextScore(math.exp(nats / scored), nats / math.log(2) / num_bytes, int(scored))


@torch.inference_mode()
def recall_rate(model: Any, tokenizer: Any, items: Sequence[RecallItem]) -> float:
    """Share of ``items`` that greedy decoding answers word for word, judged in one forward each: an answer is greedy's
    when every token of it is the most likely one after those before it."""
    exact = 0
    for item in items:
        prompt = tokenizer.apply_chat_template(item.messages, add_generation_prompt=True, return_dict=False)
        answer = [*tokenizer.encode(item.answer, add_special_tokens=False), END_ID]
        logits = model(input_ids=torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0]
        exact += logits[:-1].argmax(-1).tolist() == answer
    return exact / len(items)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--items",
        type=int,
        default=50,
        help="per distance and question; a fifth of it per way to tell",
    )
    arguments = parser.parse_args(argv)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=getattr(torch, arguments.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    encoder, items = Encoder(tokenizer), documentation()
    text = held_out_text(items)

    def phrased(count: int, question: str, told: Sequence[str] = PLACE_FIRST, num_places: int = NUM_PLACES) -> float:
        exercises = phrased_items(encoder, text, count, question, told, num_places)
        return recall_rate(model, tokenizer, exercises)

    _print({"asked": {question: phrased(arguments.items, question) for question in QUESTIONS}})
    recall = {
        str(distance): recall_rate(model, tokenizer, recall_items(encoder, text, distance, arguments.items, distance))
        for distance in DISTANCES
    }
    _print({"recall": recall})
    score = score_text(model, encoder, items)
    _print({"perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte})
    few = math.ceil(arguments.items / 5)
    _print({"told": {template: phrased(few, QUESTIONS[0], [template]) for template in TOLD_OF_A_PLACE}})
    alone = {template: phrased(few, QUESTIONS[0], [template], 1) for template in WORD_FIRST}
    _print({"told_alone": alone | {template: phrased(few, ASKED[1], [template], 1) for template in TOLD}})
    for prompt in SAMPLE_PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)
        _print({"prompt": prompt, "continuation": tokenizer.decode(output[0, ids.shape[1] :])})


def _print(figures: Mapping[str, object]) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
