"""A flag as the field of a configuration class: how it is written, read, bounded and shown."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.config.values import (
    format_seconds,
    format_size,
    parse_bool,
    parse_int,
    parse_seconds,
    parse_share,
    parse_size,
    parse_url,
)
from common.errors import ConfigError


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

    @property
    def default_text(self) -> str:
        if self.default in (None, (), ""):
            return ""
        if self.is_bool:
            return "on" if self.default else "off"
        return " ".join(map(self.format, self.default)) if self.many else str(self.format(self.default))

    @property
    def bounds_text(self) -> str:
        if self.minimum is None:
            return ""
        lower = self.format(self.minimum)
        return f" ({lower} or more)" if self.maximum is None else f" ({lower} to {self.format(self.maximum)})"


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


def flags_of(config_class: type) -> tuple[Flag, ...]:
    """The flags of a configuration class in the order of its fields, its own before those it inherits."""
    fields = sorted(dataclasses.fields(config_class), key=lambda field: field.name not in config_class.__annotations__)
    return tuple(
        dataclasses.replace(field.metadata["flag"], name=field.name) for field in fields if "flag" in field.metadata
    )


def check_fields(config: Any) -> None:
    """Raise ConfigError for the first field of ``config`` that breaks its flag's bounds."""
    for each in flags_of(type(config)):
        each.check(getattr(config, each.name))
