"""Structured output, measured: ``python -m benchmarks.grammar [--schemas FILE] [--suite FOLDER] [--url URL]``.

1 a decode step of batch 8 with every row constrained beside the same step without, in one engine and one run (medians
of alternating rounds). 2 with ``--schemas`` (JSON lines with ``schema`` and ``tests``, as of jsonschemabench) the time
of checking, compiling and filling a mask, over all schemas, for a synthetic vocabulary. 3 what a schema's own tests
say: valid instances that are refused, invalid ones that are accepted; ``--suite``: the same for a folder of
JSON-Schema-Test-Suite. 4 with ``--url`` each schema is asked of a running service, and each answer that ended is held
against an independent validator (``jsonschema``). ``--clock cpu``: of 1 and 2 the process's CPU time, for a busy
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import torch
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from benchmarks.engine.__main__ import CLOCKS
from benchmarks.engine.models import SIZES, make_checkpoint
from common.config.node import NodeConfig
from common.engine.core import EngineCore
from common.engine.sampling.grammar import GrammarMasks
from common.engine.sampling.grammar_compiler import GrammarCompiler
from common.engine.tokens.grammars import StepGrammars
from common.grammar.limits import parser_limits
from common.grammar.trial import try_grammar
from common.node.runtime import create_core, load_node_model
from common.openai.constraint import read_constraint
from common.request import Request, SamplingParams

EOS = 1
ROWS: dict[str, Any] = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"enum": ["round", "square"]}},
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    },
}
PUNCTUATION = ('"', '"}', '"]', "]", "}", "]}", "}}", '",', '":')


class Vocabulary:
    """A synthetic one: single bytes, words, numbers, punctuation, other scripts; for ``TokenizerWrapper``."""

    def __init__(self, size: int) -> None:
        draw = random.Random(0)
        words: set[bytes] = {text.encode() for text in PUNCTUATION if len(text) > 1}
        while len(words) < size - 258:
            length = min(1 + int(draw.expovariate(0.2)), 16)
            kind = draw.random()
            word = "".join(draw.choice("etaoinshrdlucmfwypvbgkjqxz") for _ in range(length))
            if kind < 0.5:
                word = " " + word
            elif kind < 0.65:
                word = "".join(draw.choice("0123456789") for _ in range(min(length, 3)))
            elif kind < 0.75:
                word = "".join(draw.choice('{}[]":,.;-_()<>/\n =+*') for _ in range(min(length, 6)))
            elif kind < 0.8:
                word = "".join(chr(draw.choice([0x400, 0x4E00]) + draw.randrange(64)) for _ in range(min(length, 4)))
            if len(word.encode()) > 1:
                words.add(word.encode())
        singles = [bytes([byte]) for byte in range(256)]
        self.tokens = [b"<pad>", b"<end>", *singles, *sorted(words)]
        self.eos_token_id, self.bos_token_id = EOS, None
        self.special_token_ids = [0, EOS]

    def __call__(self, text: bytes | str) -> list[int]:
        return [2 + byte for byte in (text if isinstance(text, bytes) else text.encode())]


def tokenizer(size: int) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Vocabulary(size)), eos_token=[EOS])


def grammar(schema: object) -> str:
    constraint = read_constraint({"structured_outputs": {"json": schema}})
    assert constraint is not None
    return constraint.grammar()


def percentiles(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    named = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return "  ".join(f"{k} {1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * q))]:.3f}" for k, q in named.items())


# --- 1 a step ---------------------------------------------------------------------------------------------------------


def step_seconds(core: EngineCore, name: str, text: str | None, args: argparse.Namespace) -> list[float]:
    """Of ``args.steps`` decode steps of a full batch."""
    draw = random.Random(1)
    for row in range(args.batch):
        prompt = [draw.randrange(300, 4000) for _ in range(64)]
        params = SamplingParams(max_tokens=args.steps + 20, temperature=0.0, grammar=text, ignore_eos=True)
        core.add_request(Request(f"{name}{row}", prompt, params, eos_token_ids=frozenset({EOS})))
    seconds: list[float] = []
    decoding = 0
    while decoding < args.steps + 5:
        begin_s = CLOCKS[args.clock]()
        outputs = core.step()
        took_s = CLOCKS[args.clock]() - begin_s
        assert not any(output.error for output in outputs), outputs
        if len(outputs) == args.batch:
            decoding += 1
            if decoding > 5:
                seconds.append(took_s)
        elif not outputs:
            time.sleep(0.001)  # a grammar is compiled
    for row in range(args.batch):
        core.abort(f"{name}{row}")
    core.step()
    return seconds


def measure_step(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        path = make_checkpoint(args.family, args.size, torch.bfloat16, Path(folder))
        config = NodeConfig(
            model=str(path), device="cpu", max_num_seqs=args.batch, max_model_len=1024, num_threads=args.threads
        )
        model = load_node_model(config, compact_weights=True)
    size = int(SIZES[args.size]["vocab"])
    compiler = GrammarCompiler(lambda: tokenizer(size), frozenset({EOS}), wait_seconds=60)
    num_mask_threads = max(1, (os.cpu_count() or 1) - args.threads)
    core = create_core(config, model, StepGrammars(compiler, GrammarMasks(size, num_threads=num_mask_threads)))
    masks: list[float] = []
    core.grammars.report_to(compiled=lambda seconds: None, filled=masks.append)
    texts = {"free": None, "array": grammar(ROWS), "string": grammar({"type": "string", "minLength": 100_000})}
    found: dict[str, list[float]] = {name: [] for name in texts}
    ratios: dict[str, list[float]] = {name: [] for name in texts}
    for turn in range(args.repeat + 1):
        medians = {}
        for name, text in texts.items():
            seconds = step_seconds(core, f"{name}{turn}-", text, args)
            medians[name] = statistics.median(seconds)
            if turn:
                found[name] += seconds
        for name, median in medians.items():
            ratios[name] += [median / medians["free"]] if turn else []
    for name, seconds in found.items():
        over = 100 * (statistics.median(ratios[name]) - 1)
        median_ms = 1e3 * statistics.median(seconds)
        print(f"step {args.size} batch {args.batch} {name:<7} median {median_ms:.3f} ms  {over:+.1f} %")
    print(f"masks of a step (ms): {percentiles(masks)}")


# --- 2 and 3 schemas --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Verdicts:
    """Of instances with a known answer."""

    right: int = 0
    valid_refused: int = 0
    invalid_accepted: int = 0
    names: Counter[str] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.names = Counter()

    def add(self, name: str, *, is_valid: bool, is_accepted: bool) -> None:
        if is_valid == is_accepted:
            self.right += 1
        elif is_valid:
            self.valid_refused += 1
        else:
            self.invalid_accepted += 1
            self.names[name] += 1

    def show(self, what: str) -> None:
        print(
            f"{what}: {self.right} as marked, {self.valid_refused} valid ones refused, "
            f"{self.invalid_accepted} invalid ones accepted"
        )
        for name, count in self.names.most_common(20):
            print(f"    accepted {count}x: {name}")


def accepts(words: LLTokenizer, text: str, instance: object) -> bool:
    matcher = LLMatcher(words, text, log_level=0, limits=parser_limits())
    tokens = [2 + byte for byte in json.dumps(instance, ensure_ascii=False).encode()]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def measure_schemas(schemas: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> None:
    words, small = tokenizer(args.vocab), tokenizer(600)
    mask = array("I", bytes((args.vocab + 31) // 32 * 4))
    address, num_bytes = mask.buffer_info()[0], 4 * len(mask)
    clock = CLOCKS[args.clock]
    checks: list[float] = []  # in another process
    compiles: list[float] = []
    masks: list[float] = []
    refused: Counter[str] = Counter()
    verdicts = Verdicts()
    for entry in schemas:
        text = grammar(entry["schema"])
        begin_s = time.perf_counter()
        why = try_grammar(text)
        checks.append(time.perf_counter() - begin_s)
        if why:
            refused[why.splitlines()[0][:70]] += 1
            continue
        begin_s = clock()
        matcher = LLMatcher(words, text, log_level=0, limits=parser_limits())
        compiles.append(clock() - begin_s)
        instances = entry.get("tests", ())
        for test in instances:
            accepted = accepts(small, text, test["data"])
            verdicts.add(str(entry.get("name")), is_valid=test["valid"], is_accepted=accepted)
        for test in [each for each in instances if each["valid"]][:1]:
            for token in words.greedy_tokenize(json.dumps(test["data"], ensure_ascii=False))[: args.tokens]:
                begin_s = clock()
                matcher.unsafe_compute_mask_ptr(address, num_bytes)
                masks.append(clock() - begin_s)
                if not matcher.consume_token(token):
                    break
    print(f"{len(schemas)} schemas, {len(compiles)} compile, vocabulary {args.vocab} (milliseconds)")
    for name, seconds in (("check", checks), ("compile", compiles), ("mask", masks)):
        print(f"{name:<8} {len(seconds):>6}  {percentiles(seconds)}")
    for why, count in refused.most_common():
        print(f"    refused {count}x: {why}")
    verdicts.show("their own tests")


def check_suite(folder: Path) -> None:
    small, verdicts = tokenizer(600), Verdicts()
    refused: dict[str, Counter[str]] = {}
    num_groups = 0
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            num_groups += 1
            text = grammar(group["schema"])
            why = try_grammar(text)
            if why:
                refused.setdefault(path.stem, Counter())[why.splitlines()[0][:60]] += 1
                continue
            for test in group["tests"]:
                name = f"{path.stem}: {group['description']}: {test['description']}"
                verdicts.add(name, is_valid=test["valid"], is_accepted=accepts(small, text, test["data"]))
    num_refused = sum(counts.total() for counts in refused.values())
    print(f"suite: {num_groups} schemas, {num_refused} refused with a reason")
    for stem, counts in refused.items():
        print(f"    {stem}: " + ", ".join(f"{why} ({count})" for why, count in counts.most_common(3)))
    verdicts.show("suite")


# --- 4 through a service ----------------------------------------------------------------------------------------------


async def validate(schemas: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> None:
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    reasons: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=args.url, timeout=600) as client:
        bias = {}
        for text in PUNCTUATION:
            tokens = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
            if len(tokens) == 1:
                bias[str(tokens[0])] = args.bias  # a random model ends strings and lists too, now and then
        gate = asyncio.Semaphore(args.concurrency)

        async def one(number: int, entry: Mapping[str, Any]) -> None:
            body = {
                "prompt": [300 + number % 100, 17, 33, 250 - number % 90],
                "max_tokens": args.max_tokens,
                "seed": number,
                "logit_bias": bias,
                "structured_outputs": {"json": entry["schema"]},
            }
            async with gate:
                response = await client.post("/v1/completions", json=body)
            if response.status_code != 200:
                counts[f"status {response.status_code}"] += 1
                message = str(response.json()["error"]["message"])
                reasons[message.removeprefix("structured_outputs.json cannot be compiled: ").splitlines()[0][:70]] += 1
                return
            [choice] = response.json()["choices"]
            counts[f"ended by {choice['finish_reason']}"] += 1
            if choice["finish_reason"] != "stop":
                return
            kind = validator_for(entry["schema"], default=Draft202012Validator)
            try:
                errors = list(kind(entry["schema"]).iter_errors(json.loads(choice["text"])))
            except Exception as exc:  # noqa: BLE001  # of a schema that the validator cannot use, or of no JSON
                errors = [exc]  # type: ignore[list-item]
            if errors:
                wrong.append(f"{entry.get('name')}: {type(errors[0]).__name__}: {str(errors[0])[:200]}")

        await asyncio.gather(*(one(number, entry) for number, entry in enumerate(schemas)))
        ready = (await client.get("/ready")).status_code
    print(f"service: {dict(counts)}, not valid: {len(wrong)}, ready afterwards: {ready}")
    for line in wrong[:20]:
        print(f"    not valid: {line}")
    for why, count in reasons.most_common():
        print(f"    refused {count}x: {why}")


def read_schemas(path: str, limit: int | None) -> list[dict[str, Any]]:
    def lines() -> Iterator[dict[str, Any]]:
        with open(path, encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)

    return list(lines())[:limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", help="JSON lines")
    parser.add_argument("--limit", type=int, help="schemas")
    parser.add_argument("--suite", help="a folder such as JSON-Schema-Test-Suite/tests/draft2020-12")
    parser.add_argument("--url", help="a running service")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--bias", type=float, default=4.0, help="of quotes and brackets, in what --url asks")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=200, help="masks of one schema")
    parser.add_argument("--no-step", action="store_true")
    parser.add_argument("--family", default="granitemoehybrid")
    parser.add_argument("--size", choices=tuple(SIZES), default="M")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    versions = {"llguidance": version("llguidance"), "torch": torch.__version__}
    machine = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    print(json.dumps({**vars(args), **versions, **machine}))
    if not args.no_step:
        measure_step(args)
    schemas = read_schemas(args.schemas, args.limit) if args.schemas else []
    if schemas and not args.url:
        measure_schemas(schemas, args)
    if args.suite:
        check_suite(Path(args.suite))
    if args.url:
        asyncio.run(validate(schemas, args))


if __name__ == "__main__":
    main()
