"""Drafts of the model's own head: how many are right is known beforehand, because the head was made for the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config.node import NodeConfig
from common.engine.core import EngineCore
from common.node.runtime import NodeModel, create_core, load_node_model
from common.request import Request, SamplingParams
from tests.engine.cores import collect, engine, tokens, used
from tests.support.models import tiered
from tests.support.mtp import MTP_FAMILIES, checkpoint_with_mtp, num_accepted

ROOMY: dict[str, Any] = {
    "kv_cache_memory": 16 << 20,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 40,
}
MTP = '{"method": "mtp", "num_speculative_tokens": 3}'
PROMPTS = (tokens(1, 37), tokens(2, 64))
NUM_TOKENS = 30


def mtp_engine(folder: Path, **flags: Any) -> tuple[EngineCore, NodeModel]:
    config = NodeConfig(
        model=str(folder), dtype="float32", device="cpu", **{**ROOMY, "speculative_config": MTP, **flags}
    )
    model = load_node_model(config)
    core = create_core(config, model)
    if core.speculation is not None:
        core.speculation.adapts = False
    return core, model


def ask(core: EngineCore, *prompts: list[int], salt: str | None = None) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        core.add_request(Request(f"r{index}", prompt, params, cache_salt=salt, arrival_s=0.0))
    found = collect(core)
    return [found[f"r{index}", 0] for index in range(len(prompts))]


@pytest.mark.parametrize("family", tiered(MTP_FAMILIES, ("qwen3_5", "nemotron_h")))
def test_drafts_of_the_head_when_it_is_right_at_known_places_then_are_accepted_there(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, model = engine(family, **ROOMY)
    answers = ask(core, *PROMPTS)
    texts = [(len(prompt), prompt + answer) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    folder = checkpoint_with_mtp(family, tmp_path / "model", texts)
    core, model = mtp_engine(folder)
    assert core.speculation is not None
    observed: list[tuple[str, int, int]] = []
    stock = core.speculation.observe

    def observe(sequence: Any, num_drafts: int, num_right: int) -> None:
        observed.append((sequence.request.request_id, num_drafts, num_right))
        stock(sequence, num_drafts, num_right)

    monkeypatch.setattr(core.speculation, "observe", observe)
    for salt in ("cold", "again", "again"):
        observed.clear()
        assert ask(core, *PROMPTS, salt=salt) == answers
        for index, prompt in enumerate(PROMPTS):
            found = [counts for name, *counts in observed if name == f"r{index}"]
            expected = num_accepted(len(prompt), len(prompt) + NUM_TOKENS, 3)
            assert list(map(tuple, found)) == expected
        assert used(model) == (0, 0, 0, 0)
