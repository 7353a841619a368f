"""Handing out a computed prompt: the prefill leg.

1 the engine computes the prompt (or finds it); with a rendezvous, its reader is told after each step which blocks are
finished, 2 the engine leases blocks and state between two steps, 3 the manifest says which memory holds the prompt, in
which generations, until when: it is the leg's answer, and what a rendezvous' reader gets. The memory is free again when
the reader releases the lease or stops renewing it; nothing is written to the reader. A reader may call the leg off.
"""

from __future__ import annotations

import contextlib
import time

from common.engine.outputs import RequestOutput
from common.errors import RequestAbortedError, TandemError
from common.kv_cache.sharing.leases import PrefixProgress
from common.node.lend.manifests import leased_manifest
from common.node.node import Node
from common.node.pull.pull_task import RemotePrefix
from common.node.serving.prompt_jobs import EncodedPrompt
from common.request import Request
from common.wire.manifest import Manifest, PartialManifest, PrefillReport


class PrefillLeg:
    """``common.node.serving.serving.PrefillLeg`` of a prefill node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def run(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        *,
        cache_salt: str | None,
        priority: int,
        rendezvous_id: str | None = None,
        remote: RemotePrefix | None = None,
    ) -> tuple[Manifest, RequestOutput]:
        """Computes the prompt and leases it out, as ``rendezvous_id`` if there is one. Aborted like any request when
        the caller goes away before that. ``remote``: a part of it that another node has; its caller holds it.

        The lease outlives the call: whoever got the manifest releases it, or it expires.

        Raises:
            RequestAbortedError: the rendezvous' reader called the leg off.
            TandemError: as ``RendezvousTable.open``, or the engine's.
        """
        request = Request(
            request_id=rendezvous_id or request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=None,
            cache_salt=cache_salt,
            priority=priority,
            remote=remote,
            is_remote_optional=True,
            arrival_s=time.monotonic(),
            semantic_boundaries=prompt.semantic_boundaries,
            wants_progress=rendezvous_id is not None,
        )
        if rendezvous_id is None:
            return await self._compute(request)
        table = self._node.rendezvous
        table.open(rendezvous_id)
        try:
            manifest, output = await self._compute(request)
        except BaseException as exc:
            gone = RequestAbortedError("the prefill leg's caller went away")
            table.fail(rendezvous_id, exc if isinstance(exc, TandemError) else gone)
            raise
        if not table.finish(rendezvous_id, manifest):
            self._release(rendezvous_id)
            raise RequestAbortedError("its reader does not want the prompt any more")
        return manifest, output

    async def _compute(self, request: Request) -> tuple[Manifest, RequestOutput]:
        manifest: Manifest | None = None
        try:
            async with contextlib.aclosing(self._node.engine.generate(request)) as outputs:
                async for output in outputs:
                    if output.progress is not None:
                        self._node.rendezvous.advance(request.request_id, self._part(output.progress))
                    if output.handoff is not None:
                        manifest = await self._manifest(request, output)
                        result = output
        finally:
            if manifest is None:  # nobody will ever learn of a lease that the last step may have made
                self._release(request.request_id)
        assert manifest is not None
        return manifest, result

    def _release(self, lease_id: str) -> None:
        manager = self._node.model.manager
        self._node.engine.post(lambda: manager.release_lease(lease_id))

    def _part(self, progress: PrefixProgress) -> PartialManifest:
        node = self._node
        cache = node.model.cache_config
        return PartialManifest(
            engine_id=node.engine_id,
            epoch=node.model.manager.generations.epoch,
            fingerprint=node.backend.fingerprint,
            block_size=cache.block_size,
            num_tokens=progress.num_tokens,
            block_ids=progress.tables,
            generations=progress.generations,
            lease_seconds=node.config.kv_lease_seconds,
        )

    async def _manifest(self, request: Request, output: RequestOutput) -> Manifest:
        assert output.seconds is not None
        report = PrefillReport(
            node=self._node.name,
            cached_tokens=output.num_cached_tokens,
            computed_tokens=output.num_local_computed_tokens,
            queue_seconds=output.seconds.queue,
            prefill_seconds=output.seconds.prefill or 0.0,
        )
        return await leased_manifest(
            self._node,
            output.handoff,
            lease_id=request.request_id,
            # Whoever follows a rendezvous has the prompt.
            prompt_token_ids=() if request.wants_progress else request.prompt_token_ids,
            report=report,
        )
