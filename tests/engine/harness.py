"""Drives a model runner by hand: sequences with block tables and slots, stepped in any mix, next to a stock
reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from common.engine.model_runner import ModelRunner
from common.engine.plan import Rows, Segment, StepPlan
from common.kv_cache.spec import KVCacheConfig
from common.kv_cache.storage import KVStorage
from common.models.loader import LoadedModel, load_model
from tests.support.models import VOCAB_SIZE, checkpoint
from tests.support.ops import make_ops

BLOCK_SIZE = 16
TOLERANCE = {"qwen3_next": 5e-3, "qwen3_5": 5e-3}


def tolerance(family: str) -> float:
    """Largest allowed absolute logit difference in float32; the gated delta rule is itself that inexact."""
    return TOLERANCE.get(family, 1e-3)


@functools.cache
def engine_model(family: str, dtype: str = "float32") -> LoadedModel:
    return load_model(str(checkpoint(family)), dtype=dtype)


@functools.cache
def stock_model(family: str, dtype: str = "float32") -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=getattr(torch, dtype)).eval()


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(6, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def stock_logits(family: str, token_ids: Sequence[int]) -> Tensor:
    """[num_tokens, vocab] of the stock forward over the whole prompt."""
    return stock_model(family)(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


@torch.inference_mode()
def stock_greedy(family: str, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
    """Tokens and their logits [num_tokens, vocab]: the prompt in one go, then token by token with stock's own cache."""
    model = stock_model(family)
    cache = DynamicCache(config=model.config)
    output = model(input_ids=torch.tensor([list(prompt)]), past_key_values=cache, use_cache=True)
    tokens: list[int] = []
    rows = [output.logits[0, -1].float()]
    while True:
        tokens.append(int(rows[-1].argmax()))
        if len(tokens) == num_tokens:
            return tokens, torch.stack(rows)
        position = torch.tensor([[len(prompt) + len(tokens) - 1]])
        output = model(
            input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True, position_ids=position
        )
        rows.append(output.logits[0, -1].float())


@dataclass
class Running:
    """A sequence under way: what the cache manager would hold."""

    block_ids: list[int]
    slot: int
    src_slot: int = 0
    num_computed: int = 0
    write_from: int = 0


@dataclass
class Work:
    """One segment of a step, by name."""

    name: str
    token_ids: Sequence[int]
    saves: dict[int, int] = field(default_factory=dict)  # position -> slot
    rows: Rows = Rows.ALL


class Harness:
    """``num_blocks`` are handed out in shuffled order, so that tables are never consecutive; slots are named by the
    test."""

    def __init__(
        self, family: str, ops: str = "torch", *, dtype: str = "float32", num_blocks: int = 64, num_slots: int = 16
    ) -> None:
        self.model = dataclasses.replace(engine_model(family, dtype), ops=make_ops(ops))
        config = KVCacheConfig(self.model.geometry, BLOCK_SIZE, num_blocks, num_slots, b"root")
        self.storage = KVStorage(config, torch.device("cpu"))
        self.runner = ModelRunner(self.model, self.storage, config)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self._free = order.tolist()
        self.has_state = config.has_state
        self.has_attention = config.has_attention
        self.sequences: dict[str, Running] = {}

    def take_blocks(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK_SIZE) if self.has_attention else 0
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test asked for more blocks than there are"
        return taken

    def add(self, name: str, slot: int, max_tokens: int) -> Running:
        self.sequences[name] = Running(self.take_blocks(max_tokens), slot if self.has_state else 0)
        return self.sequences[name]

    def hidden(self, *work: Work, block_copies: Sequence[tuple[int, int]] = ()) -> list[Tensor]:
        """Run one step; rows of the last hidden state per segment."""
        segments = []
        for item in work:
            sequence = self.sequences[item.name]
            start = sequence.num_computed
            saves = item.saves if self.has_state else {}
            segments.append(
                Segment(
                    request_id=item.name,
                    token_ids=list(item.token_ids),
                    start=start,
                    block_ids=sequence.block_ids,
                    write_from=sequence.write_from,
                    src_slot=sequence.src_slot,
                    dst_slot=sequence.slot,
                    save_offsets=tuple(position - start for position in saves),
                    save_slots=tuple(saves.values()),
                    rows=item.rows,
                )
            )
            sequence.num_computed += len(item.token_ids)
            sequence.src_slot = sequence.slot
        return self.runner.forward(StepPlan(segments, list(block_copies)))

    def logits(self, *work: Work) -> list[Tensor]:
        """Run one step; logits per segment."""
        return [self.runner.logits(rows) for rows in self.hidden(*work)]

    def prefill(self, name: str, token_ids: Sequence[int], chunk: int = 512) -> Tensor:
        """Compute the tokens in chunks; the logits of the last one, [vocab]."""
        for begin in range(0, len(token_ids), chunk):
            rows = self.hidden(Work(name, token_ids[begin : begin + chunk], rows=Rows.LAST))
        return self.runner.logits(rows[0])[0]

    def greedy(
        self, names: Sequence[str], first: Sequence[int], num_tokens: int
    ) -> tuple[list[list[int]], list[Tensor]]:
        """``num_tokens`` tokens per sequence from batched decode steps, the given ``first`` ones included; and the
        logits [num_tokens - 1, vocab] of the others."""
        tokens, rows = [[t] for t in first], [[] for _ in names]
        for _ in range(num_tokens - 1):
            step = self.logits(*(Work(name, t[-1:]) for name, t in zip(names, tokens, strict=True)))
            for row, kept, out in zip(step, rows, tokens, strict=True):
                kept.append(row[0])
                out.append(int(row[0].argmax()))
        return tokens, [torch.stack(r) for r in rows]
