"""Greedy answers of an engine on the tiny checkpoints of the tests, and how two engines' answers differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.measure.timing import find_device
from common.config.node import NodeConfig
from common.models.loading.quiet import quiet_transformers
from common.node.runtime import create_core, load_node_model
from common.request import Request, SamplingParams
from tests.support.models import VOCAB_SIZE, checkpoint

NUM_OUTPUT = 16
PROMPTS = (1, 16, 17, 100, 300)
"""Tokens of each: around a block's end, and longer than one step's share of a mixed step."""

Answer = list[tuple[int, float]]
"""(token, its log-probability) of each step."""


def answers(
    family: str,
    dtype: str,
    *,
    backend: str,
    eager: bool,
    prompts: Sequence[int] = PROMPTS,
    num_output: int = NUM_OUTPUT,
) -> list[Answer]:
    """Of all prompts at once, then of all again, from the cache."""
    config = NodeConfig(
        model=str(checkpoint(family)),
        dtype=dtype,
        device=find_device().type,
        ops_backend=backend,
        enforce_eager=eager,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        kv_cache_memory=64 << 20,
    )
    with quiet_transformers():
        model = load_node_model(config)
    core = create_core(config, model)
    results: list[Answer] = []
    for turn in range(2):
        found: dict[str, Answer] = {}
        for index, count in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=num_output, logprobs=0, ignore_eos=True)
            core.add_request(Request(f"{turn}.{index}", _random_tokens(count), params))
        while core.has_work():
            for output in core.step():
                if output.error is not None:
                    raise output.error
                entries = output.logprobs or []
                found.setdefault(output.request_id, []).extend((entry.token_id, entry.logprob) for entry in entries)
        results += [found[f"{turn}.{index}"] for index in range(len(prompts))]
    violations = model.manager.check()
    if violations:
        raise RuntimeError(f"the cache is inconsistent: {violations[0]}")
    return results


def _random_tokens(count: int) -> list[int]:
    tokens: list[int] = torch.randint(6, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    return tokens


@dataclass(frozen=True, slots=True)
class Difference:
    """``num_equal`` of ``num_answers`` answers have the same tokens; ``logprob``: largest difference of a token's
    log-probability, up to the first token that differs and with it."""

    num_answers: int
    num_equal: int
    logprob: float


def compare(one: Sequence[Answer], other: Sequence[Answer]) -> Difference:
    num_equal, largest = 0, 0.0
    for a, b in zip(one, other, strict=True):
        for (token, logprob), (other_token, other_logprob) in zip(a, b, strict=True):
            largest = max(largest, abs(logprob - other_logprob))
            if token != other_token:
                break
        else:
            num_equal += 1
    return Difference(len(one), num_equal, largest)
