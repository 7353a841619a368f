"""Engines in process on real tiny models, and requests for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from common.config.node import NodeConfig
from common.engine.core import EngineCore
from common.engine.outputs import RequestOutput
from common.node.runtime import NodeModel, create_core
from common.request import Request, SamplingParams
from tests.support.models import VOCAB_SIZE, checkpoint
from tests.support.shared_models import load_node_model

SMALL_POOL = {"kv_cache_memory": 1 << 20, "max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 48}


def engine(family: str = "granitemoehybrid", **flags: Any) -> tuple[EngineCore, NodeModel]:
    config = NodeConfig(model=str(checkpoint(family)), dtype="float32", device="cpu", **{**SMALL_POOL, **flags})
    model = load_node_model(config)
    return create_core(config, model), model


def request(name: str, prompt: list[int], *, num_forks: int = 1, remote: Any = None, **sampling: Any) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling})
    return Request(name, prompt, params, num_forks=num_forks, remote=remote, arrival_s=0.0)


def tokens(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, VOCAB_SIZE) for _ in range(num_tokens)]


def run(core: EngineCore, max_steps: int = 4000) -> Iterator[list[RequestOutput]]:
    for _ in range(max_steps):
        if not core.has_work():
            return
        yield core.step()
    raise AssertionError(f"work left after {max_steps} steps")


def collect(core: EngineCore) -> dict[tuple[str, int], list[int]]:
    """Token ids of every continuation, by (request, fork)."""
    out: dict[tuple[str, int], list[int]] = {}
    for outputs in run(core):
        for output in outputs:
            assert output.error is None
            out.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return out


def used(model: NodeModel) -> tuple[int, int, int, int]:
    """Blocks and slots that somebody holds, leases and sequences: all 0 when nothing runs."""
    stats = model.manager.stats()
    pools = (stats.blocks, stats.slots)
    busy = [sum(n for state, n in pool.items() if state not in ("free", "cached")) for pool in pools]
    return busy[0], busy[1], stats.leases_active, stats.num_sequences


def prompt_of(seed: int) -> list[int]:
    """Prompts of very different lengths; every third one shares its first 40 tokens with the others."""
    own = tokens(seed, [1, 15, 16, 17, 33, 100, 150, 7, 64, 48, 90, 120][seed])
    return tokens(99, 40) + own if seed % 3 == 0 else own
