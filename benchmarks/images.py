"""What a fifth image costs when the first four are known: ``python -m benchmarks.images``.

A vision-language model with random weights, on one thread. *First token*: a prompt of four images and a long text, then
one of the same four, a fifth and another text (4,584 tokens, of which the first four images end at 35.7 %): seconds
until its first token, by transformers' ``generate``, by the engine without a cache, and by the engine that has seen the
first prompt. All in one run, in turn: read the ratios. *Placement* (``--pairs``): sessions whose histories grow by an
image a turn, over two prefill and two decode nodes, by cost, in turn, and in turn without pulling prefixes from each
other: tokens that were found, and images that the towers computed, over those that there are.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig

from common.config.node import NodeConfig
from common.engine.core import EngineCore
from common.models.vision.image_input import inputs_of
from common.node.runtime import NodeModel, create_core, load_node_model
from common.request import Request, SamplingParams
from common.wire.routes import CHAT_ROUTE
from tests.support import images
from tests.support.client import metric, post
from tests.support.images import encoded, image_part, make_checkpoint, picture, prompt_with
from tests.support.service import Service

Part = Sequence[int] | bytes
NUM_TOKENS = 4584
"""Four images and then five with a long tail, of which others find a third or nothing."""
SIDE = 320
"""Pixels: 400 tokens an image."""
TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "num_attention_heads": 8,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
VISION = {"depth": 6, "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "out_hidden_size": 512}
BUDGET = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--pairs", action="store_true", help="placement instead of the first token")
    parser.add_argument("--sessions", type=int, default=5, help="of --pairs; an odd number, or turns meet by chance")
    parser.add_argument("--turns", type=int, default=4, help="of each session")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        if args.pairs:
            placement(images.image_checkpoint(), args.sessions, args.turns)
        else:
            first_token(make_checkpoint("qwen3_5", Path(folder) / "model", TEXT, VISION), args.repeat)


# --- the first token


def first_token(path: Path, repeat: int) -> None:
    core, model = engine(path)
    seconds: dict[str, list[float]] = {"transformers": [], "engine, nothing cached": [], "engine, four images seen": []}
    stock = images.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    found = encodes = 0
    for turn in range(repeat):
        seeds = range(100 * turn, 100 * turn + 5)
        four, five = list(prompts([picture(seed, SIDE, SIDE) for seed in seeds], turn))
        seconds["transformers"].append(stock_seconds(stock, path, five))
        seconds["engine, nothing cached"].append(ask(core, model, five, f"cold {turn}")[0])
        # Whatever it knows of these pictures by their digests would be of no worth to a first comer.
        core, model = engine(path)
        ask(core, model, four, "")
        assert model.runner.images is not None
        before = model.runner.images.stats.num_encoded
        taken_s, found = ask(core, model, five, "")
        seconds["engine, four images seen"].append(taken_s)
        encodes = model.runner.images.stats.num_encoded - before
    stock_s = median(seconds["transformers"])
    print(f"{NUM_TOKENS} tokens, five images; {found} found ({100 * found / NUM_TOKENS:.1f} %), {encodes} encoded")
    for name, each in seconds.items():
        print(f"{name:28} {median(each):8.3f} s   {stock_s / median(each):5.2f} x")


def prompts(pictures: Sequence[bytes], seed: int) -> Iterator[list[Part]]:
    """That of four images, then that of five."""
    draw = random.Random(seed)

    def text(count: int) -> list[int]:
        return [draw.randrange(10, 500) for _ in range(count)]

    shared: list[Part] = [text(16)]
    for each in pictures[:4]:
        shared += [each, text(4)]
    yield [*shared, text(500)]
    five = [*shared, pictures[4]]
    yield [*five, text(NUM_TOKENS - len(prompt_with(*five)[0]))]


def engine(path: Path) -> tuple[EngineCore, NodeModel]:
    config = NodeConfig(
        model=str(path),
        dtype="float32",
        device="cpu",
        max_model_len=8192,
        max_num_seqs=8,
        max_num_batched_tokens=BUDGET,
        kv_cache_memory=512 << 20,
    )
    model = load_node_model(config, with_images=True)
    return create_core(config, model), model


def ask(core: EngineCore, model: NodeModel, parts: Sequence[Part], salt: str) -> tuple[float, int]:
    """Seconds to the first token, image processing included, and tokens that were found."""
    token_ids, spans = prompt_with(*parts)
    processor = model.loaded.image_processor
    assert processor is not None
    started_s = time.perf_counter()
    request = Request(
        f"r{time.monotonic_ns()}",
        token_ids,
        SamplingParams(temperature=0.0, max_tokens=1),
        cache_salt=salt or None,
        semantic_boundaries=(spans[-1].end + 1,),
        images=spans,
        image_inputs=[x for part in parts if isinstance(part, bytes) for x in inputs_of(processor, encoded(part))],
    )
    core.add_request(request)
    outputs = []
    while core.has_work():
        outputs += core.step()
    assert outputs[0].error is None, outputs[0].error
    return time.perf_counter() - started_s, outputs[0].num_cached_tokens


@torch.inference_mode()
def stock_seconds(model: Any, path: Path, parts: Sequence[Part]) -> float:
    token_ids, _ = prompt_with(*parts)
    started_s = time.perf_counter()
    given = images.stock_inputs(path, token_ids, [part for part in parts if isinstance(part, bytes)])
    model.generate(**given, generation_config=GenerationConfig(max_new_tokens=1, do_sample=False, pad_token_id=0))
    return time.perf_counter() - started_s


# --- placement


def placement(path: Path, num_sessions: int, num_turns: int) -> None:
    flags = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory", "128MiB")
    for proxy_flags in (
        ("--policy", "cost"),
        ("--policy", "round_robin"),
        ("--policy", "round_robin", "--no-prefix-sources"),
    ):
        with Service(
            path, prefill_flags=flags, decode_flags=flags, proxy_flags=proxy_flags, num_prefill=2, num_decode=2
        ) as service:
            cached = total = 0
            histories: list[list[dict[str, Any]]] = [[] for _ in range(num_sessions)]
            for turn in range(num_turns):
                for session, history in enumerate(histories):
                    parts = [
                        image_part(picture(1000 * session + turn, 128, 128)),
                        {"type": "text", "text": "And this?"},
                    ]
                    history.append({"role": "user", "content": parts})
                    body = {"messages": history, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                    answer = post(service.url, CHAT_ROUTE, body)
                    history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                    cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    total += answer["usage"]["prompt_tokens"]
            num_encoded = sum(metric(node, "images_encoded_total", source="computed") for node in service.prefill)
        share, num_images, name = 100 * cached / total, num_sessions * num_turns, " ".join(proxy_flags[1:])
        print(f"{name:32} {share:5.1f} % of {total} tokens found, {num_encoded:.0f} of {num_images} images computed")


if __name__ == "__main__":
    main()
