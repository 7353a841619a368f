"""Rank 0's model runner: what it runs, the other ranks run."""

from __future__ import annotations

from common.engine.model_runner import Forward, ModelRunner
from common.engine.plan import StepPlan
from common.errors import EngineDeadError
from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.spec import KVCacheConfig
from common.models.loading.loader import LoadedModel
from common.node.ranks.ranks import Ranks


class RankedRunner(ModelRunner):
    """A step has ended when all ranks have: what is published, freed or read into after it is no longer written by any.
    One that raises is the end of all: nobody knows how far the others got with it."""

    def __init__(self, model: LoadedModel, storage: KVStorage, config: KVCacheConfig, ranks: Ranks) -> None:
        super().__init__(model, storage, config)
        self._ranks = ranks

    def launch(self, plan: StepPlan) -> Forward:
        self.synchronize()
        self._ranks.send(plan)
        try:
            forward = super().launch(plan)
            self._ranks.wait_for_step()
        except Exception as exc:
            self._ranks.fail(f"a step of {self._ranks.size} ranks failed: {exc}")
            raise
        return forward

    def synchronize(self) -> None:
        """Raises EngineDeadError when a rank is gone, or a step failed."""
        if (death := self._ranks.death) is not None:
            raise EngineDeadError(death)
        super().synchronize()
