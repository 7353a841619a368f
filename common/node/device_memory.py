"""How much of a GPU the pools get when no flag says it: what ``--gpu-memory-utilization`` leaves.

1 the weights are loaded, 2 a step of the largest size runs on pools just large enough, which shows what a step takes,
3 the pools get the rest of this process's share. Other processes on the same GPU have shares of their own; what they
use is not taken from this one's, but must be free.
"""

from __future__ import annotations

import itertools
import logging

import torch

from common.config.node import NodeConfig
from common.engine.model_runner import ModelRunner
from common.engine.plan import Segment, StepPlan
from common.errors import ConfigError
from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.sequences.allocation import BlockTable
from common.kv_cache.spec import KVCacheConfig
from common.models.loading.loader import LoadedModel

logger = logging.getLogger(__name__)

OPTION = "--gpu-memory-utilization"
CONTEXT_BYTES = 1 << 30
"""What CUDA, its libraries and UCX take of a GPU beside torch's allocator: 0.5 to 0.8 GB, which CUDA does not tell by
process."""


def pool_bytes(config: NodeConfig, loaded: LoadedModel, max_model_len: int) -> int:
    """Bytes for the pools of a node whose weights are on a GPU.

    Raises:
        ConfigError: nothing is left, or others use what would be; with all numbers.
    """
    device, share = loaded.device, config.gpu_memory_utilization
    step_bytes = measure_step(
        loaded,
        num_tokens=config.max_num_batched_tokens,
        num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=config.block_size,
    )
    image_bytes = config.mm_encoder_cache_memory if loaded.tower is not None else 0
    weight_bytes: int = torch.cuda.memory_reserved(device)
    total_bytes: int
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    taken_bytes = int(total_bytes * share)
    pools = taken_bytes - weight_bytes - CONTEXT_BYTES - step_bytes - image_bytes
    parts = [
        f"{_gib(weight_bytes)} for weights",
        f"{_gib(step_bytes)} for a step of {config.max_num_batched_tokens} tokens",
        f"{_gib(CONTEXT_BYTES)} for CUDA",
        *([f"{_gib(image_bytes)} for images"] if image_bytes else []),
    ]
    numbers = f"{OPTION} {share:g} of {device}'s {_gib(total_bytes)} is {_gib(taken_bytes)}: {', '.join(parts)}"
    if pools <= 0:
        raise ConfigError(f"{numbers}: nothing is left for the pools, {_gib(-pools)} are missing", param=OPTION)
    if pools + step_bytes + image_bytes > free_bytes:
        raise ConfigError(
            f"{numbers}, {_gib(pools)} for the pools; but only {_gib(free_bytes)} are free, other processes use the "
            f"rest: lower {OPTION}, or give --kv-cache-memory",
            param=OPTION,
        )
    logger.info("%s, %s for the pools", numbers, _gib(pools))
    return pools


def measure_step(loaded: LoadedModel, *, num_tokens: int, num_seqs: int, max_model_len: int, block_size: int) -> int:
    """The most bytes that torch's allocator takes beyond what it has while prompts of ``num_tokens`` tokens together
    run in one step, and ``num_seqs`` rows are sampled from. The allocator keeps nothing of them."""
    device, geometry = loaded.device, loaded.geometry
    lengths = [min(max_model_len, num_tokens - start) for start in range(0, num_tokens, max_model_len)]
    block_ids, slot_ids = itertools.count(1), itertools.count(1)
    groups = range(len(geometry.attention_groups))
    segments = []
    for length in lengths:
        blocks = list(itertools.islice(block_ids, -(-length // block_size)))
        tables = [BlockTable(blocks) for _ in groups]
        slot = next(slot_ids) if geometry.state_layers else 0
        segments.append(Segment("memory", [0] * length, 0, tables, 0, slot))
    cache = KVCacheConfig(
        geometry=geometry,
        block_size=block_size,
        num_blocks=(next(block_ids),) * len(groups),
        num_slots=next(slot_ids),
        root_key=b"",
    )
    runner = ModelRunner(loaded, KVStorage(cache, device), cache)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before: int = torch.cuda.memory_reserved(device)
    rows = runner.forward(StepPlan(segments))
    # As for top-p: sorted, with their places.
    runner.logits(rows[0].expand(num_seqs, -1)).sort(dim=-1)
    torch.cuda.synchronize(device)
    peak: int = torch.cuda.max_memory_reserved(device)
    del runner, rows
    torch.cuda.empty_cache()
    return peak - before


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
