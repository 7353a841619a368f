"""What a prefill or decode node is told at its start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.config.command_line import parse_config
from common.config.flag import (
    bool_flag,
    choice_flag,
    flag,
    int_flag,
    number_flag,
    seconds_flag,
    share_flag,
    size_flag,
    urls_flag,
)
from common.config.process import ProcessConfig
from common.config.tiers import SHARED_KINDS, TierSpec, parse_tier
from common.config.values import MIB, parse_device, parse_host, parse_node_name, parse_node_url
from common.errors import ConfigError
from common.names import MAX_NODE_NAME_CHARS

# The names of vLLM where it has the format; the formats are in `common.text.answers.formats`.
TOOL_CALL_PARSERS = (
    "auto",
    "none",
    "hermes",
    "granite",
    "granite4",
    "nemotron_json",
    "jamba",
    "falcon_h1",
    "qwen3_coder",
    "qwen3_xml",
    "lfm2",
    "kimi_k2",
)
MAX_RANKS = 64
"""Of one node: all are processes of one machine."""
REASONING_PARSERS = ("auto", "none", "qwen3", "nemotron_v3", "deepseek_r1")


@dataclass(frozen=True, kw_only=True)
class NodeConfig(ProcessConfig):
    """One prefill or decode node. Both kinds take the same flags."""

    model: str = flag("", "model folder or Hugging Face hub id", metavar="DIR|HUB_ID")
    revision: str | None = flag(None, "revision of a hub model", metavar="REV")
    trust_remote_code: bool = bool_flag(False, "run code that comes with the model")
    generation_config: str = flag(
        "auto",
        "sampling defaults of requests, and the bound max_new_tokens: auto: the model's generation_config.json; vllm: "
        "none; or a folder with that file",
        metavar="auto|vllm|FOLDER",
    )
    trust_request_chat_template: bool = bool_flag(
        False, "requests may bring a chat_template: a program that a sandbox runs, which can take seconds"
    )
    tool_call_parser: str = choice_flag(
        "auto", "how the model writes tool calls; auto: as its chat template shows it", *TOOL_CALL_PARSERS
    )
    reasoning_parser: str = choice_flag(
        "auto", "how the model writes reasoning; auto: as its chat template shows it", *REASONING_PARSERS
    )
    served_model_name: str | None = flag(None, "name in the API (default: the value of --model)")
    port: int = int_flag(8100, "port to listen on (0: any free one)", 0, 65_535)
    advertise_host: str | None = flag(
        None,
        "address at which other nodes reach this one (default: --host; where that is 0.0.0.0 or ::, the address of "
        "this machine's or container's own name)",
        parse=parse_host,
        metavar="ADDR",
    )
    node_name: str | None = flag(
        None,
        f"name in traces and metrics, up to {MAX_NODE_NAME_CHARS} of A-Z a-z 0-9 . _ : - (default: role and port)",
        parse=parse_node_name,
    )
    dtype: str = choice_flag(
        "auto",
        "weights and KV cache; auto: as the checkpoint says, float32 where it says nothing",
        "auto",
        "float32",
        "bfloat16",
        "float16",
    )
    device: str = flag(
        "auto",
        "where the model runs and the cache is; auto: cuda when there is one; cuda: cuda:0",
        parse=parse_device,
        metavar="auto|cpu|cuda|cuda:N",
    )
    ops_backend: str = choice_flag(
        "auto",
        "who runs scans and attention; auto: cpp on a CPU with a compiler, triton on a GPU, else torch",
        "auto",
        "torch",
        "cpp",
        "triton",
    )
    enforce_eager: bool = bool_flag(
        False, "run every decode step through the model's own code, instead of replaying recorded ones (slower)"
    )
    prebuilt_ops: str | None = flag(
        None,
        "folder that python -m common.models.prebuild FOLDER has filled: ops for this CPU are taken from there instead "
        "of being compiled",
        metavar="FOLDER",
    )
    num_threads: int = int_flag(1, "torch threads of this process", 1, 1024)
    tensor_parallel_size: int = int_flag(
        1,
        "processes that compute the model together, each with a part of the weights and of the pools; on a CPU this "
        "gains nothing, --num-threads does",
        1,
        MAX_RANKS,
    )
    seed: int = int_flag(0, "seed of requests that bring none", 0, (1 << 63) - 1)
    max_model_len: int | None = int_flag(None, "longest prompt plus answer in tokens (default: the model's)", 2)
    max_num_seqs: int = int_flag(64, "sequences computed at once", 1, 65_536)
    max_num_batched_tokens: int = int_flag(2048, "tokens of one step; longer prompts are computed in chunks", 1)
    speculative_config: str = flag(
        "",
        'drafts that the model checks several of in one step: JSON with "method" (ngram, suffix, mtp), '
        '"num_speculative_tokens" (7; mtp: 3), "prompt_lookup_min" (2), "prompt_lookup_max" (5); empty: none',
        metavar="JSON",
    )
    async_scheduling: bool = bool_flag(
        False,
        "launch a step of sequences that generate before the tokens of the one before it are known; its input ids are "
        "taken on the device",
    )
    max_queue: int = int_flag(256, "waiting requests beyond which the answer is 429", 0)
    engine_hang_seconds: float = seconds_flag(
        300.0,
        "a step that takes longer has hung (a device that does not answer): clients get an error, and the process ends "
        "with status 3",
        5.0,
    )
    block_size: int = int_flag(16, "tokens of one KV block; any whole number in its bounds", 1, 1024)
    kv_cache_memory: int | None = size_flag(
        None,
        "memory of the block pool and the state pool together (default: 2GiB on a CPU, on a GPU what "
        "--gpu-memory-utilization leaves)",
        1,
    )
    gpu_memory_utilization: float = share_flag(
        "on a GPU: part of its memory that this process takes for weights, a step and the pools; --kv-cache-memory "
        "goes before it",
        0.01,
        1.0,
        0.9,
    )
    enable_prefix_caching: bool = bool_flag(True, "keep computed prefixes for later requests")
    max_image_tokens: int = int_flag(
        4096,
        "most tokens of one image: a larger one is made smaller, as the model's own processor does with its bound; the "
        "same on all nodes of a service",
        1,
        1 << 20,
    )
    mm_encoder_cache_memory: int = size_flag(
        256 * MIB,
        "memory for what the vision tower made of images, so that one that comes again is not computed again",
        0,
    )
    state_memory_share: float | None = share_flag(
        "part of --kv-cache-memory for recurrent states (default: the planner's)", 0.01, 0.99
    )
    mamba_cache_mode: str = choice_flag("auto", "where recurrent states are kept", "auto", "align", "all", "none")
    prefix_cache_retention_interval: int | None = int_flag(
        None,
        "all, align and windows: keep the states of every N-th token only (and the last); auto: keep them besides; "
        "a multiple of --block-size",
        1,
    )
    eviction_policy: str = choice_flag(
        "value",
        "what is evicted first: what saves least computing per byte, or what was not used for longest",
        "value",
        "lru",
    )
    kv_load_failure_policy: str = choice_flag(
        "recompute", "when a prefix could not be pulled: compute it here, or fail the request", "recompute", "fail"
    )
    local_prefill_limit: int | None = int_flag(
        None,
        "recompute: fail the request instead when more tokens than this would have to be computed here (default: "
        "no limit)",
        0,
    )
    kv_lease_seconds: float = seconds_flag(30.0, "how long a finished prompt is held for its reader", 0.05)
    kv_transfer_timeout_seconds: float = seconds_flag(
        30.0, "longest time without progress of a pull that was begun", 0.05
    )
    kv_transfer_verify: str = choice_flag(
        "off",
        "digests of the content, made by its holder and compared by its reader: of a sixteenth of the blocks and the "
        "state, or of all",
        "off",
        "sample",
        "all",
    )
    kv_tier: tuple[TierSpec, ...] = flag(
        (),
        "where prefixes go that leave the cache, to be read back: memory of this node, host:64GiB, a folder of this "
        "machine, disk:/path?size=500GiB, one that nodes share, shared:/path?size=2TiB, or a Mooncake store, "
        "mooncake:master:50051?size=1TiB&lend=64GiB; at most one of each",
        parse=parse_tier,
        many=True,
        metavar="TIER",
    )
    kv_tier_write_rate: int | None = size_flag(
        None, "bytes a second that each tier may be written with on average (default: no bound)", 1
    )
    kv_tier_min_return: float = number_flag(
        0.1, "least probability of being asked for again with which a prefix is written to a tier", 0.0, 1.0
    )
    transfer_backend: str = choice_flag("nixl", "how blocks and states travel", "nixl")
    nixl_backends: tuple[str, ...] = flag(("UCX",), "NIXL back ends", many=True)
    peers: tuple[str, ...] = urls_flag(
        "nodes that this one may pull from (default: loopback only); dns+http://name:port is a node at each address of "
        "the name, or at a name below it",
        parse_node_url,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError("--model is required: a model folder or a hub id", param="--model")
        interval = self.prefix_cache_retention_interval
        if interval is not None and interval % self.block_size:
            option = "--prefix-cache-retention-interval"
            raise ConfigError(f"{option} {interval} is not a multiple of --block-size {self.block_size}", param=option)
        self._check_tiers()
        self._check_ranks()
        if self.async_scheduling and self.speculative_config:
            option = "--async-scheduling"
            raise ConfigError(
                f"{option} and --speculative-config exclude each other: a step cannot be launched before the tokens "
                "that its drafts follow are known",
                param=option,
            )
        if self.local_prefill_limit is not None and self.kv_load_failure_policy != "recompute":
            option = "--local-prefill-limit"
            raise ConfigError(
                f"{option} {self.local_prefill_limit} bounds what is computed here, but --kv-load-failure-policy is "
                f"{self.kv_load_failure_policy}",
                param=option,
            )

    def _check_ranks(self) -> None:
        option, size = "--tensor-parallel-size", self.tensor_parallel_size
        others = {
            f"--device {self.device}": self.device not in ("auto", "cpu"),
            "--kv-tier": bool(self.kv_tier),
            "--async-scheduling": self.async_scheduling,
        }
        for other, is_given in others.items():
            if size > 1 and is_given:
                raise ConfigError(f"{option} {size} does not go with {other}", param=option)

    def _check_tiers(self) -> None:
        option = "--kv-tier"
        for number, tier in enumerate(self.kv_tier):
            reason = None
            if tier.kind in SHARED_KINDS and self.cluster_key_file is None:
                what = "a shared folder" if tier.is_folder else "a store that nodes share"
                reason = f"{what} needs --cluster-key-file: without it anybody who writes there is believed"
            elif tier.kind in [other.kind for other in self.kv_tier[:number]]:
                reason = f"there is another tier of kind {tier.kind}, at most one of each is possible"
            elif tier.path and tier.path in [other.path for other in self.kv_tier[:number]]:
                reason = "another tier has that folder"
            elif not self.enable_prefix_caching:
                reason = "with --no-enable-prefix-caching nothing is kept that could be written"
            if reason is not None:
                raise ConfigError(f"{option} {tier}: {reason}", param=option)


def parse_node_config(argv: Sequence[str], environ: Mapping[str, str], *, role: str, default_port: int) -> NodeConfig:
    """``NodeConfig`` of a prefill or decode node, without a name where there is none and the port is any free one."""
    config = parse_config(NodeConfig, argv, environ, prog=f"tandem {role}", defaults={"port": default_port})
    return with_default_name(config, role)


def with_default_name(config: NodeConfig, role: str) -> NodeConfig:
    """``config``; a node without a name is called after its role and port, once its port is known."""
    if config.node_name is not None or config.port == 0:
        return config
    return dataclasses.replace(config, node_name=f"{role}-{config.port}")
