"""Taking in a prompt that a peer computed: from ``kv_transfer_params`` to something the engine can pull.

1 parse and check the manifest, 2 is its holder a peer of this node, 3 hold the lease (renewed from here on), 4 compare
fingerprints and layout, 5 connect to the holder in the life that made the manifest, 6 the engine pulls, 7 the lease is
released as soon as the pull has ended, and on every way out. Leaves by: a prefix to pull, ``None`` (recompute), an
error.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import torch

from common.api.handoff import Manifest
from common.errors import InvalidRequestError, TransferError
from common.node.node import Node
from common.node.pulling import RemotePrefix

logger = logging.getLogger(__name__)


class Intake:
    """``common.node.serving.Intake`` of a decode node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def parse(self, params: Mapping[str, Any]) -> Manifest:
        """Raises InvalidRequestError naming the key that is missing, malformed or does not fit this node's model."""
        geometry = self._node.model.cache_config.geometry
        return Manifest.from_params(
            params,
            num_block_groups=1 if geometry.attention_layers else 0,
            has_state=bool(geometry.state_layers),
            vocab_size=geometry.vocab_size,
        )

    @contextlib.asynccontextmanager
    async def remote_prefix(self, manifest: Manifest) -> AsyncIterator[RemotePrefix | None]:
        """Holds the manifest's lease while the block runs, or until its pull has ended, and connects to its holder.

        Yields None when the holder cannot be used and the policy is to recompute.

        Raises:
            InvalidRequestError: the holder is not an allowed peer, or is of another model or layout.
            TransferError: it cannot be used and the policy is to fail.
        """
        node = self._node
        host = f"[{manifest.host}]" if ":" in manifest.host else manifest.host
        url = f"http://{host}:{manifest.port}"
        node.peers.check_allowed(url)
        self._check_compatible(manifest)
        node.remote_leases.hold(manifest.lease_id, url, manifest.lease_seconds)
        try:
            prefix: RemotePrefix | None = None
            try:
                prefix = await self._connect(manifest, url)
            except TransferError as exc:
                node.metrics.transfer_failed("mismatch" if exc.code.endswith("mismatch") else "failed")
                logger.warning("handoff unusable request_id=%s: %s", manifest.request_id, exc.message)
                if node.config.kv_load_failure_policy == "fail":
                    raise
                node.remote_leases.release(manifest.lease_id)
            yield prefix
        finally:
            node.remote_leases.release(manifest.lease_id)

    def _check_compatible(self, manifest: Manifest) -> None:
        node = self._node
        block_size = node.model.cache_config.block_size
        if manifest.block_size != block_size:
            raise InvalidRequestError(
                f"kv_transfer_params.tandem_block_size {manifest.block_size} differs from this node's --block-size "
                f"{block_size}",
                param="kv_transfer_params.tandem_block_size",
            )
        if manifest.fingerprint != node.backend.fingerprint:
            raise InvalidRequestError(
                f"kv_transfer_params.tandem_fingerprint {manifest.fingerprint} is of another model or layout than this "
                f"node's {node.backend.fingerprint}",
                param="kv_transfer_params.tandem_fingerprint",
            )

    async def _connect(self, manifest: Manifest, url: str) -> RemotePrefix:
        peer = await self._node.peers.connect(url, manifest.engine_id, manifest.epoch)
        return RemotePrefix(
            url=url,
            peer=peer,
            engine_id=manifest.engine_id,
            epoch=manifest.epoch,
            lease_id=manifest.lease_id,
            prefix_key=manifest.prefix_key,
            num_tokens=manifest.num_tokens,
            block_ids=manifest.block_ids[0] if manifest.block_ids else (),
            block_generations=manifest.generations[0] if manifest.generations else (),
            slot_id=manifest.slot_id,
            slot_generation=manifest.slot_generation,
            output_row=self._output_row(manifest),
        )

    def _output_row(self, manifest: Manifest) -> torch.Tensor:
        """The prompt's last hidden row, [hidden], on this node's device."""
        param = "kv_transfer_params.tandem_output_row"
        if manifest.output_row is None or manifest.output_row_dtype is None:
            raise InvalidRequestError(f"{param} is missing", param=param)
        loaded = self._node.model.loaded
        dtype: torch.dtype = getattr(torch, manifest.output_row_dtype)
        row = torch.frombuffer(bytearray(manifest.output_row), dtype=dtype)
        if dtype != loaded.dtype or row.numel() != loaded.geometry.hidden_size:
            raise InvalidRequestError(
                f"{param} has {row.numel()} values of {dtype}, this model's rows have {loaded.geometry.hidden_size} of "
                f"{loaded.dtype}",
                param=param,
            )
        return row.to(loaded.device)
