"""Damaged JSON documents: one or a few places of a good one replaced, removed or bent, reproducibly."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**53 + 1,
    2**64,
    -(2**70),
    0.5,
    1e308,
    "",
    "x",
    "0",
    "-1",
    "18446744073709551616",
    "zz" * 16,
    "ab" * 33,
    "\x00\ufffd",
    "x" * 20_000,
    [],
    [[]],
    [[[]]],
    [None],
    [-1],
    [0],
    [2**40],
    ["1"],
    {},
    {"a": {"b": {"c": []}}},
)


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value below the top."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def mutated(document: Any, draw: random.Random) -> Any:
    """A copy of ``document`` with one to three damaged places."""
    document = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found = list(places(document))
        if not found:
            return draw.choice(JUNK)
        *parents, last = draw.choice(found)
        holder = document
        for key in parents:
            holder = holder[key]
        _damage(holder, last, draw)
    return document


def _damage(holder: Any, key: Any, draw: random.Random) -> None:
    value = holder[key]
    kind = draw.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(value, list) and value:
        holder[key] = draw.choice(([*value, value[-1]], value[:-1], value[::-1], value * 3))
    elif kind == 2 and isinstance(value, str) and value:
        index = draw.randrange(len(value))
        holder[key] = value[:index] + draw.choice("0123456789abcdefg ") + value[index + 1 :]
    elif kind == 3 and isinstance(value, int):
        holder[key] = value + draw.choice((-1, 1, 7, 1000, -(10**6), 2**32))
    else:
        holder[key] = copy.deepcopy(draw.choice(JUNK))
