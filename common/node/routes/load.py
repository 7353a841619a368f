"""What a node says about its speed and its work, for the proxy's estimates (``proxy.nodes.load`` reads it)."""

from __future__ import annotations

from typing import Any

from common.engine.rates import Line
from common.kv_cache.layout import transfer_bytes
from common.node.node import Node


def load_report(node: Node) -> dict[str, Any]:
    """The body of ``GET /internal/v1/load``. A number is null until it was measured. Event loop only; does not wait
    for the running step."""
    core, cache = node.core, node.model.cache_config
    steps, pulls = core.step_model, node.peer_reader.pull_times
    decode = steps.decode_line
    kv_bytes, state_bytes = transfer_bytes(cache.geometry, cache.block_size)
    return {
        "running": core.num_running,
        "waiting": node.admission.num_waiting,
        "uncomputed_prompt_tokens": core.num_uncomputed_prompt_tokens,
        "max_num_seqs": node.config.max_num_seqs,
        "max_num_batched_tokens": node.config.max_num_batched_tokens,
        "prefill": _cost(steps.prompt_line, steps.age_s(of_prompts=True), "step", "token"),
        "decode": _cost(decode, steps.age_s(of_prompts=False), "step", "row"),
        "prompt_totals": dict(zip(("steps", "tokens", "rows", "seconds"), steps.prompt_totals, strict=True)),
        "decode_totals": dict(zip(("steps", "rows", "seconds"), steps.decode_totals, strict=True)),
        "decode_step_seconds": None if decode is None else decode.fixed_s + decode.unit_s * max(1, core.num_running),
        "seconds_per_row_beside_prompts": steps.prompt_row_s,
        "pull": _cost(pulls.line, pulls.age_s, "pull", "byte"),
        "kv_bytes_per_token": kv_bytes,
        "state_bytes": state_bytes,
        "tiers": node.tiers.read_rates() if node.tiers is not None else {},
    }


def _cost(line: Line | None, age_s: float, fixed: str, unit: str) -> dict[str, float] | None:
    if line is None:
        return None
    return {
        f"seconds_per_{fixed}": line.fixed_s,
        f"seconds_per_{unit}": line.unit_s,
        "observations": line.weight,
        "age_seconds": age_s,
    }
