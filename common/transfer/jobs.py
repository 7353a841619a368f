"""What a pull shall do and how it ended: the plain data between a puller and those who use it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.transfer.reads import Read
from common.transfer.regions import Peer


class PullReason:
    """``PullOutcome.reason`` values besides those of ``TransferCode``. A fixed set: they are metric labels.

    ``DIGEST_MISMATCH`` is set by the node, which compares digests after an OK pull.
    """

    STALE_GENERATION = "stale_generation"
    STALE_EPOCH = "stale_epoch"
    WRONG_CONTENT = "wrong_content"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    PEER_LOST = "peer_lost"
    DIGEST_MISMATCH = "digest_mismatch"


class PullStatus(enum.Enum):
    OK = "ok"
    STALE = "stale"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ExpectedGeneration:
    """Entry ``unit`` of the peer's generations region ``region`` must still be (``value``, ``tag``) after the read, at
    each of its ranks that something was read from: the ranks of a node count alike.

    ``value``: the generation that the holder promised. ``tag``: the first 8 bytes, little-endian, of the prefix key of
    the content that should be there, computed by the reader from its own token ids: a manifest that names other
    content than it says is caught, whoever made the mistake.
    """

    region: str
    unit: int
    value: int
    tag: int


@dataclass(frozen=True, slots=True)
class PullJob:
    """What to read and what must hold afterwards.

    ``epoch`` is compared with entry 0 of each generations region that ``generations`` names. Data reads without any
    expected generation are refused: they could not be verified. ``deadline_s`` is absolute, on ``time.monotonic``.
    """

    pull_id: str
    peer: Peer
    reads: Sequence[Read]
    generations: Sequence[ExpectedGeneration]
    epoch: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """How a pull ended. ``num_bytes`` and ``num_descriptors`` count the data reads that were posted, not the
    generations; ``seconds`` from submit to this outcome.

    ``reason``: empty when OK, else a ``PullReason`` or ``TransferCode``. ``message`` says the same to people, with
    numbers.
    """

    pull_id: str
    status: PullStatus
    terminal: bool
    num_bytes: int
    num_descriptors: int
    seconds: float
    reason: str = ""
    message: str = ""


DoneCallback = Callable[[PullOutcome], None]
TerminalCallback = Callable[[str], None]
