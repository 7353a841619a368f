"""Settings with which prefix caching cannot work as the user may expect: named in a node's log when it starts.

``tandem up`` shows what its nodes log, so its user reads these too.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.config.node import NodeConfig
from common.kv_cache.planner import CapacityReport
from common.kv_cache.spec import KVCacheConfig


def cache_warnings(config: NodeConfig, cache: KVCacheConfig, report: CapacityReport) -> list[str]:
    """One sentence per setting that keeps prefixes from being found again, or that does nothing."""
    if not config.enable_prefix_caching:
        return list(_without_caching(config))
    found = []
    if cache.has_attention and cache.block_size >= report.max_model_len:
        found.append(
            f"--block-size {cache.block_size} is not below the context of {report.max_model_len} tokens: no block is "
            "ever full, so only exact repeats of a prompt can be found"
        )
    found += _of_states(config, cache, report) if cache.has_state else _of_dense(config)
    return found


def _without_caching(config: NodeConfig) -> Iterator[str]:
    if config.mamba_cache_mode in ("align", "all"):
        yield f"--mamba-cache-mode {config.mamba_cache_mode} does nothing with --no-enable-prefix-caching"
    if config.prefix_cache_retention_interval is not None:
        yield (
            f"--prefix-cache-retention-interval {config.prefix_cache_retention_interval} does nothing with "
            "--no-enable-prefix-caching"
        )


def _of_dense(config: NodeConfig) -> Iterator[str]:
    if config.mamba_cache_mode != "auto":
        yield f"--mamba-cache-mode {config.mamba_cache_mode} does nothing: the model has no recurrent layers"
    if config.state_memory_share is not None:
        yield f"--state-memory-share {config.state_memory_share} does nothing: the model has no recurrent layers"


def _of_states(config: NodeConfig, cache: KVCacheConfig, report: CapacityReport) -> Iterator[str]:
    mode, interval = cache.mamba_cache_mode, config.prefix_cache_retention_interval
    if mode == "none":
        yield (
            "--mamba-cache-mode none keeps no recurrent states: no prompt of this model can be resumed from the cache, "
            "every one is computed from its first token"
        )
        if interval is not None:
            yield f"--prefix-cache-retention-interval {interval} does nothing with --mamba-cache-mode none"
        return
    spare = report.num_resumable_prefixes
    if spare <= report.max_num_seqs:
        yield (
            f"{spare} of {report.num_slots} state slots are left while --max-num-seqs {report.max_num_seqs} sequences "
            "run, less than one kept prefix for each: raise --kv-cache-memory or --state-memory-share, or lower "
            "--max-num-seqs"
        )
    if interval is not None and interval >= report.max_model_len:
        yield (
            f"--prefix-cache-retention-interval {interval} is not below the context of {report.max_model_len} tokens: "
            "no prompt reaches it"
        )
    if mode == "all":
        num_states = report.max_model_len // (interval or cache.block_size)
        if num_states > spare:
            yield (
                f"--mamba-cache-mode all keeps up to {num_states} states of one prompt of {report.max_model_len} "
                f"tokens, {spare} slots are there for them: a longer --prefix-cache-retention-interval or "
                "--mamba-cache-mode auto needs fewer"
            )
