"""What a holder has of one prompt, as its reader learns of it.

A ``ReadablePrefix`` says what can be read now. A ``ManifestStream`` brings one after another: a finished manifest is a
stream of one, which its holder confirms while it is read; a rendezvous is polled from the moment the request arrives
until the prompt is finished, its leg has failed, its holder is lost or nobody wants it any more. ``close`` gives
everything up at the holder, exactly once: a lease is released, a leg that still computes is called off.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch

from common.errors import InvalidRequestError, PrefillLegFailedError, TandemError, TransferError
from common.models.loading.loader import LoadedModel
from common.node.digests import PrefixDigests
from common.node.peers.directory import PeerDirectory
from common.node.pull.remote_leases import RemoteLeases
from common.transfer.jobs import PullReason
from common.wire.manifest import Manifest, ManifestShape, PartialManifest, PrefillReport
from common.wire.pull import MAX_WAIT_SECONDS, RendezvousQuery, read_answer
from common.wire.routes import PULL_ROUTE

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = MAX_WAIT_SECONDS + 5.0
"""How long a poll waits for its answer: as long as the holder may keep it open, and 5 s for a busy event loop there."""

NO_DIGESTS = PrefixDigests()
ROW_PARAM = "kv_transfer_params.tandem_output_row"
OWN_ABORT_WAIT_S = 0.25
"""How long a decode leg waits to be aborted itself after its prefill leg was: a client that leaves ends both, and what
the client no longer wants is neither computed nor counted as a failure. A quarter of a second covers a busy proxy."""


@dataclass(frozen=True, slots=True)
class ReadablePrefix:
    """The first ``num_tokens`` tokens of a prompt, readable at engine ``engine_id`` in its life ``epoch``.

    ``block_ids`` and ``block_generations`` are per block group, from block 0 on. Only a final one has the state
    (``slot_id`` above 0), the ``output_row`` ([hidden], in host memory), the report, and digests when its holder
    makes them. ``known_s``: when it came, on ``time.monotonic``.
    """

    engine_id: str
    epoch: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    block_generations: tuple[tuple[int, ...], ...]
    is_final: bool
    known_s: float
    slot_id: int = 0
    slot_generation: int = 0
    output_row: Any = None
    digests: PrefixDigests = NO_DIGESTS
    report: PrefillReport | None = None

    @classmethod
    def of(cls, manifest: Manifest | PartialManifest, loaded: LoadedModel) -> ReadablePrefix:
        """Raises InvalidRequestError when the output row is not one of this model."""
        common: dict[str, Any] = {
            "engine_id": manifest.engine_id,
            "epoch": manifest.epoch,
            "num_tokens": manifest.num_tokens,
            "block_ids": manifest.block_ids,
            "block_generations": manifest.generations,
            "known_s": time.monotonic(),
        }
        if isinstance(manifest, PartialManifest):
            return cls(is_final=False, **common)
        return cls(
            is_final=True,
            slot_id=manifest.slot_id,
            slot_generation=manifest.slot_generation,
            output_row=_output_row(manifest, loaded),
            digests=PrefixDigests(manifest.digests, manifest.slot_digest),
            report=manifest.prefill,
            **common,
        )


def _output_row(manifest: Manifest, loaded: LoadedModel) -> torch.Tensor | None:
    """The prompt's last hidden row, [hidden], in host memory; None when the manifest brings none."""
    if manifest.output_row is None or manifest.output_row_dtype is None:
        return None
    dtype: torch.dtype = getattr(torch, manifest.output_row_dtype)
    row = torch.frombuffer(bytearray(manifest.output_row), dtype=dtype)
    if dtype != loaded.dtype or row.numel() != loaded.geometry.hidden_size:
        raise InvalidRequestError(
            f"{ROW_PARAM} has {row.numel()} values of {dtype}, this model's rows have {loaded.geometry.hidden_size} of "
            f"{loaded.dtype}",
            param=ROW_PARAM,
        )
    return row


class ManifestStream(abc.ABC):
    """What can be read of one prompt, more and more. Lives on the event loop."""

    @property
    @abc.abstractmethod
    def final(self) -> ReadablePrefix | None:
        """The whole prompt, once its manifest is here and known to be its holder's."""

    @abc.abstractmethod
    async def beyond(self, num_tokens: int) -> ReadablePrefix:
        """What can be read now, as soon as that is final or more than ``num_tokens`` tokens.

        Raises:
            TransferError: nothing more will come.
            TandemError: the holder refused to compute the prompt for a reason that its client should hear.
        """

    async def confirmed(self) -> None:
        """Returns when all that ``beyond`` said is known to be its holder's word, which it is where the holder said it
        itself. Until then what was read may not be used. Raises TransferError: it is not."""
        return

    @abc.abstractmethod
    def close(self) -> None:
        """Nobody reads any more: the holder is told. Idempotent; does not wait."""


class FixedManifestStream(ManifestStream):
    """A finished manifest, from its holder or, until ``confirm`` has asked it, from who knows whom. ``close`` releases
    its lease; one that is not held yet is left to ``give_back``."""

    def __init__(
        self, prefix: ReadablePrefix, leases: RemoteLeases, lease_id: str, give_back: Callable[[], None] | None = None
    ) -> None:
        assert prefix.is_final
        self._prefix = prefix
        self._leases = leases
        self._lease_id = lease_id
        self._give_back = give_back
        self._is_closed = False
        self._check: asyncio.Task[None] | None = None

    @property
    def final(self) -> ReadablePrefix | None:
        check = self._check
        is_confirmed = check is None or (check.done() and not check.cancelled() and check.exception() is None)
        return self._prefix if is_confirmed else None

    async def beyond(self, num_tokens: int) -> ReadablePrefix:
        return self._prefix

    def confirm(self, check: Coroutine[Any, Any, None]) -> None:
        """Runs ``check`` beside whatever is read meanwhile. It raises TransferError when the manifest is not its
        holder's."""
        self._check = asyncio.create_task(check, name=f"manifest {self._lease_id}")
        self._check.add_done_callback(lambda task: task.cancelled() or task.exception())  # a pull may end before it

    async def confirmed(self) -> None:
        if self._check is None:
            return
        await asyncio.wait({self._check})
        if self._check.cancelled():
            raise nobody_waits()
        self._check.result()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        is_answered = self._check is not None and self._check.done()
        if self._check is not None:
            self._check.cancel()
        if not self._leases.release(self._lease_id) and not is_answered and self._give_back is not None:
            self._give_back()


ReadManifest = Callable[[Manifest | PartialManifest], ReadablePrefix]
"""Checks a manifest against this node and the prompt; raises TransferError or InvalidRequestError."""


class RendezvousManifestStream(ManifestStream):
    """Follows a prompt that a peer computes. ``start`` begins to poll."""

    def __init__(
        self,
        peers: PeerDirectory,
        leases: RemoteLeases,
        url: str,
        rendezvous_id: str,
        shape: ManifestShape,
        read: ReadManifest,
    ) -> None:
        self._peers = peers
        self._leases = leases
        self._url = url
        self._id = rendezvous_id
        self._shape = shape
        self._read = read
        self._part: PartialManifest | None = None  # of all answers so far, each of which says what is new
        self._prefix: ReadablePrefix | None = None
        self._error: TandemError | None = None
        self._is_closed = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._unsubscribe = self._peers.liveness.subscribe(self._url, self._lose)
        self._task = asyncio.create_task(self._poll(), name=f"rendezvous {self._id}")

    @property
    def final(self) -> ReadablePrefix | None:
        return self._prefix if self._prefix is not None and self._prefix.is_final else None

    async def beyond(self, num_tokens: int) -> ReadablePrefix:
        while True:
            prefix = self._prefix
            if prefix is not None and (prefix.is_final or prefix.num_tokens > num_tokens):
                return prefix
            if self._error is not None:
                raise self._error
            await self._changed.wait()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._unsubscribe()
        if self._task is not None:
            self._task.cancel()
        if not self._leases.release(self._id) and not isinstance(self._error, PrefillLegFailedError):
            self._leases.call_off(self._id, self._url)
        self._end(nobody_waits())

    async def _poll(self) -> None:
        try:
            while self.final is None:
                after = self._part.num_tokens if self._part is not None else 0
                query = RendezvousQuery(self._id, after, MAX_WAIT_SECONDS, have=after)
                answer = await self._peers.query(self._url, PULL_ROUTE, query.to_body(), POLL_TIMEOUT_S)
                manifest = read_answer(answer, after=after, shape=self._shape)
                if manifest is None:
                    continue
                if isinstance(manifest, Manifest):
                    # From here on the prompt is ours to release, even if what it says is not usable.
                    self._leases.hold(self._id, self._url, manifest.lease_seconds)
                else:
                    manifest = self._part = manifest.joined_to(self._part)
                self._prefix = self._read(manifest)
                self._wake()
        except InvalidRequestError as exc:
            self._end(TransferError(f"{self._url} answers a pull with what is no manifest: {exc}", code="bad_manifest"))
        except TandemError as exc:
            self._end(exc)
        except Exception:
            logger.exception("polling failed rendezvous=%s url=%s", self._id, self._url)
            self._end(TransferError("internal error while polling"))

    def _lose(self, why: str) -> None:
        if self.final is None:
            if self._task is not None:
                self._task.cancel()
            self._end(TransferError(f"{self._url} is lost: {why}", code="peer_lost"))

    def _end(self, error: TandemError) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def nobody_waits() -> TransferError:
    return TransferError("nobody waits for the prompt any more", code=PullReason.CANCELLED)
