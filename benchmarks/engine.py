"""The engine's forward beside stock transformers, in one process: ``python -m benchmarks.engine``.

Models with random weights are made on the spot: a Mamba-2, a gated-delta and a short-conv hybrid, one layer in four
attention. Measured are a prefill of 1 x 1024 tokens (with one row of logits) and one decode step at several batch sizes
behind prompts of 512 tokens: our torch ops, our C++ ops and stock (static batch, its own cache) take turns, so that
whatever else the machine does hits all alike. Figures are medians in milliseconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from common.engine.model_runner import ModelRunner
from common.engine.plan import Segment, StepPlan
from common.kv_cache.spec import KVCacheConfig
from common.kv_cache.storage import KVStorage
from common.models.fingerprint import user_cache_dir
from common.models.loader import LoadedModel, load_model
from common.models.quiet import quiet_transformers
from common.ops.select import create_ops

BLOCK_SIZE = 16
PREFILL_TOKENS = 1024
PROMPT_TOKENS = 512
MAX_TOKENS = 2048

CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
FAMILIES = ("granitemoehybrid", "qwen3_5", "lfm2")
SIZES: Mapping[str, Mapping[str, int]] = {
    "S": {"hidden": 256, "layers": 6, "mlp": 512, "heads": 4, "vocab": 4096},
    "M": {"hidden": 768, "layers": 12, "mlp": 1792, "heads": 12, "vocab": 16384},
}


def make_config(family: str, size: str) -> Any:
    """One layer in four is attention with heads of 64; recurrent layers are twice as wide as the hidden size."""
    hidden, layers, mlp, heads, vocab = (SIZES[size][k] for k in ("hidden", "layers", "mlp", "heads", "vocab"))
    attention = {i for i in range(layers) if i % 4 == 3}
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }

    def kinds(recurrent: str, full: str) -> list[str]:
        return [full if i in attention else recurrent for i in range(layers)]

    if family == "granitemoehybrid":
        fields |= {
            "layer_types": kinds("mamba", "attention"),
            "shared_intermediate_size": mlp,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 2 * hidden // 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "position_embedding_type": "nope",
            "attention_multiplier": 0.125,
        }
    elif family == "qwen3_5":
        fields |= {
            "layer_types": kinds("linear_attention", "full_attention"),
            "head_dim": 64,
            "linear_num_key_heads": hidden // 128,
            "linear_num_value_heads": 2 * hidden // 128,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        }
    else:
        fields |= {"layer_types": kinds("conv", "full_attention"), "block_auto_adjust_ff_dim": False}
    return AutoConfig.for_model("qwen3_5_text" if family == "qwen3_5" else family, **fields)


def make_checkpoint(family: str, size: str, folder: Path) -> Path:
    torch.manual_seed(0)
    with quiet_transformers():
        AutoModelForCausalLM.from_config(make_config(family, size), dtype=torch.float32).save_pretrained(folder)
    return folder


class Engine:
    """Our model runner on pools of its own; row i of a batch has slot i + 1 and blocks of its own."""

    def __init__(self, model: LoadedModel, backend: str, max_batch: int) -> None:
        cache_dir = user_cache_dir()
        ops = create_ops(backend, dtype=model.dtype, device=model.device, cache_dir=cache_dir)
        model = dataclasses.replace(model, ops=ops)
        self._per_row = MAX_TOKENS // BLOCK_SIZE
        config = KVCacheConfig(model.geometry, BLOCK_SIZE, 1 + max_batch * self._per_row, max_batch + 2, b"benchmark")
        self._storage = KVStorage(config, model.device)
        self._runner = ModelRunner(model, self._storage, config)
        self._vocab = model.geometry.vocab_size

    def _segment(self, row: int, start: int, count: int) -> Segment:
        blocks = list(range(1 + row * self._per_row, 1 + (row + 1) * self._per_row))
        tokens = [(7 * i + row) % self._vocab for i in range(start, start + count)]
        src = row + 1 if start else 0
        return Segment(str(row), tokens, start, blocks[: -(-(start + count) // BLOCK_SIZE)], 0, src, row + 1)

    def _run(self, segments: list[Segment]) -> None:
        self._runner.logits(torch.cat(self._runner.forward(StepPlan(segments))))

    def prefill(self, num_tokens: int) -> Callable[[], None]:
        return lambda: self._run([self._segment(0, 0, num_tokens)])

    def decode(self, batch: int) -> Callable[[], None]:
        self._run([self._segment(0, 0, PROMPT_TOKENS)])
        for row in range(1, batch):  # the same prompt in every row; a forward for each would only take time
            shift = row * self._per_row
            self._storage.copy_blocks([(1 + i, 1 + shift + i) for i in range(PROMPT_TOKENS // BLOCK_SIZE)])
            self._storage.slot_arena[row + 1] = self._storage.slot_arena[1]
        position = PROMPT_TOKENS

        def step() -> None:
            nonlocal position
            self._run([self._segment(row, position, 1) for row in range(batch)])
            position += 1

        return step


class Stock:
    """transformers alone: its forward, its cache, a static batch."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def _run(self, ids: torch.Tensor, cache: DynamicCache, start: int) -> None:
        positions = torch.arange(start, start + ids.shape[1])[None].expand_as(ids)
        self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, position_ids=positions)

    def _tokens(self, batch: int, start: int, count: int) -> torch.Tensor:
        return (7 * torch.arange(start, start + count)[None] + torch.arange(batch)[:, None]) % self._model.vocab_size

    def prefill(self, num_tokens: int) -> Callable[[], None]:
        return lambda: self._run(self._tokens(1, 0, num_tokens), DynamicCache(config=self._model.config), 0)

    def decode(self, batch: int) -> Callable[[], None]:
        cache = DynamicCache(config=self._model.config)
        self._run(self._tokens(1, 0, PROMPT_TOKENS), cache, 0)
        cache.reorder_cache(torch.zeros(batch, dtype=torch.long))
        position = PROMPT_TOKENS

        def step() -> None:
            nonlocal position
            self._run(self._tokens(batch, position, 1), cache, position)
            position += 1

        return step


def alternate(
    contestants: Mapping[str, Callable[[], None]], repeat: int, inner: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median milliseconds of one call; after one round to warm up, ``repeat`` rounds of ``inner`` calls each."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeat + 1):
        for name, call in contestants.items():
            for _ in range(inner):
                begin_s = clock()
                call()
                if turn:
                    samples[name].append(1e3 * (clock() - begin_s))
    return {name: statistics.median(values) for name, values in samples.items()}


def measure(family: str, size: str, dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        path = make_checkpoint(family, size, Path(folder))
        loaded = load_model(str(path), dtype=dtype, ops_backend="torch")
        with quiet_transformers():
            stock = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    contestants: dict[str, Engine | Stock] = {b: Engine(loaded, b, max(args.batch)) for b in ("torch", "cpp")}
    contestants["stock"] = Stock(stock)
    works: dict[str, tuple[Callable[[Engine | Stock], Callable[[], None]], int, int]] = {
        f"prefill 1x{PREFILL_TOKENS}": (lambda each: each.prefill(PREFILL_TOKENS), args.repeat, 1)
    }
    for batch in args.batch:
        works[f"decode batch {batch}"] = (lambda each, batch=batch: each.decode(batch), args.repeat, args.decode_steps)
    for work, (prepare, repeat, inner) in works.items():
        calls = {name: prepare(each) for name, each in contestants.items()}
        medians = alternate(calls, repeat, inner, CLOCKS[args.clock])
        results.append(
            {
                "family": family,
                "size": size,
                "parameters": sum(p.numel() for p in loaded.model.parameters()),
                "dtype": dtype,
                "work": work,
                **{f"{name}_ms": round(value, 3) for name, value in medians.items()},
                "stock_over_cpp": round(medians["stock"] / medians["cpp"], 2),
                "torch_over_cpp": round(medians["torch"] / medians["cpp"], 2),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=tuple(SIZES), default=["S"])
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="decode batch sizes")
    parser.add_argument("--repeat", type=int, default=5, help="alternating rounds, after one to warm up")
    parser.add_argument("--decode-steps", type=int, default=6, help="decode steps of one round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=tuple(CLOCKS), default="wall", help="cpu: the process's CPU time, for a busy machine"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    configuration = {
        **{name: value for name, value in vars(args).items() if name != "json"},
        "cpu": cpu or platform.machine(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(configuration) if args.json else "\n".join(f"{k}: {v}" for k, v in configuration.items()))
    header = "family            size dtype    work             torch ms    cpp ms  stock ms  stock/cpp  torch/cpp"
    if not args.json:
        print(header)
    for size in args.size:
        for family in args.family:
            for dtype in args.dtype:
                for result in measure(family, size, dtype, args):
                    print(json.dumps(result) if args.json else _row(result))
                    sys.stdout.flush()


def _row(r: Mapping[str, Any]) -> str:
    return (
        f"{r['family']:<17} {r['size']:<4} {r['dtype']:<8} {r['work']:<15} {r['torch_ms']:9.2f} {r['cpp_ms']:9.2f} "
        f"{r['stock_ms']:9.2f} {r['stock_over_cpp']:10.2f} {r['torch_over_cpp']:10.2f}"
    )


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


if __name__ == "__main__":
    main()
