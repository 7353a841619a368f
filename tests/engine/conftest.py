from __future__ import annotations

import pytest

from tests.engine.cores import collect, engine, prompt_of, request


@pytest.fixture(scope="session")
def alone() -> dict[int, list[int]]:
    """Greedy continuations of prompts 0..11, each run alone with plenty of memory and without any cache."""
    core, _ = engine(kv_cache_memory=64 << 20, enable_prefix_caching=False, max_num_batched_tokens=512)
    out = {}
    for seed in range(12):
        core.add_request(request("r", prompt_of(seed)))
        out[seed] = collect(core)["r", 0]
    return out
