"""The flags of ``tandem bench``, checked before anything is sent."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.config.command_line import CommandParser
from common.config.key_file import read_key_file
from common.config.values import parse_url
from common.errors import ConfigError

FIRST_TOKEN_ID = 3
"""Smallest id of a prompt: those below are special tokens in most vocabularies."""
DEFAULT_CONCURRENCY = 4
DATASETS = ("random", "edits", "rag")
"""``common.cli.bench.workload`` says what they are."""

DESCRIPTION = "Load a running service and print what a client saw: latencies, throughput, what was cached and moved."
EPILOG = """\
Prompts are random token ids with exactly the asked length, answers do not end early, unless --text is given: then only
what every OpenAI-compatible server knows is sent, prompts are random words (about one token or more each) and answers
end where the model ends them. Exit status: 0 all requests were answered, 1 some failed or a flag's value is refused,
2 unknown flags, 130 Ctrl-C (the report says what was measured until then).
"""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to send where. Counts are of requests and tokens; ``request_rate`` None: ``concurrency`` at a time."""

    url: str
    requests: int
    concurrency: int
    request_rate: float | None
    prompt_tokens: int
    max_tokens: int
    length_spread: float
    shared_tokens: int
    turns: int
    turn_tokens: int
    dataset: str
    warmup: int
    seed: int
    vocab_size: int
    is_text: bool
    model: str | None
    wants_trace: bool
    timeout_s: float
    api_key: str | None
    json_file: str | None
    wants_rows: bool
    shows_progress: bool

    def shown(self) -> dict[str, object]:
        """What a report says of the run; no key."""
        hidden = ("api_key", "json_file", "wants_rows", "shows_progress")
        return {name: value for name, value in vars(self).items() if name not in hidden}


def parse_settings(argv: Sequence[str]) -> BenchSettings:
    """Exits with status 2 on an unknown flag; raises ConfigError naming flag, value and bound of a bad one."""
    given = _parser().parse_args(argv)
    try:
        url = parse_url(given.url)
    except ValueError as exc:
        raise ConfigError(f"--url {given.url!r} is {exc}", param="--url") from exc
    for name, minimum in (
        ("requests", 1),
        ("prompt_tokens", 1),
        ("max_tokens", 1),
        ("turns", 1),
        ("turn_tokens", 1),
        ("warmup", 0),
        ("vocab_size", FIRST_TOKEN_ID + 1),
    ):
        _at_least(given, name, minimum)
    if given.concurrency is not None:
        _at_least(given, "concurrency", 1)
    if given.concurrency is not None and given.request_rate is not None:
        raise ConfigError(
            f"--concurrency {given.concurrency} and --request-rate {given.request_rate:g} exclude each other: a fixed "
            "number of requests at a time, or arrivals at a rate",
            param="--request-rate",
        )
    for name, maximum in (("request_rate", math.inf), ("timeout_seconds", math.inf)):
        _within(given, name, 0.0, maximum, is_open=True)
    for name in ("length_spread", "shared_prefix_share"):
        _within(given, name, 0.0, 1.0)
    if given.turns > given.requests:
        raise ConfigError(
            f"--turns {given.turns} is above --requests {given.requests}: each turn is a request", param="--turns"
        )
    return BenchSettings(
        url=url,
        requests=given.requests,
        concurrency=given.concurrency or DEFAULT_CONCURRENCY,
        request_rate=given.request_rate,
        prompt_tokens=given.prompt_tokens,
        max_tokens=given.max_tokens,
        length_spread=given.length_spread,
        shared_tokens=_shared_tokens(given),
        turns=given.turns,
        turn_tokens=given.turn_tokens,
        dataset=given.dataset,
        warmup=given.warmup,
        seed=given.seed,
        vocab_size=given.vocab_size,
        is_text=given.text,
        model=given.model,
        wants_trace=given.trace,
        timeout_s=given.timeout_seconds,
        api_key=read_key_file(given.api_key_file, "--api-key-file")[0] if given.api_key_file else None,
        json_file=given.json,
        wants_rows=given.rows,
        shows_progress=given.progress,
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tandem bench",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    share: dict[str, Any] = {"type": float, "metavar": "X"}
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="base URL of the service [%(default)s]")
    parser.add_argument("--model", metavar="NAME", help="in the requests [the first of /v1/models]")
    parser.add_argument("--api-key-file", metavar="FILE", help="file with the API key, the first in it")
    load = parser.add_argument_group("load")
    load.add_argument("--requests", default=32, help="requests in all [%(default)s]", **number)
    load.add_argument("--concurrency", help=f"requests at a time [{DEFAULT_CONCURRENCY}]", **number)
    load.add_argument("--request-rate", help="instead: arrivals a second at random times (Poisson)", **share)
    load.add_argument("--warmup", default=0, help="requests before, not counted [%(default)s]", **number)
    load.add_argument("--seed", default=0, help="of prompts, lengths and arrivals [%(default)s]", **number)
    load.add_argument("--timeout-seconds", type=float, default=600.0, metavar="S", help="of silence [%(default)s]")
    prompts = parser.add_argument_group("prompts and answers")
    prompts.add_argument(
        "--dataset",
        choices=DATASETS,
        default=DATASETS[0],
        help="nothing repeats; a text to be written again with changes; passages to be quoted [%(default)s]",
    )
    prompts.add_argument("--prompt-tokens", default=256, help="of each (first) prompt [%(default)s]", **number)
    prompts.add_argument("--max-tokens", default=32, help="to generate [%(default)s]", **number)
    prompts.add_argument(
        "--length-spread", default=0.0, help="lengths vary by this share, 0 to 1 [%(default)s]", **share
    )
    shared = prompts.add_mutually_exclusive_group()
    shared.add_argument("--shared-tokens", default=0, help="the same in all prompts [%(default)s]", **number)
    shared.add_argument("--shared-prefix-share", help="the same, as a share of --prompt-tokens, 0 to 1", **share)
    prompts.add_argument(
        "--turns", default=1, help="requests of a conversation, each with all before [%(default)s]", **number
    )
    prompts.add_argument("--turn-tokens", default=32, help="that each further turn adds [%(default)s]", **number)
    prompts.add_argument("--vocab-size", default=256, help="prompt ids are below [%(default)s]", **number)
    prompts.add_argument("--text", action="store_true", help="words and standard fields only, for any server")
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write a report (-: to stdout, instead of the text)")
    output.add_argument("--rows", action="store_true", help="with each request in the report")
    output.add_argument(
        "--trace", action=argparse.BooleanOptionalAction, default=True, help="ask for placements and phases [on]"
    )
    output.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=True, help="say on stderr how far it is [on]"
    )
    return parser


def _shared_tokens(given: argparse.Namespace) -> int:
    if given.shared_prefix_share is not None:
        share: float = given.shared_prefix_share
        return round(share * int(given.prompt_tokens))
    shared: int = given.shared_tokens
    if not 0 <= shared <= given.prompt_tokens:
        raise ConfigError(
            f"--shared-tokens {shared} is not between 0 and --prompt-tokens {given.prompt_tokens}",
            param="--shared-tokens",
        )
    return shared


def _at_least(given: argparse.Namespace, name: str, minimum: int) -> None:
    value = getattr(given, name)
    if value < minimum:
        option = _option(name)
        raise ConfigError(f"{option} {value} is below its minimum of {minimum}", param=option)


def _within(given: argparse.Namespace, name: str, minimum: float, maximum: float, *, is_open: bool = False) -> None:
    value = getattr(given, name)
    if value is None:
        return
    option = _option(name)
    if is_open and not (minimum < value < maximum):
        raise ConfigError(f"{option} {value:g} is not a number above {minimum:g}", param=option)
    if not is_open and not (minimum <= value <= maximum):
        raise ConfigError(f"{option} {value:g} is not between {minimum:g} and {maximum:g}", param=option)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
