"""Memory that can be read, as data: regions of numbered units, and the peers that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.errors import TransferError
from common.transfer.codes import TransferCode


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
class PeerRank:
    """One rank of a peer: ``name`` of its transport's agent, and the regions that it announced; the addresses are its
    own."""

    name: str
    regions: Mapping[str, Region]


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer whose metadata was accepted by ``add_peer``: a node, of one rank or several.

    ``name`` is that of rank 0's agent, unique per process start of the peer: a restarted peer is another ``Peer`` with
    the same ``engine_id`` and another ``epoch``. ``ranks``: in order; the one rank of a node that is not divided.
    """

    name: str
    engine_id: str
    epoch: int
    ranks: tuple[PeerRank, ...] = field(hash=False, compare=False)


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

    def num_ranks(self, document: Mapping[str, Any] | None) -> int:
        """How many ranks a peer with this document has to announce.

        Raises:
            LayoutMismatchError: as ``check``.
        """
