"""Train the demo model: ``python -m benchmarks.demo_model.train --steps 2000 --out DIR``.

1 collect documentation and train the tokenizer on it, 2 draw the starting weights, 3 train on batches of a fixed
number of tokens, whose sequences get longer as the run goes on, 4 write ``DIR/checkpoint`` (bfloat16) at the end.
``DIR/training_state.pt`` is written every few minutes and on SIGTERM; ``--resume`` goes on from it, and a larger
``--steps`` then stretches what is left of the schedule.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import signal
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from benchmarks.demo_model.architecture import TRAINING_CHUNK, build_config, training_loss
from benchmarks.demo_model.batches import SequenceSource
from benchmarks.demo_model.corpus import Item, digest, documentation
from benchmarks.demo_model.optimizer import build_optimizers
from benchmarks.demo_model.products import product_dtype
from benchmarks.demo_model.starting_weights import build_model
from benchmarks.demo_model.tokens import Encoder, train_tokenizer
from common.models.loading.quiet import quiet_transformers
from common.models.synthetic import special_ids

BATCH_TOKENS = 4096
WARM_UP_STEPS = 40
DECAY_SHARE = 0.3
"""Of the steps: the learning rates fall in a straight line over the last ones."""
START_RATE_SCALE = 0.5
"""Of the learning rates, where training goes on from trained weights."""
GRADIENT_NORM = 1.0
SAVE_EVERY_S = 300.0
REPORT_STEPS = 20

# Up to which share of the run: sequence lengths and their odds, and the share of plain text.
CURRICULUM: Sequence[tuple[float, dict[int, float], float]] = (
    (0.35, {256: 1.0}, 0.30),
    (0.65, {256: 0.3, 512: 0.7}, 0.35),
    (0.85, {256: 0.2, 512: 0.3, 1024: 0.5}, 0.40),
    (1.00, {512: 0.4, 1024: 0.3, 2688: 0.3}, 0.40),
)


class Training:
    """One run, from its seed or from a saved state."""

    def __init__(self, out: Path, seed: int, batch_tokens: int, start: Path | None = None) -> None:
        self._out = out
        self._batch_tokens = batch_tokens
        self._state_path = out / "training_state.pt"
        items = documentation()
        self.provenance = _provenance(items, seed, batch_tokens)
        self.tokenizer = train_tokenizer(item.text for item in items if not item.is_held_out)
        self.model = build_model(build_config(len(self.tokenizer), special_ids()), seed)
        if start is not None:
            self.model.load_state_dict(load_file(start / "model.safetensors"))
            self.provenance["started_from_sha256"] = sha256((start / "model.safetensors").read_bytes()).hexdigest()
        self._source = SequenceSource(items, Encoder(self.tokenizer), seed)
        self._optimizers = build_optimizers(self.model)
        rate_scale = 1.0 if start is None else START_RATE_SCALE
        self._rates = [rate_scale * optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]
        self._rng = random.Random(seed)
        self.step = self.tokens = 0

    def resume(self) -> None:
        """Go on from the state in ``out``; raises OSError when there is none."""
        state = torch.load(self._state_path, weights_only=False)
        self.step, self.tokens = state["step"], state["tokens"]
        self.model.load_state_dict(state["model"])
        self._source.restore(state["source"])
        self._rng.setstate(state["rng"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def train_step(self, share: float) -> tuple[float, float, int]:
        """One step at ``share`` of the run; the losses of text and answers in nats per token, and the length."""
        scale = min(1.0, (self.step + 1) / WARM_UP_STEPS, (1 - share) / DECAY_SHARE)
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        _, lengths, text_share = next(phase for phase in CURRICULUM if share < phase[0])
        length = self._rng.choices(list(lengths), list(lengths.values()))[0]
        length = min(length, self._batch_tokens // TRAINING_CHUNK * TRAINING_CHUNK)
        tokens, weights = self._source.batch(max(1, self._batch_tokens // length), length, text_share)
        with torch.autocast("cpu", torch.bfloat16, enabled=product_dtype() == torch.bfloat16):
            loss, text_loss, answer_loss = training_loss(self.model, tokens, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += weights.numel()
        return float(text_loss), float(answer_loss), length

    def save_state(self) -> None:
        scratch = self._state_path.with_suffix(".part")
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "model": self.model.state_dict(),
            "source": self._source.state(),
            "rng": self._rng.getstate(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        torch.save(state, scratch)
        scratch.replace(self._state_path)

    def save_checkpoint(self, folder: Path) -> None:
        """Ordinary Hugging Face files in bfloat16, and what they were made from."""
        model = build_model(self.model.config, seed=0)
        model.load_state_dict(self.model.state_dict())
        with quiet_transformers():
            model.bfloat16().save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        facts = {**self.provenance, "steps": self.step, "tokens": self.tokens}
        (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _provenance(items: Sequence[Item], seed: int, batch_tokens: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "batch_tokens": batch_tokens,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "documentation_items": len(items),
        "documentation_bytes": sum(len(item.text.encode()) for item in items),
        "documentation_sha256": digest(items),
        "held_out_sha256": digest([item for item in items if item.is_held_out]),
    }


def main(argv: list[str] | None = None) -> None:
    arguments = _parse(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    training = Training(arguments.out, arguments.seed, arguments.batch_tokens, arguments.start)
    if arguments.resume:
        training.resume()
    is_stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: is_stopped.append(number))
    saved_s = time.monotonic()
    losses: list[tuple[float, float, int]] = []
    while training.step < arguments.steps and not is_stopped:
        losses.append(training.train_step(training.step / arguments.steps))
        if training.step % arguments.report_steps == 0:
            _report(training, losses)
            losses = []
        if time.monotonic() - saved_s > SAVE_EVERY_S:
            training.save_state()
            saved_s = time.monotonic()
    training.save_state()
    training.save_checkpoint(arguments.out / "checkpoint")


def _report(training: Training, losses: Sequence[tuple[float, float, int]]) -> None:
    # A batch without text, or without answers, says nothing about them.
    seen = [[value for value in column if value > 0] for column in zip(*losses, strict=True)]
    text, answer, length = (sum(values) / len(values) if values else math.nan for values in seen)
    sys.stdout.write(
        f"{time.strftime('%H:%M:%S')} step={training.step} tokens={training.tokens} length={length:.0f} "
        f"text_loss={text:.3f} answer_loss={answer:.3f} cpu_s={time.process_time():.0f}\n"
    )
    sys.stdout.flush()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, required=True, help="of the whole run, those before --resume included")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and the training state")
    parser.add_argument("--start", type=Path, help="folder of a checkpoint whose weights to begin with")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS)
    parser.add_argument("--report-steps", type=int, default=REPORT_STEPS)
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: must be at least 1")
    if arguments.batch_tokens < TRAINING_CHUNK:
        parser.error(f"--batch-tokens {arguments.batch_tokens}: must be at least {TRAINING_CHUNK}")
    return arguments


if __name__ == "__main__":
    main()
