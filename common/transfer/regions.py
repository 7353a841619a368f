"""Memory that can be read, as data: regions of numbered units, the peers that have them, and how a process announces
its own.

An announcement is JSON (never pickle) and believed only as far as it adds up: declared sizes are cross-checked against
byte counts before anything is used.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.errors import TransferError
from common.transfer.codes import TransferCode

METADATA_VERSION = 2
"""Version of the announcement; another one is refused. 2: generations are 16 bytes, with a content tag. ``layout`` came
later without another number: who does not know it has the fingerprint, which an undivided layout is part of."""


@dataclass(frozen=True, slots=True)
class Region:
    """A range of local memory: ``num_units`` units of ``unit_bytes`` bytes from ``address`` on, contiguous.

    ``device`` is ``cpu`` or a device string such as ``cuda:0``. The memory must stay mapped until the backend is
    closed; the registering process owns it, and ``owner`` (any object) is kept alive as long as the backend knows the
    region. ``null_unit``: unit 0 is the null entry and is refused as a destination. ``exported``: announced to peers;
    scratch memory is not.

    Raises:
        TransferError: ``region_mismatch`` when a number cannot be right (named in the message).
    """

    name: str
    address: int
    num_units: int
    unit_bytes: int
    device: str = "cpu"
    null_unit: bool = False
    exported: bool = True
    owner: object = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for label, value in (("address", self.address), ("num_units", self.num_units), ("unit_bytes", self.unit_bytes)):
            if value <= 0:
                raise TransferError(
                    f"region {self.name!r}: {label} must be positive, got {value}", code=TransferCode.REGION_MISMATCH
                )

    @property
    def num_bytes(self) -> int:
        return self.num_units * self.unit_bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer whose metadata was accepted by ``add_peer``.

    ``name`` is unique per process start of the peer: a restarted peer is another ``Peer`` with the same ``engine_id``
    and another ``epoch``. ``regions``: what it announced; the addresses are the peer's.
    """

    name: str
    engine_id: str
    epoch: int
    regions: Mapping[str, Region] = field(hash=False, compare=False)


class PoolLayout(Protocol):
    """How the units of this process's pools are laid out, and what it can read of pools that are laid out otherwise."""

    @property
    def document(self) -> Mapping[str, Any]:
        """JSON, for peers."""

    def check(self, document: Mapping[str, Any] | None) -> Mapping[str, int]:
        """Bytes per unit that a peer with this document has in each pool, by region; None: a peer that does not say.

        Raises:
            LayoutMismatchError: naming the field and both values.
        """


@dataclass(frozen=True, slots=True)
class PeerMetadata:
    """What one backend announces to others. JSON on the wire (never pickle); ``agent`` is the transport's own opaque
    blob.

    ``engine_id`` names the node, ``epoch`` its life (random, new with each start), ``fingerprint`` the model and the
    layout of its pools, ``layout`` the latter field by field (None: of a node that does not say): both are compared
    before anything else is used.
    """

    backend: str
    name: str
    engine_id: str
    epoch: int
    fingerprint: str
    agent: str
    regions: tuple[Region, ...]
    layout: Mapping[str, Any] | None = None

    def to_bytes(self) -> bytes:
        """UTF-8 JSON."""
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
        document = {
            "version": METADATA_VERSION,
            "backend": self.backend,
            "name": self.name,
            "engine_id": self.engine_id,
            "epoch": self.epoch,
            "fingerprint": self.fingerprint,
            "agent": self.agent,
            "regions": regions,
            **({} if self.layout is None else {"layout": self.layout}),
        }
        return json.dumps(document).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PeerMetadata:
        """Parse and check an announcement.

        Raises:
            TransferError: ``bad_metadata`` (not ours, another version, a field missing or of another type),
                ``region_mismatch`` (announced total bytes are not ``num_units * unit_bytes``, or a name twice).
        """
        try:
            document = json.loads(data)
        except ValueError as exc:
            raise TransferError(f"peer metadata is not JSON: {exc}", code=TransferCode.BAD_METADATA) from exc
        if not isinstance(document, dict):
            raise TransferError("peer metadata is not a JSON object", code=TransferCode.BAD_METADATA)
        version = _field(document, "version", int)
        if version != METADATA_VERSION:
            raise TransferError(
                f"peer metadata version {version}, this node speaks {METADATA_VERSION}", code=TransferCode.BAD_METADATA
            )
        regions = tuple(_region_from_json(entry) for entry in _field(document, "regions", list))
        names = [region.name for region in regions]
        if len(set(names)) != len(names):
            raise TransferError(f"peer announces a region twice: {names}", code=TransferCode.REGION_MISMATCH)
        return cls(
            backend=_field(document, "backend", str),
            name=_field(document, "name", str),
            engine_id=_field(document, "engine_id", str),
            epoch=_field(document, "epoch", int),
            fingerprint=_field(document, "fingerprint", str),
            agent=_field(document, "agent", str),
            regions=regions,
            layout=_field(document, "layout", dict) if "layout" in document else None,
        )

    def agent_blob(self) -> bytes:
        """``agent``, decoded from base64.

        Raises:
            TransferError: ``bad_metadata``.
        """
        try:
            return base64.b64decode(self.agent, validate=True)
        except binascii.Error as exc:
            raise TransferError(
                f"peer {self.engine_id}: agent metadata is not base64", code=TransferCode.BAD_METADATA
            ) from exc


def _field(document: Mapping[str, Any], name: str, kind: type) -> Any:
    value = document.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TransferError(
            f"peer metadata: {name} must be {kind.__name__}, got {type(value).__name__}",
            code=TransferCode.BAD_METADATA,
        )
    return value


def _region_from_json(entry: Any) -> Region:
    if not isinstance(entry, dict):
        raise TransferError("peer metadata: a region must be an object", code=TransferCode.BAD_METADATA)
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
