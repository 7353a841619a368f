"""What each process is told at its start: one frozen dataclass per kind of process, one field per flag.

The fields are the flag table. A field's name is the flag's name (``max_num_seqs`` = ``--max-num-seqs`` =
``TANDEM_MAX_NUM_SEQS``), its metadata holds parsing, bounds and help. Argument parsers, environment variables, the argv
of child processes and the table in the documentation are all read from there, so they cannot disagree.

Life cycle: 1 ``parse_config`` reads argv and environment (a flag wins over its variable; unknown flags are refused,
unknown variables ignored), 2 construction validates every value once and raises ``ConfigError`` naming flag, value and
bound, 3 the object is passed on and never changes. Secrets are not in here: only the names of the files that hold them.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import os
import re
import stat
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from common.errors import ConfigError

logger = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_SIZE_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_SIZE_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
_FALSE_WORDS = frozenset({"0", "false", "no", "off"})


def parse_size(text: str) -> int:
    """Bytes of ``2GiB``, ``512 MiB``, ``1.5gb`` or a plain number. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError("not a size such as 512MiB, 2GiB or 1000000")
    return int(float(match[1]) * _SIZE_UNITS[match[2]]) if "." in match[1] else int(match[1]) * _SIZE_UNITS[match[2]]


def format_size(num_bytes: int) -> str:
    """The shortest exact text that ``parse_size`` reads back to ``num_bytes``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


def parse_bool(text: str) -> bool:
    """``1 true yes on`` and ``0 false no off`` in any case. Raises ValueError."""
    word = text.strip().lower()
    if word not in _TRUE_WORDS | _FALSE_WORDS:
        raise ValueError("not one of true, false, 1, 0, yes, no, on, off")
    return word in _TRUE_WORDS


def parse_int(text: str) -> int:
    try:
        return int(text.strip())
    except ValueError:
        raise ValueError("not a whole number") from None


def parse_seconds(text: str) -> float:
    try:
        value = float(text.strip())
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("not a number of seconds")
    return value


def format_seconds(seconds: float) -> str:
    return repr(float(seconds)).removesuffix(".0")


def parse_share(text: str) -> float:
    """A number such as ``0.25``. Raises ValueError."""
    try:
        value = float(text.strip())
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("not a number")
    return value


def parse_url(text: str) -> str:
    """An ``http(s)://host[:port]`` base URL without its trailing slash. Raises ValueError."""
    url = text.strip().rstrip("/")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("not a base URL such as http://127.0.0.1:8100")
    if parts.username is not None or parts.port == 0:  # reading .port raises ValueError when it is out of range
        raise ValueError("not a base URL such as http://127.0.0.1:8100")
    return url


DNS_PREFIX = "dns+"


def parse_node_url(text: str) -> str:
    """A base URL, or ``dns+http://name:port``: a node at each address of the name. Raises ValueError."""
    text = text.strip()
    if not text.startswith(DNS_PREFIX):
        return parse_url(text)
    url = parse_url(text.removeprefix(DNS_PREFIX))
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or parts.path:
        # Certificates are for names, and here addresses are called.
        raise ValueError(f"not a name to resolve such as {DNS_PREFIX}http://tandem-decode:8200")
    return DNS_PREFIX + url


@dataclass(frozen=True, slots=True)
class Flag:
    """How one configuration field is written, read and bounded.

    ``name`` is filled in from the field. ``many`` flags hold a tuple of parsed words. ``minimum`` and ``maximum`` are
    inclusive.
    """

    help: str
    name: str = ""
    default: Any = None
    parse: Callable[[str], Any] = str
    format: Callable[[Any], str] = str
    metavar: str = "NAME"
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    many: bool = False

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "TANDEM_" + self.name.upper()

    @property
    def is_bool(self) -> bool:
        return self.parse is parse_bool

    def read(self, raw: Any, source: str) -> Any:
        """Parse and check what argparse or the environment gave; ``source`` names it in errors."""
        if self.is_bool and isinstance(raw, bool):
            return raw
        words = raw if isinstance(raw, list) else re.split(r"[\s,]+", raw.strip()) if self.many else [raw]
        values = []
        for word in words:
            try:
                values.append(self.parse(word))
            except ValueError as exc:
                raise ConfigError(f"{source} {word!r} is {exc}", param=self.option) from exc
        value = tuple(dict.fromkeys(values)) if self.many else values[0]
        self.check(value, source)
        return value

    def check(self, value: Any, source: str | None = None) -> None:
        """Raise ConfigError when a parsed value breaks this flag's bounds."""
        source = source or self.option
        for item in value if self.many else (value,):
            if item is None:
                continue
            if self.choices and item not in self.choices:
                raise ConfigError(f"{source} {item} is not one of {', '.join(self.choices)}", param=self.option)
            if self.minimum is not None and item < self.minimum:
                bound = self.format(self.minimum)
                raise ConfigError(f"{source} {self.format(item)} is below its minimum of {bound}", param=self.option)
            if self.maximum is not None and item > self.maximum:
                bound = self.format(self.maximum)
                raise ConfigError(f"{source} {self.format(item)} is above its maximum of {bound}", param=self.option)

    def argv(self, value: Any) -> list[str]:
        """The words that give ``value`` on a command line; empty for None and for empty lists."""
        if value is None or (self.many and not value):
            return []
        if self.is_bool:
            return [self.option if value else "--no-" + self.option[2:]]
        if self.many:
            return [self.option, *map(self.format, value)]
        return [f"{self.option}={self.format(value)}"]


def flag(default: Any, help: str, **settings: Any) -> Any:
    """A dataclass field that is also a command-line flag; ``settings`` are those of ``Flag``."""
    return dataclasses.field(default=default, metadata={"flag": Flag(help=help, default=default, **settings)})


def size_flag(default: int | None, help: str, minimum: int, maximum: int | None = None) -> Any:
    return flag(default, help, parse=parse_size, format=format_size, metavar="SIZE", minimum=minimum, maximum=maximum)


def int_flag(default: int | None, help: str, minimum: int, maximum: int | None = None) -> Any:
    return flag(default, help, parse=parse_int, metavar="N", minimum=minimum, maximum=maximum)


def seconds_flag(default: float, help: str, minimum: float, maximum: float = 86_400) -> Any:
    return flag(
        default, help, parse=parse_seconds, format=format_seconds, metavar="S", minimum=minimum, maximum=maximum
    )


def share_flag(help: str, minimum: float, maximum: float, default: float | None = None) -> Any:
    return flag(default, help, parse=parse_share, format=repr, metavar="X", minimum=minimum, maximum=maximum)


def number_flag(default: float, help: str, minimum: float, maximum: float) -> Any:
    return flag(default, help, parse=parse_share, format=repr, metavar="X", minimum=minimum, maximum=maximum)


def bool_flag(default: bool, help: str) -> Any:
    return flag(default, help, parse=parse_bool)


def choice_flag(default: str | None, help: str, *choices: str) -> Any:
    return flag(default, help, choices=choices, metavar="|".join(choices))


def urls_flag(help: str, parse: Callable[[str], str] = parse_url) -> Any:
    return flag((), help, parse=parse, many=True, metavar="URL")


DRAIN_HELP = "longest time that admitted requests, and leases of a prefill node, get to end after SIGTERM"
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
OTLP_HELP = "collector that gets a trace of each request over OTLP/HTTP, such as http://HOST:4318 (default: no tracing)"
PLACEMENT_POLICIES = ("cost", "prefix_aware", "least_loaded", "power_of_two", "round_robin")
NODE_KINDS = ("auto", "tandem", "vllm")


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One prefill or decode node. Both kinds take the same flags."""

    model: str = flag("", "model folder or Hugging Face hub id", metavar="DIR|HUB_ID")
    revision: str | None = flag(None, "revision of a hub model", metavar="REV")
    trust_remote_code: bool = bool_flag(False, "run code that comes with the model")
    served_model_name: str | None = flag(None, "name in the API (default: the value of --model)")
    host: str = flag("127.0.0.1", "address to listen on", metavar="ADDR")
    port: int = int_flag(8100, "port to listen on (0: any free one)", 0, 65_535)
    advertise_host: str | None = flag(
        None, "address at which other nodes reach this one (default: --host)", metavar="ADDR"
    )
    node_name: str | None = flag(None, "name in traces and metrics (default: role and port)")
    dtype: str = choice_flag(
        "auto", "weights and KV cache; auto: as the checkpoint says", "auto", "float32", "bfloat16", "float16"
    )
    device: str = choice_flag("auto", "where the model runs; auto: cuda when there is one", "auto", "cpu", "cuda")
    ops_backend: str = choice_flag(
        "auto", "who runs scans and attention; auto: cpp on a CPU with a compiler, else torch", "auto", "torch", "cpp"
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
    seed: int = int_flag(0, "seed of requests that bring none", 0, (1 << 63) - 1)
    max_model_len: int | None = int_flag(None, "longest prompt plus answer in tokens (default: the model's)", 2)
    max_num_seqs: int = int_flag(64, "sequences computed at once", 1, 65_536)
    max_num_batched_tokens: int = int_flag(2048, "tokens of one step; longer prompts are computed in chunks", 1)
    max_queue: int = int_flag(256, "waiting requests beyond which the answer is 429", 0)
    max_body_bytes: int = size_flag(16 * MIB, "largest request body", 1024, GIB)
    block_size: int = int_flag(16, "tokens of one KV block; any whole number in its bounds", 1, 1024)
    kv_cache_memory: int = size_flag(2 * GIB, "memory of the block pool and the state pool together", 1)
    enable_prefix_caching: bool = bool_flag(True, "keep computed prefixes for later requests")
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
    transfer_backend: str = choice_flag("nixl", "how blocks and states travel", "nixl")
    nixl_backends: tuple[str, ...] = flag(("UCX",), "NIXL back ends", many=True)
    drain_timeout_seconds: float = seconds_flag(30.0, DRAIN_HELP, 0.0, 3600.0)
    peers: tuple[str, ...] = urls_flag("nodes that this one may pull from (default: loopback only)")
    api_key_file: str | None = flag(None, "file with the API keys that clients may use, one a line", metavar="FILE")
    cluster_key_file: str | None = flag(None, "file with the key of internal routes", metavar="FILE")
    log_level: str = choice_flag("info", "least severe messages to log", *LOG_LEVELS)
    log_format: str = choice_flag("text", "log lines for people, or one JSON object a line", *LOG_FORMATS)
    otlp_traces_endpoint: str | None = flag(None, OTLP_HELP, parse=parse_url, metavar="URL")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.model:
            raise ConfigError("--model is required: a model folder or a hub id", param="--model")
        interval = self.prefix_cache_retention_interval
        if interval is not None and interval % self.block_size:
            option = "--prefix-cache-retention-interval"
            raise ConfigError(f"{option} {interval} is not a multiple of --block-size {self.block_size}", param=option)
        if self.local_prefill_limit is not None and self.kv_load_failure_policy != "recompute":
            option = "--local-prefill-limit"
            raise ConfigError(
                f"{option} {self.local_prefill_limit} bounds what is computed here, but --kv-load-failure-policy is "
                f"{self.kv_load_failure_policy}",
                param=option,
            )


@dataclass(frozen=True, kw_only=True)
class ProxyConfig:
    """The OpenAI front door: which nodes it drives, how it chooses, what it waits for."""

    host: str = flag("127.0.0.1", "address to listen on", metavar="ADDR")
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
    prefix_sources: bool = bool_flag(
        True, "tell nodes which others have part of a prompt, so that they pull it instead of computing it"
    )
    session_affinity_seconds: float = seconds_flag(
        0.05, "cost: what staying on the decode node of the session's last turn (X-Session-Id) is worth", 0.0, 60.0
    )
    max_concurrency: int = int_flag(1024, "requests in flight beyond which others wait", 1, 100_000)
    max_queue_size: int = int_flag(
        1024, "waiting requests beyond which the answer is 429 (0: nobody waits)", 0, 100_000
    )
    max_queue_seconds: float = seconds_flag(60.0, "longest wait of a request for its turn", 0.05)
    queue_aging_seconds: float = seconds_flag(
        30.0, "waiting for so long counts as one level of priority (0: priorities are absolute)", 0.0
    )
    api_key_limits_file: str | None = flag(
        None, "JSON file with limits per API key: requests at once, requests and tokens a minute", metavar="FILE"
    )
    max_body_bytes: int = size_flag(16 * MIB, "largest request body", 1024, GIB)
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
    stream_idle_timeout_seconds: float = seconds_flag(300.0, "longest silence of a decode node", 0.05)
    health_interval_seconds: float = seconds_flag(1.0, "time between looks at a node's /ready", 0.01)
    node_silence_seconds: float = seconds_flag(
        5.0,
        "for how long a node may answer no look at it and send nothing else: then requests that have heard nothing "
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
    drain_timeout_seconds: float = seconds_flag(30.0, DRAIN_HELP, 0.0, 3600.0)
    api_key_file: str | None = flag(None, "file with the API keys that clients may use, one a line", metavar="FILE")
    cluster_key_file: str | None = flag(None, "file with the key of internal routes", metavar="FILE")
    log_level: str = choice_flag("info", "least severe messages to log", *LOG_LEVELS)
    log_format: str = choice_flag("text", "log lines for people, or one JSON object a line", *LOG_FORMATS)
    otlp_traces_endpoint: str | None = flag(None, OTLP_HELP, parse=parse_url, metavar="URL")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.decode:
            raise ConfigError("--decode is required: at least one decode node's URL", param="--decode")


def flags_of(config_class: type) -> tuple[Flag, ...]:
    """The flags of a configuration class, in the order of its fields."""
    return tuple(
        dataclasses.replace(field.metadata["flag"], name=field.name)
        for field in dataclasses.fields(config_class)
        if "flag" in field.metadata
    )


def check_fields(config: Any) -> None:
    """Raise ConfigError for the first field of ``config`` that breaks its flag's bounds."""
    for each in flags_of(type(config)):
        each.check(getattr(config, each.name))


def add_flags(parser: argparse._ActionsContainer, flags: Iterable[Flag]) -> None:
    """Declare ``flags`` on ``parser``. Values stay raw text; ``read_values`` parses them."""
    for each in flags:
        settings: dict[str, Any] = {"dest": each.name, "default": argparse.SUPPRESS, "help": _help_text(each)}
        if each.is_bool:
            parser.add_argument(each.option, action=argparse.BooleanOptionalAction, **settings)
        elif each.many:
            parser.add_argument(each.option, action="extend", nargs="+", metavar=each.metavar, **settings)
        else:
            parser.add_argument(each.option, metavar=each.metavar, **settings)


def read_values(flags: Iterable[Flag], given: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Field values that argv or, failing that, the environment gives; fields that neither gives are left out."""
    values: dict[str, Any] = {}
    for each in flags:
        if hasattr(given, each.name):
            values[each.name] = each.read(getattr(given, each.name), each.option)
        elif environ.get(each.variable, "").strip():
            values[each.name] = each.read(environ[each.variable], f"{each.option} (from {each.variable})")
    return values


def parse_config(
    config_class: type[ConfigT],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    defaults: Mapping[str, Any] | None = None,
) -> ConfigT:
    """Read one process's configuration.

    ``defaults`` override the class's own, for what depends on the role (the port). Exits with status 2 on an unknown
    flag, as argparse does; raises ConfigError on a bad value.
    """
    parser = argparse.ArgumentParser(prog=prog, description=_first_line(config_class), allow_abbrev=False)
    flags = [
        dataclasses.replace(each, default=(defaults or {}).get(each.name, each.default))
        for each in flags_of(config_class)
    ]
    add_flags(parser, flags)
    values = read_values(flags, parser.parse_args(argv), environ)
    return config_class(**{**(defaults or {}), **values})


def parse_node_config(argv: Sequence[str], environ: Mapping[str, str], *, role: str, default_port: int) -> NodeConfig:
    """``NodeConfig`` of a prefill or decode node; a node without a name is called after its role and port."""
    config = parse_config(NodeConfig, argv, environ, prog=f"tandem {role}", defaults={"port": default_port})
    if config.node_name is None:
        config = dataclasses.replace(config, node_name=f"{role}-{config.port}")
    return config


def to_argv(config: Any) -> list[str]:
    """The command line that ``parse_config`` reads back to an equal ``config``, every effective flag spelled out."""
    return [word for each in flags_of(type(config)) for word in each.argv(getattr(config, each.name))]


def flag_table(config_class: type) -> str:
    """The class's flags as a Markdown table for the documentation."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for each in flags_of(config_class):
        default = _default_text(each)
        usage = f"{each.option}/--no-{each.option[2:]}" if each.is_bool else f"{each.option} {each.metavar}"
        usage = usage.replace("|", "\\|")
        rows.append(f"| `{usage}` | {f'`{default}`' if default else ''} | {each.help}{_bounds_text(each)} |")
    return "\n".join(rows) + "\n"


def read_key_file(path: str, option: str) -> tuple[str, ...]:
    """The keys in a file, one a line; blank lines and lines that start with ``#`` do not count. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                logger.warning("%s %s can be read by every user of this machine: chmod o-r", option, path)
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise ConfigError(f"{option} {path}: {reason}", param=option) from exc
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{option} {path} holds no key", param=option)
    return keys


def _first_line(config_class: type) -> str:
    return (config_class.__doc__ or "").strip().splitlines()[0]


def _default_text(each: Flag) -> str:
    if each.default in (None, (), ""):
        return ""
    if each.is_bool:
        return "on" if each.default else "off"
    return " ".join(map(each.format, each.default)) if each.many else str(each.format(each.default))


def _bounds_text(each: Flag) -> str:
    if each.minimum is None:
        return ""
    lower = each.format(each.minimum)
    return f" ({lower} or more)" if each.maximum is None else f" ({lower} to {each.format(each.maximum)})"


def _help_text(each: Flag) -> str:
    default = _default_text(each)
    text = each.help + _bounds_text(each) + (f" [default: {default}]" if default else "")
    return text.replace("%", "%%")
