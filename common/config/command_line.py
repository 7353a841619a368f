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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from common.config.flag import Flag, flags_of

ConfigT = TypeVar("ConfigT")


class CommandParser(argparse.ArgumentParser):
    """A command's flags. What is wrong with a command line is one line, with status 2: all flags before it would push
    it out of sight."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; `{self.prog} --help` lists flags\n")


def word_of(each: Flag) -> Callable[[str], Any]:
    """``type`` of an argument that takes what ``each`` takes. It raises ConfigError with flag, value and bound."""
    return lambda word: each.read(word, each.option)


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
    parser = CommandParser(prog=prog, description=_first_line(config_class), allow_abbrev=False)
    flags = [
        dataclasses.replace(each, default=(defaults or {}).get(each.name, each.default))
        for each in flags_of(config_class)
    ]
    add_flags(parser, flags)
    values = read_values(flags, parser.parse_args(argv), environ)
    return config_class(**{**(defaults or {}), **values})


def to_argv(config: Any) -> list[str]:
    """The command line that ``parse_config`` reads back to an equal ``config``, every effective flag spelled out."""
    return [word for each in flags_of(type(config)) for word in each.argv(getattr(config, each.name))]


def flag_table(config_class: type) -> str:
    """The class's flags as a Markdown table for the documentation."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for each in flags_of(config_class):
        default = each.default_text
        usage = f"{each.option}/--no-{each.option[2:]}" if each.is_bool else f"{each.option} {each.metavar}"
        usage = usage.replace("|", "\\|")
        rows.append(f"| `{usage}` | {f'`{default}`' if default else ''} | {each.help}{each.bounds_text} |")
    return "\n".join(rows) + "\n"


def _first_line(config_class: type) -> str:
    return (config_class.__doc__ or "").strip().splitlines()[0]


def _help_text(each: Flag) -> str:
    text = each.help + each.bounds_text + (f" [default: {each.default_text}]" if each.default_text else "")
    return text.replace("%", "%%")
