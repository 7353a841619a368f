"""Drives a model runner by hand: sequences with block tables and slots, stepped in any mix, next to a stock
reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.config.node import NodeConfig
from common.engine.model_runner import ModelRunner
from common.engine.plan import Rows, Segment, StepPlan
from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.sequences.allocation import BlockTable
from common.kv_cache.spec import KVCacheConfig
from common.models.adapter.arguments import step_arguments, stock_cache
from common.models.loading.loader import LoadedModel, load_model
from common.node.ranks.ranks import Ranks
from common.node.ranks.runner import RankedRunner
from tests.support.models import VOCAB_SIZE, auto_class, checkpoint
from tests.support.ops import make_ops
from tests.support.reference import tolerance as tolerance

BLOCK_SIZE = 16


@functools.cache
def engine_model(
    family: str, dtype: str = "float32", ops: str = "auto", *, compact: bool = False, device: str = "cpu"
) -> LoadedModel:
    folder = str(checkpoint(family))
    return load_model(folder, dtype=dtype, ops_backend=ops, compact_weights=compact, device=device)


@functools.cache
def stock_model(family: str, dtype: str = "float32") -> Any:
    return auto_class(family).from_pretrained(checkpoint(family), dtype=getattr(torch, dtype)).eval()


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(6, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def stock_logits(family: str, token_ids: Sequence[int], dtype: str = "float32") -> Tensor:
    """[num_tokens, vocab] float32 of the stock forward over the whole prompt, computed in ``dtype``."""
    return stock_model(family, dtype)(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


@torch.inference_mode()
def stock_greedy(family: str, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
    """Tokens and their logits [num_tokens, vocab]: the prompt in one go, then token by token with stock's own cache."""
    model = stock_model(family)
    output = model(input_ids=torch.tensor([list(prompt)]), use_cache=True)
    cache = stock_cache(output)
    tokens: list[int] = []
    rows = [output.logits[0, -1].float()]
    while True:
        tokens.append(int(rows[-1].argmax()))
        if len(tokens) == num_tokens:
            return tokens, torch.stack(rows)
        position = torch.tensor([len(prompt) + len(tokens) - 1])
        output = model(input_ids=torch.tensor([tokens[-1:]]), **step_arguments(model, cache, position))
        rows.append(output.logits[0, -1].float())


@dataclass
class Running:
    """A running sequence: what the cache manager would hold of it."""

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
    test.

    A block id of a sequence stands for one block per attention group, another one in each (``in_group``). As the cache
    manager does, entries that a window has left are null. ``ranks``: those that run the steps with this process, just
    started.
    """

    def __init__(
        self,
        family: str,
        ops: str = "torch",
        *,
        dtype: str = "float32",
        num_blocks: int = 64,
        num_slots: int = 16,
        compact: bool = False,
        device: str = "cpu",
        ranks: Ranks | None = None,
    ) -> None:
        if device == "cpu":
            make_ops(ops)  # or skips the test
        if ranks is None:
            self.model = engine_model(family, dtype, ops, compact=compact, device=device)
        else:
            load = {"model": str(checkpoint(family)), "dtype": dtype, "ops_backend": ops}
            self.model = load_model(**load, group=ranks.meet(load, NodeConfig(model=load["model"])))
        self.groups = self.model.geometry.attention_groups
        each_group = (num_blocks,) * len(self.groups)
        config = KVCacheConfig(self.model.geometry, BLOCK_SIZE, each_group, num_slots, b"root")
        self._num_blocks = num_blocks
        self.storage = KVStorage(config, torch.device(device))
        if ranks is None:
            self.runner = ModelRunner(self.model, self.storage, config)
        else:
            self.other_storages = ranks.allocate(config)
            self.runner = RankedRunner(self.model, self.storage, config, ranks)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self._free = order.tolist()
        self.has_state = config.has_state
        self.has_attention = config.has_attention
        self.sequences: dict[str, Running] = {}
        self.only_decodes = False  # of the steps to come: their segments are drafts behind a token

    def take_blocks(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK_SIZE) if self.has_attention else 0
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test asked for more blocks than there are"
        return taken

    def add(self, name: str, slot: int, max_tokens: int) -> Running:
        self.sequences[name] = Running(self.take_blocks(max_tokens), slot if self.has_state else 0)
        return self.sequences[name]

    def in_group(self, block_id: int, group_id: int) -> int:
        return (block_id - 1 + 5 * group_id) % (self._num_blocks - 1) + 1

    def zero_block(self, block_id: int) -> None:
        for group in self.groups:
            self.storage.zero_block(self.in_group(block_id, group.group_id), group.group_id)

    def first_read(self, num_tokens: int) -> int:
        """Index of the first block that any layer reads after ``num_tokens`` tokens."""
        return min(max(0, num_tokens - group.window + 1) // BLOCK_SIZE if group.window else 0 for group in self.groups)

    def _tables(self, sequence: Running) -> list[list[int]]:
        tables = []
        for group in self.groups:
            first = max(0, sequence.num_computed - group.window + 1) // BLOCK_SIZE if group.window else 0
            held = [self.in_group(block_id, group.group_id) for block_id in sequence.block_ids]
            tables.append([0] * first + held[first:])
        return tables

    def hidden(self, *work: Work, block_copies: Sequence[tuple[int, int]] = ()) -> list[Tensor]:
        """Run one step; rows of the last hidden state per segment."""
        segments = []
        for item in work:
            sequence = self.sequences[item.name]
            start = sequence.num_computed
            saves = item.saves if self.has_state else {}
            tables = self._tables(sequence)
            segments.append(
                Segment(
                    request_id=item.name,
                    token_ids=list(item.token_ids),
                    start=start,
                    tables=[BlockTable(table, sequence.write_from) for table in tables],
                    src_slot=sequence.src_slot,
                    dst_slot=sequence.slot,
                    save_offsets=tuple(position - start for position in saves),
                    save_slots=tuple(saves.values()),
                    rows=item.rows,
                )
            )
            sequence.num_computed += len(item.token_ids)
            sequence.src_slot = sequence.slot
        copies: dict[int, list[tuple[int, int]]] = {}
        for group in self.groups if block_copies else ():
            g = group.group_id
            copies[g] = [(self.in_group(a, g), self.in_group(b, g)) for a, b in block_copies]
        return self.runner.forward(StepPlan(segments, copies, self.only_decodes))

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
