"""The ``tandem`` command: one word chooses what to run, the rest are that command's flags.

``prefill``, ``decode`` and ``proxy`` replace this process by ``python -m prefill_node`` and so on: a node started by
hand, by ``tandem up`` or by a container is the same program. Nothing heavy is imported here; ``tandem simulate
--help`` works without torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.config.command_line import CommandParser
from common.errors import ConfigError, TandemError, how_to_install

DISTRIBUTION = "tandem-serve"
_NODE_NEEDS = ("torch", "transformers")


@dataclass(frozen=True, slots=True)
class Command:
    help: str
    run: Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status. Errors of this project become one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = _commands()
    if words[:1] == ["--version"]:
        sys.stdout.write(f"tandem {importlib.metadata.version(DISTRIBUTION)}\n")
        return 0
    if not words or words[0] in ("-h", "--help"):
        (sys.stdout if words else sys.stderr).write(_usage(commands))
        return 0 if words else 2
    command = commands.get(words[0])
    if command is None:
        sys.stderr.write(f"tandem: error: unknown command {words[0]!r}\n{_usage(commands)}")
        return 2
    try:
        return command.run(words[1:])
    except TandemError as exc:
        sys.stderr.write(f"tandem {words[0]}: error: {exc.message}\n")
        return 1


def _commands() -> Mapping[str, Command]:
    return {
        "up": Command("start a proxy, prefill nodes and decode nodes on this machine", _up),
        "prefill": Command("run one prefill node", lambda argv: _exec("prefill_node", argv, needs=_NODE_NEEDS)),
        "decode": Command("run one decode node", lambda argv: _exec("decode_node", argv, needs=_NODE_NEEDS)),
        "proxy": Command("run the proxy", lambda argv: _exec("proxy", argv)),
        "simulate": Command("replay a trace through the cache manager, without a model", _simulate),
        "bench": Command("load a running service and print latencies and cache figures", _bench),
    }


def _usage(commands: Mapping[str, Command]) -> str:
    rows = "".join(f"  {name:<10} {command.help}\n" for name, command in commands.items())
    return f"usage: tandem COMMAND [FLAGS]\n\n{rows}\n`tandem COMMAND --help` lists a command's flags.\n"


def _exec(module: str, argv: Sequence[str], needs: Sequence[str] = ()) -> int:
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing and not {"-h", "--help"} & set(argv):
        raise ConfigError(f"{', '.join(missing)} not installed ({how_to_install('node')})")
    os.execv(sys.executable, [sys.executable, "-m", module, *argv])  # noqa: S606 - our own interpreter and module


def _up(argv: Sequence[str]) -> int:
    from common.cli.up import run_up

    return run_up(argv, os.environ)


def _simulate(argv: Sequence[str]) -> int:
    simulate = importlib.import_module("common.simulate.simulate")
    parser = CommandParser(prog="tandem simulate", allow_abbrev=False)
    simulate.add_arguments(parser)
    cluster = importlib.import_module("proxy.simulation.run")
    cluster.add_arguments(parser)
    args = parser.parse_args(argv)
    if not args.cluster:
        cluster.check_none(args)
    status: int | None = (cluster if args.cluster else simulate).run(args)
    return status or 0


def _bench(argv: Sequence[str]) -> int:
    from common.cli.bench.run import run_bench

    return run_bench(argv)
