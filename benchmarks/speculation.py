"""What drafts bring and cost: ``python -m benchmarks.speculation``.

Engines with and without drafts, in one process, answer the same requests, step by step in turn; figures are ratios of
the processor time of both, so that whatever else the machine does hits both alike. Two kinds of models:

- with random weights (``--family``, ``--size``), whose drafts come from the known answer and are right by ``--share``;
  how many are run is up to what they bring, as in a service. ``--fixed``: all of them.
- the built-in one (``--built-in``), with the drafters of a service on texts of different kinds: documentation to be
  continued, a text to be repeated, alone and behind an edit of it, and tokens drawn at random, which repeat nothing.

``7 rows more``: the time of a step with seven more rows than sequences over that of one without.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.engine.models import FAMILIES, SIZES, make_checkpoint
from common.config.node import NodeConfig
from common.demo_model import FOLDER
from common.engine.core import EngineCore
from common.engine.drafting.drafter import Drafter
from common.engine.sequence import Sequence as EngineSequence
from common.engine.speculation import Speculation
from common.node.runtime import create_core, load_node_model
from common.request import Request, SamplingParams

PAGE_TOKENS = 512
NUM_DRAFTS = 7
WARM_UP_TOKENS = 256
DRAFTED = '{"method": "%s", "num_speculative_tokens": %d}'


class KnownAnswers(Drafter):
    """``answers``: prompts with what follows. A drafted token is right with the chance ``share``. ``is_random``: drafts
    have any length."""

    def __init__(
        self, answers: Sequence[Sequence[int]], share: float, rng: random.Random, *, is_random: bool = False
    ) -> None:
        self._answers, self._share, self._rng, self._is_random = answers, share, rng, is_random
        self._answer: Sequence[int] | None = None

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        if self._is_random:
            max_tokens = self._rng.randint(0, max_tokens)
        if self._answer is None:
            self._answer = next(each for each in self._answers if list(each[: len(token_ids)]) == list(token_ids))
        right = self._answer[len(token_ids) : len(token_ids) + max_tokens]
        return [token if self._rng.random() < self._share else token ^ 1 for token in right]


class Run:
    """Requests of one engine. ``answers``: prompts with their answers so far; ``seconds`` of processor time for
    ``num_tokens`` behind the steps in which prompts were computed."""

    def __init__(self, core: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        for index, prompt in enumerate(prompts):
            core.add_request(Request(f"r{index}", list(prompt), params))
        self._core = core
        self.answers = [list(prompt) for prompt in prompts]
        self.seconds = 0.0
        while core._scheduler.waiting or any(not _generates(each) for each in core._scheduler.running):
            _take(core, self.answers)
        self._num_before = sum(map(len, self.answers))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers)) - self._num_before

    def step(self) -> bool:
        """False: all was done."""
        if not self._core.has_work():
            return False
        begin_s = time.process_time()
        _take(self._core, self.answers)
        self.seconds += time.process_time() - begin_s
        return True


def _generates(sequence: EngineSequence) -> bool:
    return sequence.is_prompt_done and sequence.num_uncomputed_tokens <= 1


def run(core: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    """Prompts with their answers."""
    one = Run(core, prompts, params)
    while one.step():
        pass
    return one.answers


def _take(core: EngineCore, answers: list[list[int]]) -> None:
    for output in core.step():
        assert output.error is None, output.error
        answers[int(output.request_id[1:])].extend(output.token_ids)


def create(model: str, dtype: str, batch: int, drafts: str) -> tuple[EngineCore, int, int]:
    """An engine; the model's longest sequence and the bytes of a state."""
    config = NodeConfig(
        model=model,
        device="cpu",
        dtype=dtype,
        kv_cache_memory=1 << 30,
        max_model_len=2048,
        max_num_seqs=max(batch, 4),
        enable_prefix_caching=False,
        speculative_config=drafts,
    )
    loaded = load_node_model(config, compact_weights=True)
    return create_core(config, loaded), loaded.max_model_len, loaded.storage.layout.slot_bytes


def compare(
    off: EngineCore, on: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams, repeat: int
) -> tuple[float, float, float]:
    """Speed with drafts over without, tokens a step of a sequence, share of the drafted tokens that were right."""
    speculation = on.speculation
    assert speculation is not None
    ratios = []
    for turn in range(repeat + 1):
        if turn == 1:
            speculation.num_drafts = speculation.num_draft_tokens = speculation.num_accepted_tokens = 0
        without, drafted = runs = Run(off, prompts, params), Run(on, prompts, params)
        while sum(each.step() for each in runs):  # in turn, step by step: the machine is as busy for both
            pass
        assert drafted.answers == without.answers or not params.is_greedy, "drafts have changed an answer"
        if turn:
            ratios.append(without.seconds / without.num_tokens / (drafted.seconds / drafted.num_tokens))
    num_tokens = repeat * (sum(map(len, without.answers)) - sum(map(len, prompts)))
    tokens = num_tokens / max(1, num_tokens - speculation.num_accepted_tokens)
    return statistics.median(ratios), tokens, speculation.num_accepted_tokens / max(1, speculation.num_draft_tokens)


def warm_up(core: EngineCore, answers: Sequence[Sequence[int]], prompt: Sequence[int], limits: tuple[int, int]) -> None:
    """Runs drafts of all lengths behind one prompt: a step of as many rows is recorded once in a node's life, which
    takes as long as ten. ``limits``: of a sequence's tokens; of a state's bytes."""
    rng = random.Random(0)
    core._scheduler.speculation = Speculation(
        lambda: KnownAnswers(answers, 0.8, rng, is_random=True),
        num_tokens=NUM_DRAFTS,
        max_model_len=limits[0],
        slot_bytes=limits[1],
        adapts=False,
    )
    num_tokens = min(len(each) for each in answers) - len(prompt)
    for _ in range(WARM_UP_TOKENS // num_tokens + 1):
        run(core, [prompt], SamplingParams(temperature=0.0, max_tokens=num_tokens))


def of_random_models(args: argparse.Namespace) -> None:
    for family in args.family:
        with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
            path = str(make_checkpoint(family, args.size, getattr(torch, args.dtype), Path(folder)))
            off, *_ = create(path, args.dtype, max(args.batch), "")
            on, max_model_len, slot_bytes = create(path, args.dtype, max(args.batch), DRAFTED % ("ngram", NUM_DRAFTS))
        assert on.speculation is not None
        vocab_size = SIZES[args.size]["vocab"]
        for batch in args.batch:
            rng = random.Random(batch)
            prompts = [[rng.randrange(6, vocab_size) for _ in range(args.prompt_tokens)] for _ in range(batch)]
            params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
            answers = run(off, prompts, params)
            warm_up(on, answers, prompts[0], (max_model_len, slot_bytes))
            for share in args.share:
                on._scheduler.speculation = speculation = Speculation(
                    partial(KnownAnswers, answers, share, rng),
                    num_tokens=NUM_DRAFTS,
                    max_model_len=max_model_len,
                    slot_bytes=slot_bytes,
                    adapts=not args.fixed,
                )
                ratio, tokens, right = compare(off, on, prompts, params, args.repeat)
                cost = speculation.allowance.cost(batch)
                states = "saved" if speculation.saves_each else "computed again"
                print(
                    f"{family:<17} {args.size} {args.dtype:<9} batch {batch:<3} right {share:4.2f}: {ratio:5.2f} x, "
                    f"{tokens:4.2f} tokens a step, {right:4.2f} of drafted ones right, 7 rows more: "
                    f"{cost.seconds(7) / cost.plain_s:4.2f} x the time, states {states}",
                    flush=True,
                )


def of_built_in(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    root = Path(__file__).resolve().parents[1]
    text = tokenizer.encode((root / "docs" / "cache.md").read_text(encoding="utf-8"), add_special_tokens=False)
    pages = [text[start : start + PAGE_TOKENS] for start in range(0, len(text) - PAGE_TOKENS, 1500)][:4]
    rng = random.Random(0)
    drawn = [[rng.randrange(300, tokenizer.vocab_size) for _ in range(PAGE_TOKENS)] for _ in range(4)]
    greedy = SamplingParams(temperature=0.0, max_tokens=args.tokens)

    def edited(page: list[int]) -> list[int]:
        return [
            rng.randrange(300, tokenizer.vocab_size) if place % 10 == 5 else token for place, token in enumerate(page)
        ]

    kinds = {
        "documentation, continued": (pages, greedy),
        "a text, repeated": ([page[:200] + page[:200] + page[:12] for page in pages], greedy),
        "a text and an edit of it, again": ([page[:200] + edited(page[:200]) + page[:12] for page in pages], greedy),
        "drawn tokens, nothing repeats": (drawn, SamplingParams(temperature=1.0, seed=1, max_tokens=args.tokens)),
    }
    off, *_ = create(str(FOLDER), args.dtype, 4, "")
    for method in ("ngram", "suffix"):
        on, *_ = create(str(FOLDER), args.dtype, 4, DRAFTED % (method, NUM_DRAFTS))
        for name, (prompts, params) in kinds.items():
            found = [compare(off, on, [prompt], params, args.repeat) for prompt in prompts]
            ratio, tokens, right = (statistics.mean(column) for column in zip(*found, strict=True))
            print(
                f"built-in {args.dtype:<9} {method:<7} {name:<31}: {ratio:5.2f} x, {tokens:4.2f} tokens a step, "
                f"{right:4.2f} of drafted ones right",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--family", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--size", choices=tuple(SIZES), default="M")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--share", nargs="+", type=float, default=[0.0, 0.6, 0.8, 1.0])
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=512,
        help="of a random model's prompt; not timed, but a batch of several steps' prompts begins its answers unevenly",
    )
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--repeat", type=int, default=3, help="alternating rounds, after one to warm up")
    parser.add_argument("--fixed", action="store_true", help="run every draft, whether it pays or not")
    parser.add_argument("--built-in", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"cpus: {os.cpu_count()}, load: {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {platform.machine()}")
    print(f"bfloat16: {'avx512_bf16' in Path('/proc/cpuinfo').read_text(encoding='utf-8')}, {vars(args)}")
    if args.built_in:
        of_built_in(args)
    else:
        of_random_models(args)


if __name__ == "__main__":
    main()
