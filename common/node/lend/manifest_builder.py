"""From a lease, or from the finished part of a prompt, to what its reader is told."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.images.span import ImageSpan
from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.sharing.leases import LeasedPrefix, PrefixProgress
from common.node.digests import make_digests
from common.wire.manifest import Manifest, PartialManifest, PrefillReport
from common.wire.pull import ManifestCheck


@dataclass(frozen=True, slots=True)
class ManifestBuilder:
    """What all manifests of one life of a node have in common.

    ``host``, ``port``: where its readers reach it. ``fingerprint``: of its model and layout. ``lease_seconds``: how
    long a lease lasts without renewal. ``verify``: which units get digests (``--kv-transfer-verify``). ``secret``:
    known to this process alone; with it a manifest is known again that comes back through a proxy.
    """

    engine_id: str
    epoch: int
    host: str
    port: int
    fingerprint: str
    lease_seconds: float
    verify: str
    storage: KVStorage
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    async def leased(
        self,
        lease: LeasedPrefix,
        *,
        lease_id: str,
        prompt_token_ids: Sequence[int] = (),
        images: Sequence[ImageSpan] = (),
        report: PrefillReport | None = None,
    ) -> Manifest:
        """The manifest of a prefix that is leased under ``lease_id``. ``prompt_token_ids``, ``images``: for a reader
        that does not know the prompt, because a proxy carries the manifest: it gets a proof too."""
        storage = self.storage
        digests = await asyncio.to_thread(
            make_digests, storage, lease.tables, lease.num_tokens, lease.slot_id, self.verify
        )
        row, row_dtype = _row_bytes(lease.output_row) if lease.output_row is not None else (None, None)
        manifest = Manifest(
            engine_id=self.engine_id,
            request_id=lease_id,
            host=self.host,
            port=self.port,
            num_tokens=lease.num_tokens,
            block_size=storage.config.block_size,
            block_ids=lease.tables,
            generations=lease.generations,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            lease_id=lease_id,
            lease_seconds=self.lease_seconds,
            prefix_key=lease.key,
            prompt_token_ids=tuple(prompt_token_ids),
            images=tuple(images),
            slot_id=lease.slot_id,
            slot_generation=lease.slot_generation,
            output_row=row,
            output_row_dtype=row_dtype,
            prefill=report,
            digests=digests.blocks,
            slot_digest=digests.slot,
        )
        return await asyncio.to_thread(self.proven, manifest) if prompt_token_ids else manifest

    def proven(self, manifest: Manifest) -> Manifest:
        """Blocks; milliseconds for a prompt of 100,000 tokens."""
        return dataclasses.replace(manifest, proof=self._proof(manifest.digest()))

    def is_mine(self, check: ManifestCheck) -> bool:
        """Whether this life of the node has made the manifest, just like this."""
        return hmac.compare_digest(self._proof(check.digest), check.proof)

    def _proof(self, digest: str) -> str:
        return hashlib.blake2b(digest.encode(), key=self.secret, digest_size=32).hexdigest()

    def partial(self, progress: PrefixProgress) -> PartialManifest:
        """The manifest of the finished blocks of a prompt that is still being computed; nothing is leased yet."""
        return PartialManifest(
            engine_id=self.engine_id,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            block_size=self.storage.config.block_size,
            num_tokens=progress.num_tokens,
            block_ids=progress.tables,
            generations=progress.generations,
            lease_seconds=self.lease_seconds,
        )


def _row_bytes(row: torch.Tensor) -> tuple[bytes, str]:
    """Raw little-endian bytes of a [hidden] row in host memory, and its dtype's name."""
    return row.view(torch.uint8).numpy().tobytes(), str(row.dtype).removeprefix("torch.")
