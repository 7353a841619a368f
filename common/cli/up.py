"""``tandem up``: a whole service on this machine.

1 read the flags, 2 check that every port is free, 3 start nodes and proxy under the supervisor (with the built-in model
when none is given), each with its effective flags in argv and nothing of ours in its environment, 4 print the
URLs of the pages and a curl example, 5 run until SIGINT, SIGTERM or SIGHUP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence

from common import demo_model
from common.cli.flags import UpConfig, parse_up
from common.cli.gpus import count_gpus
from common.cli.supervisor import ChildSpec, Supervisor, check_port_free
from common.config.command_line import to_argv
from common.config.node import NodeConfig
from common.config.proxy import ProxyConfig

ENVIRONMENT_PREFIX = "TANDEM_"
"""Begins the names of the variables that processes read as flags."""
STOP_MARGIN_S = 5.0
"""Seconds that a child gets beyond its drain before it is killed."""
# Messages of the example request: the built-in model recalls what an earlier turn told it.
_EXAMPLE = [
    {"role": "user", "content": "The code word of the mill is amber falcon."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the code word of the mill?"},
]


def run_up(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Start everything and wait; returns the exit status. Raises ConfigError before anything was started."""
    config = parse_up(argv, environ)
    check_port_free(config.host, config.port, f"--port {config.port}")
    for role, node in config.node_configs("any"):
        check_port_free(
            node.host, node.port, f"port of {role} node {node.node_name}, which follows from --port {config.port}"
        )
    return asyncio.run(_run(config, environ, count_gpus()))


async def _run(config: UpConfig, environ: Mapping[str, str], num_gpus: int) -> int:
    # Installed first and explicitly: a process that a script starts in the background inherits SIGINT as ignored.
    stop = asyncio.Event()
    supervisors: list[Supervisor] = []

    def on_signal() -> None:
        if stop.is_set():
            for supervisor in supervisors:
                supervisor.kill()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)

    # Every effective flag is in argv; a variable would only say the same again, or something else.
    child_environ = {name: value for name, value in environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    model = config.model
    if model is None:
        model = str(demo_model.FOLDER)
        _print(f"no --model given: using the built-in model in {model}")
        # Where this package is installed is no name to show to clients.
        config = dataclasses.replace(config, node={"served_model_name": demo_model.FOLDER.name, **config.node})
    supervisor = Supervisor(
        child_specs(config, model, num_gpus),
        environ=child_environ,
        startup_timeout_s=config.startup_timeout_seconds,
        stop_deadline_s=config.proxy_config().drain_timeout_seconds + STOP_MARGIN_S,
        on_ready=lambda spec: _print(f"{spec.name:<14} ready at {spec.url}"),
        on_all_ready=lambda: _print(welcome(config.proxy_config())),
        log_format=config.proxy_config().log_format,
    )
    supervisors.append(supervisor)
    return await supervisor.run(stop)


def child_specs(config: UpConfig, model: str, num_gpus: int = 0) -> list[ChildSpec]:
    """The processes to start. The proxy is essential, nodes are restarted."""
    nodes = config.node_configs(model, num_gpus)
    specs = [_spec(f"{role}_node", node.node_name or role, node, True) for role, node in nodes]
    return [*specs, _spec("proxy", "proxy", config.proxy_config(), False)]


def welcome(config: ProxyConfig) -> str:
    """What to print when everything is ready: the chat page and a command to try."""
    body = json.dumps({"messages": _EXAMPLE, "max_tokens": 32, "temperature": 0, "stream": True})
    key = ""
    if config.api_key_file:
        # The line that ``read_key_file`` takes; blanks round a key are nothing to a server.
        first_key = f"grep -m 1 '^[[:space:]]*[^#[:space:]]' {shlex.quote(config.api_key_file)}"
        key = f' -H "Authorization: Bearer $({first_key})"'
    url = _url(config)
    return (
        f"\nTandem is ready at {url}  (Ctrl-C stops it)\n\n"
        f"  chat: {url}/chat   status: {url}/\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n"
    )


def _spec(module: str, name: str, config: NodeConfig | ProxyConfig, is_restarted: bool) -> ChildSpec:
    argv = (sys.executable, "-m", module, *to_argv(config))
    return ChildSpec(name, argv, _url(config), is_restarted)


def _url(config: NodeConfig | ProxyConfig) -> str:
    host, is_tls = config.host, isinstance(config, ProxyConfig) and config.ssl_certfile is not None
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{'https' if is_tls else 'http'}://{shown}:{config.port}"


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
