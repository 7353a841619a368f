"""How a node announces its memory to its peers.

An announcement is JSON (never pickle) and believed only as far as it adds up: declared sizes are cross-checked against
byte counts before anything is used.

A node of several ranks has one announcement: each rank makes its own, rank 0 joins them (``join_ranks``). Ranks number
their units alike and share the node's epoch; agents, addresses and generation tables are each rank's.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from common.errors import TransferError
from common.transfer.codes import TransferCode
from common.transfer.regions import Peer, PeerRank, Region

METADATA_VERSION = 2
"""Version of a node's announcement that is not divided; who does not know a version refuses it. 2: generations are 16
bytes, with a content tag. ``layout`` came later without another number: who does not know it has the fingerprint, which
an undivided layout is part of."""
RANKS_VERSION = 3
"""Version of the announcement of several ranks, which who reads only undivided nodes must refuse: a list of ranks in
place of one rank's fields, all else as in 2."""


@dataclass(frozen=True, slots=True)
class RankMetadata:
    """What one rank announces. ``name``: of the transport's agent; ``agent``: the transport's own opaque blob."""

    name: str
    agent: str
    regions: tuple[Region, ...]

    def to_json(self) -> dict[str, Any]:
        regions = [
            {
                "name": region.name,
                "address": region.address,
                "num_units": region.num_units,
                "unit_bytes": region.unit_bytes,
                "num_bytes": region.num_bytes,
                "device": region.device,
            }
            for region in self.regions
        ]
        return {"name": self.name, "agent": self.agent, "regions": regions}

    @classmethod
    def from_json(cls, entry: Any) -> RankMetadata:
        """Raises TransferError as ``PeerMetadata.from_bytes``."""
        regions = tuple(_region_from_json(each) for each in _field(entry, "regions", list))
        names = [region.name for region in regions]
        if len(set(names)) != len(names):
            raise TransferError(f"peer announces a region twice: {names}", code=TransferCode.REGION_MISMATCH)
        return cls(_field(entry, "name", str), _field(entry, "agent", str), regions)

    def agent_blob(self) -> bytes:
        """``agent``, decoded from base64.

        Raises:
            TransferError: ``bad_metadata``.
        """
        try:
            return base64.b64decode(self.agent, validate=True)
        except binascii.Error as exc:
            raise TransferError(
                f"peer {self.name}: agent metadata is not base64", code=TransferCode.BAD_METADATA
            ) from exc


@dataclass(frozen=True, slots=True)
class PeerMetadata:
    """What a node announces to others. JSON on the wire (never pickle).

    ``engine_id`` names the node, ``epoch`` its life (random, new with each start), ``fingerprint`` the model and the
    layout of its pools, ``layout`` the latter field by field (None: of a node that does not say): both are compared
    before anything else is used. ``ranks``: at least one, in order.
    """

    backend: str
    engine_id: str
    epoch: int
    fingerprint: str
    ranks: tuple[RankMetadata, ...]
    layout: Mapping[str, Any] | None = None

    def to_bytes(self) -> bytes:
        """UTF-8 JSON."""
        ranks = [rank.to_json() for rank in self.ranks]
        document = {
            "version": METADATA_VERSION if len(ranks) == 1 else RANKS_VERSION,
            "backend": self.backend,
            "engine_id": self.engine_id,
            "epoch": self.epoch,
            "fingerprint": self.fingerprint,
            **(ranks[0] if len(ranks) == 1 else {"ranks": ranks}),
            **({} if self.layout is None else {"layout": self.layout}),
        }
        return json.dumps(document).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PeerMetadata:
        """Parse and check an announcement.

        Raises:
            TransferError: ``bad_metadata`` (not ours, another version, a field missing or of another type, no rank or
                the same agent as two of them), ``region_mismatch`` (announced total bytes are not ``num_units *
                unit_bytes``, or a name twice).
        """
        try:
            document = json.loads(data)
        except ValueError as exc:
            raise TransferError(f"peer metadata is not JSON: {exc}", code=TransferCode.BAD_METADATA) from exc
        version = _field(document, "version", int)
        if version not in (METADATA_VERSION, RANKS_VERSION):
            raise _bad(f"version {version}, this node speaks {METADATA_VERSION} and {RANKS_VERSION}")
        entries = [document] if version == METADATA_VERSION else _field(document, "ranks", list)
        ranks = tuple(RankMetadata.from_json(entry) for entry in entries)
        names = [rank.name for rank in ranks]
        if not names or len(set(names)) != len(names):
            raise _bad(f"the agents of its ranks are {names}: at least one, and no two alike")
        return cls(
            backend=_field(document, "backend", str),
            engine_id=_field(document, "engine_id", str),
            epoch=_field(document, "epoch", int),
            fingerprint=_field(document, "fingerprint", str),
            ranks=ranks,
            layout=_field(document, "layout", dict) if "layout" in document else None,
        )

    def peer(self) -> Peer:
        ranks = tuple(
            PeerRank(rank.name, MappingProxyType({region.name: region for region in rank.regions}))
            for rank in self.ranks
        )
        return Peer(ranks[0].name, self.engine_id, self.epoch, ranks)


def join_ranks(announcements: Sequence[bytes]) -> bytes:
    """A node's announcement, of those of its ranks in order.

    Raises:
        TransferError: ``bad_metadata``: they are not of one life of one node (the field and both values are in the
            message), or as ``PeerMetadata.from_bytes``.
    """
    nodes = [PeerMetadata.from_bytes(each) for each in announcements]
    first = nodes[0]
    for rank, node in enumerate(nodes):
        for name in ("backend", "engine_id", "epoch", "fingerprint", "layout"):
            own, other = getattr(first, name), getattr(node, name)
            if own != other:
                raise _bad(f"{name} of rank {rank} is {other!r}, of rank 0 {own!r}")
    joined = replace(first, ranks=tuple(rank for node in nodes for rank in node.ranks)).to_bytes()
    PeerMetadata.from_bytes(joined)  # which says whether an agent is there twice
    return joined


def _bad(why: str) -> TransferError:
    return TransferError(f"peer metadata: {why}", code=TransferCode.BAD_METADATA)


def _field(document: Any, name: str, kind: type) -> Any:
    if not isinstance(document, dict):
        raise _bad(f"where {name} should be is no object")
    value = document.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _bad(f"{name} must be {kind.__name__}, got {type(value).__name__}")
    return value


def _region_from_json(entry: Any) -> Region:
    region = Region(
        name=_field(entry, "name", str),
        address=_field(entry, "address", int),
        num_units=_field(entry, "num_units", int),
        unit_bytes=_field(entry, "unit_bytes", int),
        device=_field(entry, "device", str),
    )
    num_bytes = _field(entry, "num_bytes", int)
    if num_bytes != region.num_bytes:
        raise TransferError(
            f"peer region {region.name!r}: announced {num_bytes} bytes, but {region.num_units} units of "
            f"{region.unit_bytes} bytes are {region.num_bytes}",
            code=TransferCode.REGION_MISMATCH,
        )
    return region
