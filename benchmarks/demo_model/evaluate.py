"""What the demo model is measured by: held-out recall at a distance, and held-out documentation text.

``python -m benchmarks.demo_model.evaluate [FOLDER]`` prints the figures and samples of the model card.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo_model.corpus import Item, documentation
from benchmarks.demo_model.exercises import ANSWER
from benchmarks.demo_model.tokens import END_ID, Encoder
from benchmarks.demo_model.words import PLACES, draw_pair
from common.demo_model import FOLDER
from common.models.loading.quiet import quiet_transformers

DISTANCES = (100, 500, 1000, 2000)
NUM_PLACES = 4
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
    """Exercises of code words and question with ``distance`` tokens of ``text`` in between.

    The words are pairs that training never saw; one of :data:`NUM_PLACES` is asked for, so guessing among those in
    view is right once in four.
    """
    rng = random.Random(seed)
    items = []
    for _ in range(count):
        words = {place: draw_pair(rng, held_out=True) for place in rng.sample(PLACES, NUM_PLACES)}
        asked = rng.choice(list(words))
        facts = " ".join(f"The code word of the {place} is {word}." for place, word in words.items())
        filler = _cut(encoder, text, distance, rng)
        content = f"{facts}\n\n{filler}\n\nWhat is the code word of the {asked}?"
        items.append(RecallItem([{"role": "user", "content": content}], ANSWER.format(words[asked]), words[asked]))
    return items


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
    parser.add_argument("--items", type=int, default=50, help="recall exercises per distance")
    arguments = parser.parse_args(argv)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=getattr(torch, arguments.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    encoder, items = Encoder(tokenizer), documentation()
    text = held_out_text(items)
    recall = {
        str(distance): recall_rate(model, tokenizer, recall_items(encoder, text, distance, arguments.items, distance))
        for distance in DISTANCES
    }
    score = score_text(model, encoder, items)
    print(json.dumps({"recall": recall, "perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte}))
    for prompt in SAMPLE_PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)
        print(json.dumps({"prompt": prompt, "continuation": tokenizer.decode(output[0, ids.shape[1] :])}))


if __name__ == "__main__":
    main()
