"""Handing out a computed prompt: the prefill leg's answer.

1 the engine computes the prompt (or finds it), 2 it leases blocks and state between two steps, 3 the answer carries the
manifest: which memory holds the prompt, in which generations, until when. The memory is free again when the reader
releases the lease or stops renewing it; nothing is written to the reader.
"""

from __future__ import annotations

import time

import torch

from common.api.handoff import Manifest, PrefillReport
from common.kv_cache.manager import LeasedPrefix
from common.node.node import Node
from common.node.serving import EncodedPrompt
from common.request import Request, RequestOutput


class PrefillLeg:
    """``common.node.serving.PrefillLeg`` of a prefill node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def run(
        self, request_id: str, prompt: EncodedPrompt, *, cache_salt: str | None, priority: int
    ) -> tuple[Manifest, RequestOutput]:
        """Computes the prompt and leases it out. Aborted like any request when the caller goes away before that.

        The lease outlives the call: whoever got the manifest releases it, or it expires.
        """
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=None,
            cache_salt=cache_salt,
            priority=priority,
            arrival_s=time.monotonic(),
            semantic_boundaries=prompt.semantic_boundaries,
        )
        result: RequestOutput | None = None
        try:
            async for output in self._node.engine.generate(request):
                result = output
        finally:
            if result is None:  # nobody will ever learn of a lease that the last step may have made
                manager = self._node.model.manager
                self._node.engine.post(lambda: manager.release_lease(request_id))
        assert result is not None
        return self._manifest(request, result), result

    def _manifest(self, request: Request, output: RequestOutput) -> Manifest:
        node = self._node
        lease: LeasedPrefix = output.handoff
        assert output.seconds is not None
        cache = node.model.cache_config
        row, row_dtype = _row_bytes(lease.output_row)
        return Manifest(
            engine_id=node.engine_id,
            request_id=request.request_id,
            host=node.config.advertise_host or node.config.host,
            port=node.config.port,
            num_tokens=lease.num_tokens,
            block_size=cache.block_size,
            block_ids=(lease.block_ids,) if cache.has_attention else (),
            generations=(lease.block_generations,) if cache.has_attention else (),
            epoch=node.model.manager.generations.epoch,
            fingerprint=node.backend.fingerprint,
            lease_id=request.request_id,
            lease_seconds=node.config.kv_lease_seconds,
            prefix_key=lease.key,
            prompt_token_ids=tuple(request.prompt_token_ids),
            slot_id=lease.slot_id,
            slot_generation=lease.slot_generation,
            output_row=row,
            output_row_dtype=row_dtype,
            prefill=PrefillReport(
                node=node.name,
                cached_tokens=output.num_cached_tokens,
                computed_tokens=output.num_local_computed_tokens,
                queue_seconds=output.seconds.queue,
                prefill_seconds=output.seconds.prefill or 0.0,
            ),
        )


def _row_bytes(row: torch.Tensor) -> tuple[bytes, str]:
    """Raw little-endian bytes of a [hidden] row, and its dtype's name."""
    host = row.detach().cpu().contiguous()
    return host.view(torch.uint8).numpy().tobytes(), str(host.dtype).removeprefix("torch.")
