"""Why a transfer failed, in one word."""

from __future__ import annotations


class TransferCode:
    """``TransferError.code`` values raised in this package; also the ``reason`` of a failed pull. A fixed set: they are
    metric labels."""

    BAD_METADATA = "bad_metadata"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    LAYOUT_MISMATCH = "layout_mismatch"
    REGION_MISMATCH = "region_mismatch"
    UNKNOWN_REGION = "unknown_region"
    UNIT_OUT_OF_RANGE = "unit_out_of_range"
    UNKNOWN_PEER = "unknown_peer"
    PEER_DISCONNECTED = "peer_disconnected"
    REGISTRATION_FAILED = "registration_failed"
    BACKEND_UNAVAILABLE = "backend_unavailable"
    TRANSFER_FAILED = "transfer_failed"
    HANDLE_ACTIVE = "handle_active"
    AGENT_ALIVE = "agent_alive"
    AGENT_RECREATED = "agent_recreated"
    UNVERIFIED_PULL = "unverified_pull"
    CLOSED = "closed"
