"""A decode step of transformers alone: its forward, its cache, its greedy token."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from benchmarks.gpu.models.random_weights import make_weights
from common.models.adapter.arguments import step_arguments, stock_cache
from common.models.loading.quiet import quiet_transformers

NUM_STEPS = 12


@torch.inference_mode()
def stock_decode_s(folder: Path, dtype: torch.dtype, device: torch.device, context: int) -> float:
    """Median seconds of a step of one sequence behind ``context`` tokens."""
    with quiet_transformers():
        model = make_weights(folder, dtype, device)
        prompt = torch.arange(context, device=device)[None] % model.config.get_text_config().vocab_size
        output = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        cache, samples = stock_cache(output), []
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        for step in range(NUM_STEPS):
            begin_s = time.perf_counter()
            position = torch.tensor([context + step], device=device)
            output = model(input_ids=token, **step_arguments(model, cache, position))
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            token.tolist()
            samples.append(time.perf_counter() - begin_s)
    return statistics.median(samples[2:])
