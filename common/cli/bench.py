"""``tandem bench``: load a running service and say what a client saw.

Each request is a completion over random token ids (so that the prompt has exactly the asked length), streamed,
greedy, without an early end. A fixed number of workers send one request after the other (a closed loop): latencies
are those at this concurrency, not at a given arrival rate. Prompts share their first ``--shared-tokens`` ids; the
rest is new in every request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from common.config import parse_url, read_key_file
from common.errors import ConfigError

FIRST_TOKEN_ID = 3  # below are usually special tokens
PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Sample:
    """What one request showed; times in seconds. ``error`` None: it was answered to its end."""

    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    e2e_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None


def run_bench(argv: Sequence[str]) -> int:
    """Run the command; status 1 when a request failed."""
    args = _parser().parse_args(argv)
    try:
        url = parse_url(args.url)
    except ValueError as exc:
        raise ConfigError(f"--url {args.url!r} is {exc}", param="--url") from exc
    for name in ("requests", "concurrency", "prompt_tokens", "max_tokens"):
        if getattr(args, name) < 1:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} {getattr(args, name)} is below its minimum of 1", param=option)
    if not 0 <= args.shared_tokens <= args.prompt_tokens:
        raise ConfigError(
            f"--shared-tokens {args.shared_tokens} is not between 0 and --prompt-tokens {args.prompt_tokens}",
            param="--shared-tokens",
        )
    if args.vocab_size <= FIRST_TOKEN_ID:
        option = "--vocab-size"
        raise ConfigError(f"{option} {args.vocab_size} is below its minimum of {FIRST_TOKEN_ID + 1}", param=option)
    started_s = time.perf_counter()
    samples = asyncio.run(_load(url, args))
    report = summarize(samples, time.perf_counter() - started_s)
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "api_key_file")}
    if args.json:
        sys.stdout.write(json.dumps({"settings": settings, **report}) + "\n")
    else:
        sys.stdout.write(_as_text(settings, report))
    return 0 if report["failed"] == 0 else 1


def summarize(samples: Sequence[Sample], duration_s: float) -> dict[str, Any]:
    """Counts, rates and percentiles of a run that took ``duration_s`` seconds."""
    good = [sample for sample in samples if sample.error is None]
    num_output = sum(sample.num_output_tokens for sample in good)
    num_prompt = sum(sample.num_prompt_tokens for sample in good)
    num_cached = sum(sample.num_cached_tokens for sample in good)
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": dict(Counter(sample.error for sample in samples if sample.error is not None)),
        "seconds": duration_s,
        "requests_per_second": len(good) / duration_s,
        "output_tokens_per_second": num_output / duration_s,
        "prompt_tokens": num_prompt,
        "cached_tokens": num_cached,
        "cached_share": num_cached / num_prompt if num_prompt else 0.0,
        "output_tokens": num_output,
        "ttft_seconds": _distribution([sample.ttft_s for sample in good if sample.ttft_s is not None]),
        "itl_seconds": _distribution([gap for sample in good for gap in sample.gaps_s]),
        "e2e_seconds": _distribution([sample.e2e_s for sample in good]),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem bench", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="base URL of the service [%(default)s]")
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="requests in all [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="requests at a time [%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="of each request [%(default)s]")
    parser.add_argument("--shared-tokens", type=int, default=0, metavar="N", help="same in all prompts [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="to generate [%(default)s]")
    parser.add_argument("--vocab-size", type=int, default=256, metavar="N", help="prompt ids are below [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts [%(default)s]")
    parser.add_argument("--timeout-seconds", type=float, default=600.0, metavar="S", help="of silence [%(default)s]")
    parser.add_argument("--api-key-file", metavar="FILE", help="file whose first line is the API key")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


async def _load(url: str, args: argparse.Namespace) -> list[Sample]:
    headers = {}
    if args.api_key_file:
        headers["authorization"] = f"Bearer {read_key_file(args.api_key_file, '--api-key-file')[0]}"
    prompts = _prompts(args)
    samples: list[Sample] = []
    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(args.timeout_seconds)

    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=False
    ) as client:

        async def work() -> None:
            for prompt in prompts:  # one iterator for all workers
                samples.append(await _send(client, prompt, args.max_tokens))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(args.concurrency, args.requests)):
                group.create_task(work())
    return samples


def _prompts(args: argparse.Namespace) -> Iterator[list[int]]:
    draw = random.Random(args.seed)

    def ids(num_tokens: int) -> list[int]:
        return [draw.randrange(FIRST_TOKEN_ID, args.vocab_size) for _ in range(num_tokens)]

    shared = ids(args.shared_tokens)
    return (shared + ids(args.prompt_tokens - args.shared_tokens) for _ in range(args.requests))


async def _send(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> Sample:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    sample = Sample(error="the stream ended without [DONE]")
    started_s = last_s = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                sample.error = f"status {answer.status_code}"
                return sample
            async for line in answer.aiter_lines():
                if not line.startswith("data:"):
                    continue
                text = line[5:].strip()
                if text == "[DONE]":
                    sample.error = None
                    break
                event = json.loads(text)
                if "error" in event:
                    sample.error = f"error event {event['error'].get('code')}"
                    return sample
                if event.get("choices") and _has_output(event["choices"][0]):
                    now_s = time.perf_counter()
                    if sample.ttft_s is None:
                        sample.ttft_s = now_s - started_s
                    else:
                        sample.gaps_s.append(now_s - last_s)
                    last_s = now_s
                if usage := event.get("usage"):
                    sample.num_prompt_tokens = usage["prompt_tokens"]
                    sample.num_output_tokens = usage["completion_tokens"]
                    sample.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (httpx.HTTPError, json.JSONDecodeError) as exc:
        sample.error = type(exc).__name__
    sample.e2e_s = time.perf_counter() - started_s
    return sample


def _has_output(choice: dict[str, Any]) -> bool:
    return bool(choice.get("token_ids") or choice.get("text"))


def _distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles (nearest rank); empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    ranks = {f"p{level}": ordered[math.ceil(level / 100 * len(ordered)) - 1] for level in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}


def _as_text(settings: dict[str, Any], report: dict[str, Any]) -> str:
    lines = [" ".join(f"{name}={value}" for name, value in settings.items())]
    lines.append(f"requests   {report['requests']} ({report['failed']} failed) in {report['seconds']:.2f} s")
    lines += [f"  failed: {count} x {error}" for error, count in report["errors"].items()]
    lines.append(
        f"throughput {report['requests_per_second']:.2f} requests/s,"
        f" {report['output_tokens_per_second']:.1f} output tokens/s"
    )
    lines.append(
        f"cache      {report['cached_tokens']} of {report['prompt_tokens']} prompt tokens"
        f" ({report['cached_share']:.1%}) were cached"
    )
    for name, label in (("ttft_seconds", "TTFT"), ("itl_seconds", "ITL"), ("e2e_seconds", "e2e")):
        figures = "  ".join(f"{key} {value * 1000:.1f}" for key, value in report[name].items())
        lines.append(f"{label:<10} {figures or 'no samples'}{' ms' if figures else ''}")
    return "\n".join(lines) + "\n"
