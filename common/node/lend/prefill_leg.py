"""Handing out a computed prompt: the prefill leg.

1 a rendezvous opens, 2 what is left to do with the request is done: other nodes are asked for what they have of the
prompt, images are prepared, 3 the engine computes the prompt (or finds it); with a rendezvous, its reader is told after
each step which blocks are finished, 4 the engine leases blocks and state between two steps, 5 the manifest says which
memory holds the prompt, in which generations, until when: it is the leg's answer, and what a rendezvous' reader gets.
The memory is free again when the reader releases the lease or stops renewing it; nothing is written to the reader. A
reader may call the leg off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from common.engine.outputs import RequestOutput
from common.errors import RequestAbortedError, TandemError
from common.kv_cache.manager import KVCacheManager
from common.node.engine_thread import EngineThread
from common.node.lend.manifest_builder import ManifestBuilder
from common.node.lend.rendezvous import RendezvousTable, not_wanted
from common.request import Request
from common.wire.manifest import Manifest, PrefillReport


class PrefillLeg:
    """Stateless. ``node_name``: as the report to the reader names this node."""

    def __init__(
        self,
        node_name: str,
        *,
        manager: KVCacheManager,
        engine: EngineThread,
        rendezvous: RendezvousTable,
        manifests: ManifestBuilder,
    ) -> None:
        self._node_name = node_name
        self._manager = manager
        self._engine = engine
        self._rendezvous = rendezvous
        self._manifests = manifests

    async def run(
        self, request: Request, prepare: Callable[[], Awaitable[None]] | None = None
    ) -> tuple[Manifest, RequestOutput]:
        """Computes the prompt and leases it out under the request's id, which is that of the rendezvous when the
        request wants progress. Aborted like any request when the caller goes away before that. ``prepare``: what is
        left to do with the request; it may wait for a step, and take longer than a reader waits for a leg to come.

        The lease outlives the call: whoever got the manifest releases it, or it expires.

        Raises:
            RequestAbortedError: the rendezvous' reader called the leg off.
            TandemError: as ``RendezvousTable.open``, or the engine's.
        """
        if not request.wants_progress:
            if prepare is not None:
                await prepare()
            return await self._compute(request)
        table, rendezvous_id = self._rendezvous, request.request_id
        table.open(rendezvous_id)
        try:
            if prepare is not None:
                await prepare()
            if table.is_called_off(rendezvous_id):
                raise not_wanted()
            manifest, output = await self._compute(request)
        except BaseException as exc:
            gone = RequestAbortedError("the prefill leg's caller went away")
            table.fail(rendezvous_id, exc if isinstance(exc, TandemError) else gone)
            raise
        if not table.finish(rendezvous_id, manifest):
            self._release(rendezvous_id)
            raise not_wanted()
        return manifest, output

    async def _compute(self, request: Request) -> tuple[Manifest, RequestOutput]:
        manifest: Manifest | None = None
        try:
            async with contextlib.aclosing(self._engine.generate(request)) as outputs:
                async for output in outputs:
                    if output.progress is not None:
                        self._rendezvous.advance(request.request_id, self._manifests.partial(output.progress))
                    if output.handoff is not None:
                        manifest = await self._manifest(request, output)
                        result = output
        finally:
            if manifest is None:  # no reader will ever learn of a lease that the last step may have made
                self._release(request.request_id)
        assert manifest is not None
        return manifest, result

    def _release(self, lease_id: str) -> None:
        self._engine.post(lambda: self._manager.release_lease(lease_id))

    async def _manifest(self, request: Request, output: RequestOutput) -> Manifest:
        assert output.seconds is not None
        assert output.handoff is not None
        report = PrefillReport(
            node=self._node_name,
            cached_tokens=output.num_cached_tokens,
            computed_tokens=output.num_local_computed_tokens,
            queue_seconds=output.seconds.queue,
            prefill_seconds=output.seconds.prefill or 0.0,
        )
        return await self._manifests.leased(
            output.handoff,
            lease_id=request.request_id,
            # Whoever follows a rendezvous has the prompt.
            prompt_token_ids=() if request.wants_progress else request.prompt_token_ids,
            images=() if request.wants_progress else request.images,
            report=report,
        )
