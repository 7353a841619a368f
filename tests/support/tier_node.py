"""An engine with its tiers in this process: the node's own engine thread, bridge, writer, reader and scanner; no HTTP
and no transfer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from common.config.node import NodeConfig
from common.config.tiers import parse_tier
from common.metrics.metrics import Metrics
from common.metrics.table import Role
from common.node.engine_thread import EngineThread
from common.node.pull.engine_bridge import EngineBridge
from common.node.pull.prefix_reader import FinishedPull
from common.node.runtime import create_core, load_node_model
from common.node.tiers.create import create_tiers
from common.node.tiers.tier_reader import TierPrefix
from common.request import Request, SamplingParams
from tests.support.models import checkpoint

PATIENCE_S = 15.0
_NUMBERS = itertools.count()


class TierNode:
    """An async context manager. ``tiers``: words of ``--kv-tier``. ``always_reads``: however long reading takes against
    computing, which on a crowded machine says nothing. ``flags``: of ``NodeConfig``; a ``model`` goes before
    ``family``."""

    def __init__(
        self,
        *tiers: str,
        family: str = "granitemoehybrid",
        with_images: bool = False,
        cluster_key: str | None = None,
        always_reads: bool = True,
        **flags: Any,
    ) -> None:
        defaults = {"kv_cache_memory": 4 << 20, "max_model_len": 1024, "max_num_seqs": 6, "dtype": "float32"}
        key_file = {"cluster_key_file": "unread"} if cluster_key is not None else {}
        config = NodeConfig(
            **{
                "model": str(checkpoint(family)) if "model" not in flags else "",
                "device": "cpu",
                "kv_tier": tuple(map(parse_tier, tiers)),
                **defaults,
                **key_file,
                **flags,
            }
        )
        self.model = load_node_model(config, with_images=with_images)
        self.manager = self.model.manager
        self.core = create_core(config, self.model)
        self.engine = EngineThread(self.core)
        self.metrics = Metrics(Role.DECODE)
        self.tiers = create_tiers(
            config, self.model, cluster_key, core=self.core, engine=self.engine, metrics=self.metrics
        )
        if self.tiers is not None and always_reads:
            self.tiers._s_per_token = lambda: float("inf")  # type: ignore[method-assign]
        self.bridge = EngineBridge(self, {TierPrefix: self.tiers.reader} if self.tiers is not None else {})
        self.core.pull_with(self.bridge, self.tiers)
        self.pulls: list[FinishedPull] = []

    async def __aenter__(self) -> TierNode:
        self.bridge.open()
        self.engine.start()
        if self.tiers is not None:
            self.metrics.set_source(self.tiers.samples)
            self.tiers.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.engine.close)
        await self.bridge.close()
        if self.tiers is not None:
            await self.tiers.close()

    def on_outcome(self, seq_id: str, prefix: Any, result: FinishedPull) -> None:
        self.pulls.append(result)
        self.engine.post(lambda: self.core.finish_pull(seq_id, result))

    def on_terminal(self, seq_id: str) -> None:
        raise AssertionError("reads of tiers are terminal")

    async def generate(self, prompt: Sequence[int], num_tokens: int = 8, **fields: Any) -> tuple[list[int], int]:
        """The answer's tokens, greedy, and how many of the prompt's were not computed."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request = Request(f"r{next(_NUMBERS)}", list(prompt), sampling, **fields)
        tokens: list[int] = []
        num_cached = 0
        async with asyncio.timeout(PATIENCE_S):
            async for output in self.engine.generate(request):
                tokens += output.token_ids
                num_cached = len(prompt) - output.num_local_computed_tokens
        return tokens, num_cached

    async def flush(self) -> None:
        """Until all that is worth it is in the tiers."""
        assert self.tiers is not None
        await self.until(lambda: self.tiers is not None and self.tiers.is_scanned)
        async with asyncio.timeout(PATIENCE_S):
            while await self.tiers.flush():
                await asyncio.sleep(0.005)

    async def settle(self) -> None:
        """Until the first tier has what it wants of the pools, as an idle node does; the others only what that lets
        go."""
        tiers = self.tiers
        assert tiers is not None
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await self.engine.call(lambda: tiers._look(is_whole=True))
                if not tiers._writing.total():
                    break
                await asyncio.sleep(0.005)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def forget_memory(self) -> None:
        """Everything that is cached is evicted, once nobody uses it: a write to a tier that others share may be under
        way."""

        def evict() -> bool:
            coordinator = self.manager._coordinator
            if any(each.is_pinned for each in coordinator.state):
                return False
            for each in list(coordinator.state):
                coordinator._evict_checkpoint(each, "capacity")
            for group in coordinator.groups:
                coordinator._evict_blocks(group, [block_id for _, block_id in list(group.items())])
            return True

        async with asyncio.timeout(PATIENCE_S):
            while not await self.engine.call(evict):
                await asyncio.sleep(0.005)

    async def check(self) -> None:
        """Once what is being written is written: nothing is held, nothing is inconsistent."""

        def look() -> tuple[list[str], Any]:
            return self.manager.check(), self.manager.stats()

        async with asyncio.timeout(PATIENCE_S):
            while True:
                violations, stats = await self.engine.call(look)
                assert violations == []
                if not stats.leases_active:
                    break
                await asyncio.sleep(0.005)
        for counts in (stats.blocks, stats.slots):
            assert counts["held"] == counts["leased"] == counts["quarantined"] == 0, counts

    def metric(self, name: str, **labels: str) -> float:
        text = self.metrics.render()[0].decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(
            each.value for each in samples if each.name == f"tandem_{name}" and labels.items() <= each.labels.items()
        )


def objects_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))
