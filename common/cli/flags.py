"""The flags of ``tandem up``: its own, and those that it hands to the processes it starts.

A flag that both a node and the proxy know (keys, log level, body limit) is given once and goes to both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.config.command_line import CommandParser, add_flags, read_values
from common.config.flag import Flag, check_fields, flag, flags_of, int_flag, seconds_flag
from common.config.node import NodeConfig
from common.config.proxy import ProxyConfig
from common.errors import ConfigError

NODE_HOST = "127.0.0.1"
"""Address of the nodes: only the proxy is for others."""
MAX_NODES = 100
"""Nodes of one kind at most, so that the two ranges of ports cannot meet."""
PREFILL_PORT_OFFSET = MAX_NODES
DECODE_PORT_OFFSET = 2 * MAX_NODES

GPU_SHARE = NodeConfig.gpu_memory_utilization
"""Of a GPU's memory, for all nodes on it together."""

# Set by `tandem up` itself, for each process.
_OWN_NODE_FLAGS = frozenset({"model", "host", "port", "advertise_host", "node_name", "peers"})
_OWN_PROXY_FLAGS = frozenset({"host", "port", "prefill", "decode"})


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """Proxy, prefill nodes and decode nodes on this machine; node and proxy flags are handed on.

    ``node`` and ``proxy`` hold the given values of ``NodeConfig`` and ``ProxyConfig`` fields. Nodes listen on loopback.
    """

    model: str | None = flag(
        None, "model folder or Hugging Face hub id (default: a small built-in model)", metavar="DIR|HUB_ID"
    )
    prefill_nodes: int = int_flag(1, "number of prefill nodes, on ports --port + 100 and up", 0, MAX_NODES)
    decode_nodes: int = int_flag(1, "number of decode nodes, on ports --port + 200 and up", 1, MAX_NODES)
    host: str = flag("127.0.0.1", "address of the proxy", metavar="ADDR")
    port: int = int_flag(8000, "port of the proxy", 1, 65_535 - DECODE_PORT_OFFSET - MAX_NODES)
    startup_timeout_seconds: float = seconds_flag(900.0, "longest wait for all processes to be ready", 0.1)
    node: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    proxy: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        self.node_configs("any")
        self.proxy_config()

    def prefill_ports(self) -> range:
        return range(self.port + PREFILL_PORT_OFFSET, self.port + PREFILL_PORT_OFFSET + self.prefill_nodes)

    def decode_ports(self) -> range:
        return range(self.port + DECODE_PORT_OFFSET, self.port + DECODE_PORT_OFFSET + self.decode_nodes)

    def node_configs(self, model: str, num_gpus: int = 0) -> list[tuple[str, NodeConfig]]:
        """(role, configuration) of each node, prefill nodes first. With ``num_gpus`` each has a GPU of its own, as far
        as there are, unless ``--device`` says which; those that share one share the part of its memory that one node
        would take."""
        ports = [("prefill", port) for port in self.prefill_ports()]
        ports += [("decode", port) for port in self.decode_ports()]
        device = self.node.get("device", "auto")
        is_open = num_gpus > 0 and device in ("auto", "cuda")
        devices = [f"cuda:{index % num_gpus}" if is_open else device for index in range(len(ports))]
        configs = []
        for (role, port), device in zip(ports, devices, strict=True):
            settings = {**self.node, "device": device}
            num_sharing = devices.count(device)
            if device.startswith("cuda") and num_sharing > 1:
                settings.setdefault("gpu_memory_utilization", GPU_SHARE / num_sharing)
            settings |= {"model": model, "host": NODE_HOST, "port": port, "node_name": f"{role}-{port}"}
            configs.append((role, NodeConfig(**settings)))
        return configs

    def proxy_config(self) -> ProxyConfig:
        return ProxyConfig(
            **self.proxy,
            host=self.host,
            port=self.port,
            prefill=tuple(f"http://{NODE_HOST}:{port}" for port in self.prefill_ports()),
            decode=tuple(f"http://{NODE_HOST}:{port}" for port in self.decode_ports()),
        )


def node_flags() -> list[Flag]:
    return [each for each in flags_of(NodeConfig) if each.name not in _OWN_NODE_FLAGS]


def proxy_flags() -> list[Flag]:
    return [each for each in flags_of(ProxyConfig) if each.name not in _OWN_PROXY_FLAGS]


def parse_up(argv: Sequence[str], environ: Mapping[str, str]) -> UpConfig:
    """Read ``tandem up``'s flags. Exits with status 2 on an unknown flag; raises ConfigError on a bad value."""
    description = (UpConfig.__doc__ or "").splitlines()[0]
    parser = CommandParser(prog="tandem up", description=description, allow_abbrev=False)
    own, for_nodes, for_proxy = flags_of(UpConfig), node_flags(), proxy_flags()
    known = {each.name for each in for_nodes}
    add_flags(parser, own)
    add_flags(parser.add_argument_group("flags of the nodes"), for_nodes)
    add_flags(parser.add_argument_group("flags of the proxy"), [each for each in for_proxy if each.name not in known])
    given = parser.parse_args(argv)
    values = read_values(own, given, environ)
    if (model := values.get("model")) is not None and not model.strip():
        raise ConfigError("--model is empty", param="--model")
    return UpConfig(**values, node=read_values(for_nodes, given, environ), proxy=read_values(for_proxy, given, environ))
