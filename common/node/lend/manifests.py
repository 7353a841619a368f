"""From a lease to what its reader is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from common.kv_cache.sharing.leases import LeasedPrefix
from common.node.lend.digests import make_digests
from common.wire.manifest import Manifest, PrefillReport

if TYPE_CHECKING:
    from common.node.node import Node


async def leased_manifest(
    node: Node,
    lease: LeasedPrefix,
    *,
    lease_id: str,
    prompt_token_ids: Sequence[int] = (),
    report: PrefillReport | None = None,
) -> Manifest:
    """The manifest of a prefix that is leased under ``lease_id``, with digests as ``--kv-transfer-verify`` says.

    ``prompt_token_ids``: for a reader that does not know the prompt.
    """
    storage, verify = node.model.storage, node.config.kv_transfer_verify
    digests = await asyncio.to_thread(make_digests, storage, lease.tables, lease.num_tokens, lease.slot_id, verify)
    row, row_dtype = _row_bytes(lease.output_row) if lease.output_row is not None else (None, None)
    return Manifest(
        engine_id=node.engine_id,
        request_id=lease_id,
        host=node.advertised_host,
        port=node.config.port,
        num_tokens=lease.num_tokens,
        block_size=node.model.cache_config.block_size,
        block_ids=lease.tables,
        generations=lease.generations,
        epoch=node.model.manager.generations.epoch,
        fingerprint=node.backend.fingerprint,
        lease_id=lease_id,
        lease_seconds=node.config.kv_lease_seconds,
        prefix_key=lease.key,
        prompt_token_ids=tuple(prompt_token_ids),
        slot_id=lease.slot_id,
        slot_generation=lease.slot_generation,
        output_row=row,
        output_row_dtype=row_dtype,
        prefill=report,
        digests=digests.blocks,
        slot_digest=digests.slot,
    )


def _row_bytes(row: torch.Tensor) -> tuple[bytes, str]:
    """Raw little-endian bytes of a [hidden] row, and its dtype's name."""
    host = row.detach().cpu().contiguous()
    return host.view(torch.uint8).numpy().tobytes(), str(host.dtype).removeprefix("torch.")
