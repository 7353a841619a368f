"""The same engine on a CUDA device: skipped where there is none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from common.config.node import NodeConfig
from common.node.runtime import create_core, load_node_model
from common.request import Request, SamplingParams
from tests.engine.harness import random_tokens, stock_greedy, tolerance
from tests.support.models import FAMILIES, checkpoint
from tests.support.tier_node import TierNode

pytestmark = pytest.mark.cuda

NUM_OUTPUT = 24


def run_on_cuda(family: str, prompts: list[list[int]], dtype: str) -> list[list[tuple[int, float]]]:
    """(token, log-probability) of each prompt's greedy continuation: all prompts at once, then all again from cache."""
    config = NodeConfig(
        model=str(checkpoint(family)), dtype=dtype, device="cuda", max_num_batched_tokens=256, kv_cache_memory=64 << 20
    )
    model = load_node_model(config)
    assert model.storage.block_arenas[0].device.type == "cuda"
    core = create_core(config, model)
    results: list[list[tuple[int, float]]] = []
    for turn in range(2):
        out: dict[str, list[tuple[int, float]]] = {}
        for index, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, logprobs=0)
            core.add_request(Request(f"{turn}.{index}", prompt, params))
        while core.has_work():
            for output in core.step():
                assert output.error is None
                entries = output.logprobs or []
                out.setdefault(output.request_id, []).extend((entry.token_id, entry.logprob) for entry in entries)
        results += [out[f"{turn}.{index}"] for index in range(len(prompts))]
    assert model.manager.check() == []
    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_when_on_cuda_equals_stock_cold_and_cached(family: str) -> None:
    prompts = [random_tokens(count, seed=count) for count in (1, 16, 17, 100, 700)]
    results = run_on_cuda(family, prompts, "float32")
    for result, prompt in zip(results, prompts * 2, strict=True):
        tokens, rows = stock_greedy(family, prompt, NUM_OUTPUT)
        logprobs = torch.log_softmax(rows, -1)
        for step, (token, logprob) in enumerate(result):
            expected = float(logprobs[step, token])
            assert logprob == pytest.approx(expected, abs=tolerance(family)), (len(prompt), step)
            if token != tokens[step]:  # only where stock itself is undecided
                assert float(logprobs[step, tokens[step]]) - expected < tolerance(family)
                break


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_repeat_when_on_cuda_in_half_precision_gives_the_same_tokens(dtype: str) -> None:
    prompts = [random_tokens(count, seed=count) for count in (17, 300)]
    results = run_on_cuda("granitemoehybrid", prompts, dtype)
    assert all(len(result) == NUM_OUTPUT for result in results)
    for cold, cached in zip(results[:2], results[2:], strict=True):
        assert cold[0] == pytest.approx(cached[0], abs=5e-2)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_conversation_when_its_blocks_went_to_a_tier_then_goes_on_from_there(kind: str, tmp_path: Path) -> None:
    """The tier is filled from pools on the device, and read back into them."""
    tier = "host:64MiB" if kind == "host" else f"disk:{tmp_path / 'tier'}?size=64MiB"
    prompt = random_tokens(600, seed=1)

    async def converse(*tiers: str) -> tuple[list[int], list[int], float]:
        async with TierNode(*tiers, device="cuda") as node:
            answer, _ = await node.generate(prompt)
            if tiers:
                await node.flush()
                await node.forget_memory()
            turn = [*prompt, *answer, *random_tokens(30, seed=50)]
            second, _ = await node.generate(turn)
            await node.check()
            return answer, second, node.metric("tier_hit_tokens_total") if tiers else 0.0

    expected = asyncio.run(converse())
    found = asyncio.run(converse(tier))
    assert found[:2] == expected[:2]
    assert found[2] >= len(prompt)
