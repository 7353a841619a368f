"""What the proxy is told at its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from common.config.flag import (
    bool_flag,
    choice_flag,
    flag,
    int_flag,
    number_flag,
    seconds_flag,
    share_flag,
    urls_flag,
)
from common.config.process import ProcessConfig
from common.config.values import (
    MAX_TARGET_MS,
    PriorityTargets,
    parse_media_domain,
    parse_node_url,
    parse_origin,
    parse_priority_targets,
)
from common.errors import ConfigError

PLACEMENT_POLICIES = ("cost", "prefix_aware", "least_loaded", "power_of_two", "round_robin")
NODE_KINDS = ("auto", "tandem", "vllm")


@dataclass(frozen=True, kw_only=True)
class ProxyConfig(ProcessConfig):
    """The OpenAI front door: which nodes it drives, how it chooses, what it waits for."""

    port: int = int_flag(8000, "port to listen on (0: any free one)", 0, 65_535)
    prefill: tuple[str, ...] = urls_flag(
        "base URLs of the prefill nodes; dns+http://name:port is a node at each address of the name", parse_node_url
    )
    decode: tuple[str, ...] = urls_flag("base URLs of the decode nodes, or dns+http://name:port", parse_node_url)
    dns_interval_seconds: float = seconds_flag(5.0, "time between two resolutions of a dns+http name", 0.01)
    policy: str = choice_flag(
        "cost", "how a prefill node is chosen; cost: and whether one is needed", *PLACEMENT_POLICIES
    )
    decode_policy: str | None = choice_flag(
        None, "how a decode node is chosen (default: as --policy)", *PLACEMENT_POLICIES
    )
    stream_delay_weight: float = number_flag(
        0.5, "cost: what a second of waiting of each running stream counts beside one of the first token", 0.0, 100.0
    )
    elastic: bool = bool_flag(
        True,
        "cost: a decode node may compute prompts that are new to it, and a prefill node generate, where that is better",
    )
    ttft_target_ms: int | None = int_flag(
        None, "milliseconds in which a request's first token is to come (default: as soon as it can)", 1, MAX_TARGET_MS
    )
    shed_late: bool = bool_flag(
        True,
        "answer 429 to a request with a target for its first token that would come too late behind those before it",
    )
    itl_target_ms: int | None = int_flag(
        None,
        "milliseconds in which each further token is to come: prompts beside it are computed in chunks that leave it "
        "so much time (default: in chunks of a quarter of a step's tokens)",
        1,
        MAX_TARGET_MS,
    )
    priority_targets: tuple[PriorityTargets, ...] = flag(
        (),
        "targets of requests with a priority, in milliseconds, TTFT:ITL@PRIORITY, such as 500:40@-1 or :100@5 "
        "(default: those of all requests)",
        parse=parse_priority_targets,
        many=True,
        metavar="TARGETS",
    )
    prefix_sources: bool = bool_flag(
        True, "tell nodes which others have part of a prompt, so that they pull it instead of computing it"
    )
    session_affinity_seconds: float = seconds_flag(
        0.05, "cost: what staying on the decode node of the session's last turn (X-Session-Id) is worth", 0.0, 60.0
    )
    max_concurrency: int = int_flag(
        1024, "answers in flight (n of a request, for each prompt) beyond which requests wait", 1, 100_000
    )
    max_queue_size: int = int_flag(
        1024, "waiting requests beyond which the answer is 429 (0: nobody waits)", 0, 100_000
    )
    max_queue_seconds: float = seconds_flag(60.0, "longest wait of a request for its turn", 0.05)
    queue_aging_seconds: float = seconds_flag(
        30.0, "waiting for so long counts as one level of priority (0: priorities are absolute)", 0.0
    )
    api_key_limits_file: str | None = flag(
        None,
        "JSON file with limits per API key: requests at once, requests and tokens a minute, best priority",
        metavar="FILE",
    )
    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "hosts, HOST or HOST:PORT, from which the proxy fetches images that requests name by http or https URLs "
        "(default: none; images come as data URLs)",
        parse=parse_media_domain,
        many=True,
        metavar="HOST",
    )
    allowed_origins: tuple[str, ...] = flag(
        (),
        "origins, SCHEME://HOST[:PORT], whose web pages may call the service from a browser, or * for all "
        "(default: none)",
        parse=parse_origin,
        many=True,
        metavar="ORIGIN",
    )
    image_fetch_seconds: float = seconds_flag(10.0, "longest time to fetch an image, redirects included", 0.05, 300.0)
    body_timeout_seconds: float = seconds_flag(30.0, "longest wait for a request's body", 0.05)
    ssl_certfile: str | None = flag(None, "file with the certificate chain (PEM): serve HTTPS", metavar="FILE")
    ssl_keyfile: str | None = flag(
        None, "file with the certificate's private key (default: in --ssl-certfile)", metavar="FILE"
    )
    prefix_index_entries: int = int_flag(
        500_000, "cached blocks and states of all nodes that placement knows, 150 bytes each", 1_000, 100_000_000
    )
    connect_timeout_seconds: float = seconds_flag(2.0, "longest wait for a node to accept a connection", 0.05)
    prefill_timeout_seconds: float = seconds_flag(600.0, "longest wait for the prefill leg's answer", 0.05)
    stream_idle_timeout_seconds: float = seconds_flag(300.0, "longest silence of a decode node that streams", 0.05)
    whole_answer_timeout_seconds: float = seconds_flag(
        21_600.0,
        "longest wait for an answer that is no stream, which comes with its last token; a node that is dead or frozen "
        "is found out by --node-silence-seconds long before",
        0.05,
    )
    health_interval_seconds: float = seconds_flag(1.0, "time between two health probes of a node (/ready)", 0.01)
    node_silence_seconds: float = seconds_flag(
        5.0,
        "for how long a node may answer no health probe and send nothing else: then requests that have heard nothing "
        "from it for as long fail, or go on elsewhere",
        0.05,
    )
    retry_budget: float = share_flag(
        "legs that are sent again before the first byte, as a share of the requests of the last 10 s, 10 more allowed; "
        "0: none",
        0,
        1,
        default=0.2,
    )
    breaker_failures: int = int_flag(5, "failed legs in a row after which a node gets none for a while", 1, 1000)
    breaker_open_seconds: float = seconds_flag(30.0, "how long it gets none; then one leg probes it", 0.05)
    migration_limit: int = int_flag(
        0,
        "how often a stream goes on at another decode node when its own breaks after the first byte; 0: never",
        0,
        100,
    )
    node_kind: str = choice_flag(
        "auto",
        "what the nodes are; vllm: servers with vLLM's kv_transfer_params; auto: vllm where there is no /ready",
        *NODE_KINDS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.decode:
            raise ConfigError("--decode is required: at least one decode node's URL", param="--decode")
        both = [url for url in self.prefill if url in self.decode]
        if both:
            raise ConfigError(f"--prefill and --decode both name {both[0]}: a node has one role", param="--decode")
        if self.ssl_keyfile is not None and not self.ssl_certfile:
            raise ConfigError(
                f"--ssl-keyfile {self.ssl_keyfile} has no --ssl-certfile beside it: HTTPS needs a certificate",
                param="--ssl-keyfile",
            )
        twice = [each for each, count in Counter(rule.priority for rule in self.priority_targets).items() if count > 1]
        if twice:
            raise ConfigError(
                f"--priority-targets has more than one rule for priority {twice[0]}", param="--priority-targets"
            )
