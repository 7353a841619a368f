"""The built-in model: training data is apart from test data, training runs, the weights do what the card says."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo_model.architecture import build_config, training_logits
from benchmarks.demo_model.batches import SequenceSource
from benchmarks.demo_model.corpus import Item, documentation
from benchmarks.demo_model.evaluate import held_out_text, recall_items, recall_rate, score_text
from benchmarks.demo_model.phrasings import NEVER_TRAINED
from benchmarks.demo_model.starting_weights import build_model
from benchmarks.demo_model.tokens import END_ID, FILLER_MARK, Encoder, Weights
from benchmarks.demo_model.words import draw_told, is_held_out
from common.demo_model import FOLDER
from common.models.loading.loader import load_model
from common.models.synthetic import ROLES, missing, special_ids
from tests.support.service import ROOT, child_environment

MAX_BYTES = 16_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return documentation()


@pytest.fixture(scope="module")
def stock() -> Any:
    """The shipped weights in stock transformers, in the type that they are stored in."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).eval()


def test_checkpoint_has_ordinary_files_of_at_most_16_megabytes_and_loads() -> None:
    assert not missing(FOLDER)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_BYTES
    loaded = load_model(str(FOLDER), ops_backend="torch")  # packed weights are no parameters
    assert loaded.dtype == torch.bfloat16
    assert loaded.geometry.state_layers
    assert loaded.geometry.attention_layers
    assert 3e6 <= sum(p.numel() for p in loaded.model.parameters()) <= 8e6


def test_training_forward_when_compared_with_stock_then_gives_the_same_logits() -> None:
    model = build_model(build_config(512, special_ids()), seed=3)
    tokens = torch.randint(6, 512, (2, 192), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits
        assert float((training_logits(model, tokens) - expected).abs().max()) < 1e-4
    assert float(expected.std()) > 0.1


def test_training_sequences_hold_no_held_out_word_question_or_text(tokenizer: Any) -> None:
    training = [
        Item(f"module.f{i}", f"Function number {i}.\n\nReturn what was given to it as {i}.") for i in range(400)
    ]
    texts = [item.text for item in training if item.is_held_out]
    assert 5 < len(texts) < 60
    source = SequenceSource(training, Encoder(tokenizer), seed=4)
    tokens, weights = source.batch(64, 512, text_share=0.3)
    assert (weights > 1).any()
    rows = [tokenizer.decode(row) for row in tokens]
    assert not any(FILLER_MARK in row for row in rows)
    told = [word for row in rows for word in re.findall(r"[Tt]he [a-z ]+ is ([\w ]+)\.", row)]
    assert len(told) > 400
    assert not any(is_held_out(word) for word in told)
    assert not any(
        f"Return what was given to it as {text[16:].split('.')[0]}." in row for row in rows for text in texts
    )
    assert not any(question.partition("{")[0] in row for row in rows for question in NEVER_TRAINED)
    rng = random.Random(5)
    assert all(is_held_out(draw_told(rng, held_out=True)) for _ in range(20))


def test_encoder_when_it_renders_turns_then_gives_what_the_chat_template_gives(tokenizer: Any) -> None:
    turns = [("system", "Be short."), ("user", f"Read:\n\n{FILLER_MARK}  def f(x):\n\n{FILLER_MARK}\n\nWell?")]
    turns.append(("assistant", "The code word is amber falcon."))
    ids, weights = Encoder(tokenizer).turns(turns, Weights(prompt=0.25, filler=0.5, answer=3.0))
    messages = [{"role": role, "content": content.replace(FILLER_MARK, "")} for role, content in turns]
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    assert len(weights) == len(ids)
    answer = [*tokenizer.encode(turns[-1][1]), END_ID]
    assert weights[-len(answer) :] == [3.0] * len(answer)
    assert set(weights[: -len(answer)]) == {0.25, 0.5}


def test_chat_template_when_a_turn_is_added_then_the_first_rendering_is_a_token_prefix(tokenizer: Any) -> None:
    first = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello,\n\nwhat is a socket? "}]
    second = [*first, {"role": "assistant", "content": "\n A file. "}, {"role": "user", "content": "And a pipe?"}]
    one = tokenizer.apply_chat_template(first, add_generation_prompt=True, return_dict=False)
    two = tokenizer.apply_chat_template(second, add_generation_prompt=True, return_dict=False)
    assert two[: len(one)] == one
    assert len(two) > len(one)


def test_tokenizer_when_text_goes_through_then_comes_back(tokenizer: Any) -> None:
    text = "def f(x):\n    return 'größer' + x  # 日本 🙂"
    assert 2048 <= len(tokenizer) <= 4096
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|end|>") == [tokenizer.eos_token_id]
    assert all(len(tokenizer.encode(f"<|{role}|>")) == 1 for role in ROLES)


@pytest.mark.full
def test_held_out_text_when_scored_by_stock_transformers_then_perplexity_is_below_40(
    stock: Any, tokenizer: Any, items: list[Item]
) -> None:
    score = score_text(stock, Encoder(tokenizer), items, max_tokens=6000)
    assert score.tokens > 5000
    assert score.perplexity < 40


@pytest.mark.full
def test_held_out_recall_in_stock_transformers_when_500_tokens_back_then_is_right(
    stock: Any, tokenizer: Any, items: list[Item]
) -> None:
    questions = recall_items(Encoder(tokenizer), held_out_text(items), 500, 20, seed=6)
    assert recall_rate(stock, tokenizer, questions) >= 0.95


def train(out: Path, *flags: str) -> str:
    """The output of the training script with batches small enough for a test."""
    argv = ["benchmarks.demo_model.train", "--out", str(out), "--batch-tokens", "512", "--report-steps", "3", *flags]
    result = subprocess.run(
        [sys.executable, "-m", *argv], cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.full
@pytest.mark.timeout(2500)  # two trainings, each with its own limit; slow on a CPU without bf16
def test_training_when_run_for_15_steps_and_resumed_then_lowers_the_loss_and_writes_a_loadable_checkpoint(
    tmp_path: Path,
) -> None:
    report = train(tmp_path, "--steps", "15")
    losses = [float(value) for value in re.findall(r"text_loss=([\d.]+)", report)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.8
    loaded = load_model(str(tmp_path / "checkpoint"))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.get_vocab() == AutoTokenizer.from_pretrained(FOLDER).get_vocab()
    resumed = train(tmp_path, "--steps", "18", "--resume")
    assert re.findall(r"step=(\d+)", resumed) == ["18"]
