"""Leases that a request's proxy answers for."""

from __future__ import annotations

from typing import Any

from proxy.legs.leases import LeaseGuard


def test_leases_when_a_decode_node_had_them_then_no_leg_of_theirs_is_waited_for() -> None:
    guard, node = LeaseGuard(), object()
    held: Any = node
    guard.hold(held, "read")
    guard.hand_over()
    assert guard.take() == {}
    guard.hold(held, "on its way")
    guard.take_back()
    assert guard.take() == {(node, True): ["on its way"], (node, False): ["read"]}
    assert guard.take() == {}
