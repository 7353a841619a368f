"""What a holder promises a reader: a finished prompt, or the part of it that is finished so far.

The unprefixed keys are those of vLLM's NIXL connector, so that proxies written for it work unchanged; ours are flat
keys that such a proxy copies unseen. Numbers that may exceed 2^53 (epoch, generations) travel as decimal strings,
because JSON readers between us may hold numbers as doubles.

Life cycle of a ``Manifest``: 1 a holder builds it from a lease and answers ``to_params()``, 2 it reaches the reader
through a proxy's decode leg or as the answer of a pull, 3 the reader parses it with ``from_params()``, which checks
every size before anything is allocated, 4 one that came through a proxy is shown to its holder (``digest``, ``proof``),
5 the reader compares epoch and fingerprint with the peer it knows and reads. What a proxy brings is a claim of whoever
sends it: generations and tags prove the memory afterwards, but nothing in the memory proves the output row.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.images.span import ImageSpan
from common.names import HOST
from common.wire.fields import Fields, invalid
from common.wire.image_spans import read_spans, spans_to_json
from common.wire.manifest_reader import (
    DIGEST,
    HEX,
    MAX_BLOCK_SIZE,
    MAX_ID,
    MAX_LEASE_SECONDS,
    MAX_PROMPT_TOKENS,
    MAX_SECONDS,
    PREFIX,
    ManifestReader,
)

Groups = tuple[tuple[int, ...], ...]
"""Per block group, one entry per block."""


@dataclass(frozen=True, slots=True)
class ManifestShape:
    """What the reader's own model says about every manifest; None where it does not know (a proxy).

    ``num_block_groups``: block groups of the model. ``has_state``: whether it has recurrent layers. ``vocab_size``:
    bound of ``prompt_token_ids``.
    """

    num_block_groups: int | None = None
    has_state: bool | None = None
    vocab_size: int | None = None


ANY_SHAPE = ManifestShape()


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What the prefill leg did, for the trace and ``usage``: ``cached_tokens`` were not computed by anyone."""

    node: str
    cached_tokens: int
    computed_tokens: int
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0

    def to_params(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.computed_tokens,
            "seconds": {"queue": self.queue_seconds, "prefill": self.prefill_seconds},
        }

    @classmethod
    def from_params(cls, report: Mapping[str, object], num_tokens: int) -> PrefillReport:
        prefix = PREFIX + "tandem_prefill."
        fields = Fields(report, prefix=prefix)
        seconds = Fields(fields.mapping("seconds") or {}, prefix=prefix + "seconds.")
        return cls(
            node=fields.string("node", max_chars=512) or "",
            cached_tokens=fields.integer("cached_tokens", ge=0, le=num_tokens) or 0,
            computed_tokens=fields.integer("computed_tokens", ge=0, le=num_tokens) or 0,
            queue_seconds=seconds.number("queue", ge=0, le=MAX_SECONDS) or 0.0,
            prefill_seconds=seconds.number("prefill", ge=0, le=MAX_SECONDS) or 0.0,
        )


@dataclass(frozen=True, slots=True)
class PartialManifest:
    """The first ``num_tokens`` tokens (whole blocks) of a prompt that is still being computed.

    Cumulative: ``block_ids`` and ``generations`` have one tuple per block group, from block 0 on. No lease: the running
    sequence holds the blocks, and a reader that comes too late finds other generations.
    """

    engine_id: str
    epoch: int
    fingerprint: str
    block_size: int
    num_tokens: int
    block_ids: Groups
    generations: Groups
    lease_seconds: float
    first_block: int = 0

    def beyond(self, num_blocks: int) -> PartialManifest:
        """Without the first blocks of the prompt."""
        skipped = num_blocks - self.first_block
        return replace(
            self,
            first_block=num_blocks,
            block_ids=tuple(group[skipped:] for group in self.block_ids),
            generations=tuple(group[skipped:] for group in self.generations),
        )

    def joined_to(self, earlier: PartialManifest | None) -> PartialManifest:
        """From the first block on: what an earlier one named, as far as this one does not name it again.

        Raises:
            InvalidRequestError: blocks in between were never named, or the earlier one is another life's.
        """
        first = self.first_block
        if first == 0:
            return self
        known = 0 if earlier is None else earlier.num_tokens // earlier.block_size
        if earlier is None or first > known:
            invalid(PREFIX + "tandem_first_block", first, f"at most {known}, the blocks that were named before")
        if (earlier.engine_id, earlier.epoch, earlier.block_size) != (self.engine_id, self.epoch, self.block_size):
            invalid(PREFIX + "tandem_epoch", self.epoch, f"{earlier.epoch}, as in the part that this one goes on from")
        return replace(
            self,
            first_block=0,
            block_ids=_joined(earlier.block_ids, self.block_ids, first),
            generations=_joined(earlier.generations, self.generations, first),
        )

    def to_params(self) -> dict[str, Any]:
        return {
            "final": False,
            "remote_engine_id": self.engine_id,
            "remote_num_tokens": self.num_tokens,
            "remote_block_ids": [list(group) for group in self.block_ids],
            "tandem_generations": _decimals(self.generations),
            "tandem_block_size": self.block_size,
            "tandem_epoch": str(self.epoch),
            "tandem_fingerprint": self.fingerprint,
            "tandem_lease_seconds": self.lease_seconds,
            "tandem_first_block": self.first_block,
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any], shape: ManifestShape = ANY_SHAPE) -> PartialManifest:
        """The checked part. Raises InvalidRequestError as ``Manifest.from_params``."""
        reader = ManifestReader(params)
        num_tokens = reader.integer("remote_num_tokens", ge=0, le=MAX_PROMPT_TOKENS)
        block_size = reader.integer("tandem_block_size", ge=1, le=MAX_BLOCK_SIZE)
        if num_tokens % block_size:
            invalid(PREFIX + "remote_num_tokens", num_tokens, f"a multiple of tandem_block_size {block_size}")
        first_block = reader.fields.integer("tandem_first_block", ge=0, le=num_tokens // block_size) or 0
        num_blocks = num_tokens // block_size - first_block
        block_ids = reader.groups("remote_block_ids", shape.num_block_groups, num_blocks)
        return cls(
            engine_id=reader.word("remote_engine_id"),
            epoch=reader.u64("tandem_epoch"),
            fingerprint=reader.string("tandem_fingerprint", HEX),
            block_size=block_size,
            num_tokens=num_tokens,
            block_ids=block_ids,
            generations=reader.groups("tandem_generations", len(block_ids), num_blocks, u64=True),
            lease_seconds=reader.number("tandem_lease_seconds", le=MAX_LEASE_SECONDS),
            first_block=first_block,
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """One finished prompt that a peer may read until the lease ends.

    ``block_ids`` and ``generations`` have one tuple per block group, each with ``ceil(num_tokens / block_size)``
    entries; no group for a model without attention. ``slot_id`` 0: no state slot (dense models). ``output_row`` is
    the hidden vector after the final norm of the prompt's last token, raw little-endian bytes of
    ``output_row_dtype``. ``epoch`` and generations are u64. ``prompt_token_ids`` is empty where the reader knows the
    prompt already (the answer of a pull), and so are ``images``, the places of images in it. ``digests``: hex digests
    of the blocks' content, shaped as ``block_ids``, None for blocks without one; empty when the holder makes none.
    ``proof``: by which the holder knows its own promise again, hex; None where the reader has it from the holder
    itself.
    """

    engine_id: str
    request_id: str
    host: str
    port: int
    num_tokens: int
    block_size: int
    block_ids: Groups
    generations: Groups
    epoch: int
    fingerprint: str
    lease_id: str
    lease_seconds: float
    prefix_key: bytes
    prompt_token_ids: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    slot_id: int = 0
    slot_generation: int = 0
    output_row: bytes | None = None
    output_row_dtype: str | None = None
    prefill: PrefillReport | None = None
    digests: tuple[tuple[str | None, ...], ...] = ()
    slot_digest: str | None = None
    proof: str | None = None
    tp_size: int = 1

    def digest(self) -> str:
        """Hex digest (32 bytes) of the promise. Without its address (a proxy may know another one; whoever answers
        there has to know the proof) and the tokens, of which ``prefix_key`` is the digest. With the images: a key binds
        what an image shows and where it is, but not its rows and columns, which decide positions."""
        promise = dataclasses.replace(self, host="", port=0, prompt_token_ids=(), proof=None).to_params()
        return hashlib.blake2b(json.dumps(promise, sort_keys=True).encode(), digest_size=32).hexdigest()

    def to_params(self) -> dict[str, Any]:
        """The JSON object of the prefill answer and of the decode leg."""
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_block_ids": [list(group) for group in self.block_ids],
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_num_tokens": self.num_tokens,
            "tp_size": self.tp_size,
            "final": True,
            "tandem_block_size": self.block_size,
            "tandem_epoch": str(self.epoch),
            "tandem_fingerprint": self.fingerprint,
            "tandem_lease_id": self.lease_id,
            "tandem_lease_seconds": self.lease_seconds,
            "tandem_generations": _decimals(self.generations),
            "tandem_slot_id": self.slot_id,
            "tandem_slot_generation": str(self.slot_generation),
            "tandem_prefix_key": self.prefix_key.hex(),
        }
        if self.prompt_token_ids:
            params["prompt_token_ids"] = list(self.prompt_token_ids)
        if self.images:
            params["tandem_images"] = spans_to_json(self.images)
        if self.output_row is not None:
            params["tandem_output_row"] = base64.b64encode(self.output_row).decode("ascii")
            params["tandem_output_row_dtype"] = self.output_row_dtype
        if self.prefill is not None:
            params["tandem_prefill"] = self.prefill.to_params()
        if self.digests:
            params["tandem_digests"] = [list(group) for group in self.digests]
        if self.slot_digest is not None:
            params["tandem_slot_digest"] = self.slot_digest
        if self.proof is not None:
            params["tandem_proof"] = self.proof
        return params

    @classmethod
    def from_params(
        cls, params: Mapping[str, Any], shape: ManifestShape = ANY_SHAPE, *, is_carried: bool = True
    ) -> Manifest:
        """The checked manifest. ``is_carried``: it came through a proxy, in a decode leg, and must bring the prompt and
        its proof; the answer of a pull needs neither.

        Raises:
            InvalidRequestError: a key is missing, malformed, out of bounds, or contradicts another; ``param`` names it.
        """
        reader = ManifestReader(params)
        if params.get("final", True) is not True:
            invalid(PREFIX + "final", params.get("final"), "true")
        num_tokens = reader.integer("remote_num_tokens", ge=1, le=MAX_PROMPT_TOKENS)
        block_size = reader.integer("tandem_block_size", ge=1, le=MAX_BLOCK_SIZE)
        num_blocks = -(-num_tokens // block_size)
        token_ids = reader.token_ids(num_tokens, shape.vocab_size) if is_carried else ()
        block_ids = reader.groups("remote_block_ids", shape.num_block_groups, num_blocks)
        generations = reader.groups("tandem_generations", len(block_ids), num_blocks, u64=True)
        slot_id = reader.fields.integer("tandem_slot_id", ge=0, le=MAX_ID) or 0
        if shape.has_state is not None and shape.has_state != (slot_id > 0):
            wanted = "a slot id above 0: the model has states" if shape.has_state else "0: the model has no states"
            invalid(PREFIX + "tandem_slot_id", slot_id, wanted)
        row, row_dtype = reader.output_row()
        report = reader.fields.mapping("tandem_prefill")
        return cls(
            engine_id=reader.word("remote_engine_id"),
            request_id=reader.word("remote_request_id"),
            host=reader.string("remote_host", HOST),
            port=reader.integer("remote_port", ge=1, le=65_535),
            num_tokens=num_tokens,
            block_size=block_size,
            block_ids=block_ids,
            generations=generations,
            epoch=reader.u64("tandem_epoch"),
            fingerprint=reader.string("tandem_fingerprint", HEX),
            lease_id=reader.word("tandem_lease_id"),
            lease_seconds=reader.number("tandem_lease_seconds", le=MAX_LEASE_SECONDS),
            prefix_key=bytes.fromhex(reader.string("tandem_prefix_key", HEX)),
            prompt_token_ids=token_ids,
            images=read_spans(reader.fields, "tandem_images", num_tokens) if is_carried else (),
            slot_id=slot_id,
            slot_generation=reader.u64("tandem_slot_generation") if slot_id else 0,
            output_row=row,
            output_row_dtype=row_dtype,
            prefill=None if report is None else PrefillReport.from_params(report, num_tokens),
            digests=reader.digests("tandem_digests", block_ids),
            slot_digest=reader.fields.string("tandem_slot_digest", pattern=DIGEST),
            proof=reader.string("tandem_proof", DIGEST) if is_carried else None,
            tp_size=reader.fields.integer("tp_size", ge=1, le=1024) or 1,
        )


def _joined(earlier: Groups, later: Groups, first: int) -> Groups:
    return tuple(old[:first] + new for old, new in zip(earlier, later, strict=True))


def _decimals(groups: Groups) -> list[list[str]]:
    return [[str(value) for value in group] for group in groups]
