"""What a node says about its speed and its work, for the proxy's estimates (``proxy.nodes.load`` reads it)."""

from __future__ import annotations

from typing import Any

from common.engine.rates import LinearCost
from common.node.node import Node


def load_report(node: Node) -> dict[str, Any]:
    """The body of ``GET /internal/v1/load``. A number is null until it was measured. Event loop only; does not wait
    for the running step."""
    core, cache, layout = node.core, node.model.cache_config, node.model.storage.layout
    groups = zip(cache.geometry.attention_groups, layout.group_block_bytes, strict=True)
    # What a group with a window transfers does not grow with the prompt.
    block_bytes = sum(num_bytes for group, num_bytes in groups if not group.window)
    return {
        "running": core.num_running,
        "waiting": node.admission.num_waiting,
        "uncomputed_prompt_tokens": core.num_uncomputed_prompt_tokens,
        "max_num_seqs": node.config.max_num_seqs,
        "max_num_batched_tokens": node.config.max_num_batched_tokens,
        "prefill": _cost(core.step_times.prefill, "step", "token"),
        "decode_step_seconds": core.step_times.decode_s,
        "pull": _cost(node.peer_reader.pull_times, "pull", "byte"),
        "kv_bytes_per_token": block_bytes / cache.block_size,
        "state_bytes": layout.slot_bytes,
        "tiers": node.tiers.read_rates() if node.tiers is not None else {},
    }


def _cost(cost: LinearCost, fixed: str, unit: str) -> dict[str, float] | None:
    line = cost.line
    if line is None:
        return None
    return {
        f"seconds_per_{fixed}": line.fixed_s,
        f"seconds_per_{unit}": line.unit_s,
        "observations": line.weight,
        "age_seconds": cost.age_s,
    }
