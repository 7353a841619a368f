"""Who takes part: our model runners with one of their op backends, and stock transformers.

Each turns a piece of work into a call that does it once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from benchmarks.engine.models import MAX_TOKENS
from common.engine.model_runner import ModelRunner
from common.engine.plan import Segment, StepPlan
from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.sequences.allocation import BlockTable
from common.kv_cache.spec import KVCacheConfig
from common.models.loading.loader import LoadedModel

BLOCK_SIZE = 16
STEP_TOKENS = 2048
"""Prompt tokens of one step, as ``--max-num-batched-tokens`` has it by default."""
PROMPT_TOKENS = 512
"""Context of a decode step."""


class Contestant(Protocol):
    """``prefill``: ``batch`` prompts, up to one row of logits each. ``decode``: one token for each of ``batch``
    sequences behind :data:`PROMPT_TOKENS` tokens; every call is one step further."""

    def prefill(self, batch: int, num_tokens: int) -> Callable[[], None]: ...
    def decode(self, batch: int) -> Callable[[], None]: ...


class Engine:
    """Our model runner on pools of its own; row i of a batch has slot i + 1 and blocks of its own."""

    def __init__(self, model: LoadedModel, max_batch: int) -> None:
        self._per_row = MAX_TOKENS // BLOCK_SIZE
        num_blocks = (1 + max_batch * self._per_row,) * len(model.geometry.attention_groups)
        config = KVCacheConfig(model.geometry, BLOCK_SIZE, num_blocks, max_batch + 2, b"benchmark")
        self._storage = KVStorage(config, model.device)
        self._runner = ModelRunner(model, self._storage, config)
        self._vocab = model.geometry.vocab_size

    def _segment(self, row: int, start: int, count: int) -> Segment:
        blocks = list(range(1 + row * self._per_row, 1 + (row + 1) * self._per_row))
        tokens = [(7 * i + row) % self._vocab for i in range(start, start + count)]
        src = row + 1 if start else 0
        tables = [BlockTable(blocks[: -(-(start + count) // BLOCK_SIZE)]) for _ in self._storage.block_arenas]
        return Segment(str(row), tokens, start, tables, src, row + 1)

    def _run(self, segments: list[Segment]) -> None:
        self._runner.logits(torch.cat(self._runner.forward(StepPlan(segments))))

    def prefill(self, batch: int, num_tokens: int) -> Callable[[], None]:
        per_step = max(1, STEP_TOKENS // num_tokens)

        def call() -> None:
            for first in range(0, batch, per_step):
                rows = range(first, min(first + per_step, batch))
                self._run([self._segment(row, 0, num_tokens) for row in rows])

        return call

    def decode(self, batch: int) -> Callable[[], None]:
        self._run([self._segment(0, 0, PROMPT_TOKENS)])
        for row in range(1, batch):  # the same prompt in every row; a forward for each would only take time
            shift = row * self._per_row
            self._storage.copy_blocks([(1 + i, 1 + shift + i) for i in range(PROMPT_TOKENS // BLOCK_SIZE)])
            self._storage.slot_arena[row + 1] = self._storage.slot_arena[1]
        positions = itertools.count(PROMPT_TOKENS)

        def step() -> None:
            position = next(positions)
            self._run([self._segment(row, position, 1) for row in range(batch)])

        return step


class Nodes:
    """Our engine twice: prompts on a model as a prefill node loads it, decode steps on one as a decode node does."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill.prefill, decode.decode


class Stock:
    """transformers alone: its forward, its cache, a static batch."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def _run(self, ids: torch.Tensor, cache: DynamicCache, start: int) -> None:
        positions = torch.arange(start, start + ids.shape[1])[None].expand_as(ids)
        self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, position_ids=positions)

    def _tokens(self, batch: int, start: int, count: int) -> torch.Tensor:
        return (7 * torch.arange(start, start + count)[None] + torch.arange(batch)[:, None]) % self._model.vocab_size

    def prefill(self, batch: int, num_tokens: int) -> Callable[[], None]:
        return lambda: self._run(self._tokens(batch, 0, num_tokens), DynamicCache(config=self._model.config), 0)

    def decode(self, batch: int) -> Callable[[], None]:
        cache = DynamicCache(config=self._model.config)
        self._run(self._tokens(1, 0, PROMPT_TOKENS), cache, 0)
        cache.reorder_cache(torch.zeros(batch, dtype=torch.long))
        positions = itertools.count(PROMPT_TOKENS)

        def step() -> None:
            position = next(positions)
            self._run(self._tokens(batch, position, 1), cache, position)

        return step
