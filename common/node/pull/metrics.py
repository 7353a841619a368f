"""How a pull that ended is counted, and under which label one that failed."""

from __future__ import annotations

from common.errors import PrefillLegAbortedError, PrefillLegFailedError
from common.metrics.metrics import Metrics
from common.node.pull.prefix_reader import FinishedPull
from common.transfer.codes import TransferCode
from common.transfer.jobs import PullReason

UNPROVEN_CODE = "unproven_manifest"
"""Code of a manifest that its holder does not know."""
_FAILURES = {
    PullReason.STALE_GENERATION: "stale",
    PullReason.STALE_EPOCH: "stale",
    PullReason.WRONG_CONTENT: "wrong_content",
    PullReason.DEADLINE: "timed_out",
    PullReason.PEER_LOST: "peer_lost",
    PullReason.DIGEST_MISMATCH: "digest_mismatch",
    TransferCode.FINGERPRINT_MISMATCH: "mismatch",
    TransferCode.LAYOUT_MISMATCH: "layout_mismatch",
    TransferCode.REGION_MISMATCH: "mismatch",
    PrefillLegFailedError.code: "leg_failed",
    PrefillLegAbortedError.code: "leg_failed",
    "unknown_pull": "unknown_pull",
    UNPROVEN_CODE: "unproven",
}


def failure_label(reason: str) -> str:
    """The label of ``transfer_failures_total`` for a pull's reason; a small fixed set."""
    return _FAILURES.get(reason, "failed")


def record_pull(metrics: Metrics, result: FinishedPull, slot_bytes: int) -> None:
    """Counts one pull that ended. A cancelled one is no failure, and one without a descriptor moved nothing."""
    if not result.ok:
        if result.reason != PullReason.CANCELLED:
            metrics.transfer_failed(failure_label(result.reason))
        return
    if not result.num_descriptors:
        return
    # What lies between a state's tensors is not read from a peer of other ranks.
    state_bytes = min(result.num_bytes, result.num_states * slot_bytes)
    metrics.transfer_finished(
        seconds=result.seconds,
        num_descriptors=result.num_descriptors,
        kv_bytes=result.num_bytes - state_bytes,
        state_bytes=state_bytes,
    )
    metrics.inc("transfer_early_parts_total", result.num_early_parts)
