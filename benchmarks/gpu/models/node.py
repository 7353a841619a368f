"""A node's model and engine of one of ``random_weights.py``, in process, with room for what is measured."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.measure.timing import find_device
from benchmarks.gpu.models.random_weights import random_weights, write_config
from benchmarks.gpu.settings import Settings
from common.config.node import NodeConfig
from common.engine.core import EngineCore
from common.geometry.geometry import model_geometry
from common.kv_cache.layout import make_layout
from common.models.loading.checkpoint import read_config
from common.models.loading.quiet import quiet_transformers
from common.node.runtime import NodeModel, create_core, load_node_model
from common.request import Request, SamplingParams

BLOCK_SIZE = 16
STEP_TOKENS = 2048
"""Default of ``--max-num-batched-tokens``."""


class BenchmarkNode:
    """``notes``: what loading found out, for the results."""

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: Settings,
        *,
        dtype: str,
        eager: bool,
        max_batch: int,
        context: int,
        prompt: int,
    ) -> None:
        """The pools hold ``max_batch`` sequences of ``context`` tokens with a checkpoint for every second one, and some
        of ``prompt`` tokens."""
        device = find_device()
        raw = read_config(write_config(name, dtype, folder))
        layout = make_layout(model_geometry(raw, dtype), BLOCK_SIZE)
        slots = (max_batch + max_batch // 2 + 16) * layout.slot_bytes
        num_tokens = max_batch * (context + BLOCK_SIZE) + 4 * prompt
        blocks = (num_tokens // BLOCK_SIZE) * sum(layout.group_block_bytes)
        self.config = NodeConfig(
            model=str(folder),
            dtype=dtype,
            device=device.type,
            ops_backend=settings.backend_on(device.type),
            enforce_eager=eager,
            max_num_seqs=max_batch,
            max_model_len=max(context, prompt),
            kv_cache_memory=int((slots + blocks) * 1.02) + (1 << 20),
            state_memory_share=min(0.99, max(0.01, slots / (slots + blocks))) if slots else None,
        )
        self.notes: dict[str, str] = {}
        with random_weights(self.notes), quiet_transformers():
            self.model: NodeModel = load_node_model(self.config)
        self.vocab_size = self.model.loaded.geometry.vocab_size
        self._random = random.Random(0)
        self._count = 0

    def core(self, step_tokens: int = STEP_TOKENS) -> EngineCore:
        return create_core(replace(self.config, max_num_batched_tokens=step_tokens), self.model)

    def add(self, core: EngineCore, num_prompt: int, num_output: int) -> str:
        """A request with a prompt that nobody has computed yet; its id."""
        self._count += 1
        prompt = [self._random.randrange(2, self.vocab_size) for _ in range(num_prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        core.add_request(Request(str(self._count), prompt, params))
        return str(self._count)
