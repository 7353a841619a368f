"""Another project's proxy: the two legs of a handoff as plain HTTP, without anything of ours in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from common.wire.headers import TRACE_HEADER
from common.wire.routes import COMPLETIONS_ROUTE, LEASE_RELEASE_ROUTE, LEASE_RENEW_ROUTE

PREFILL_PARAMS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TIMEOUT_S = 120.0


def send_prefill_leg(url: str, body: Mapping[str, Any], route: str = COMPLETIONS_ROUTE) -> dict[str, Any]:
    """The whole answer of the prefill leg; the client's own fields stay in, however little they fit."""
    leg = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": dict(PREFILL_PARAMS)}
    response = httpx.post(url + route, json=leg, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return dict(response.json())


def prefill(url: str, body: Mapping[str, Any], route: str = COMPLETIONS_ROUTE) -> dict[str, Any]:
    """``kv_transfer_params`` of the prefill leg's answer."""
    return dict(send_prefill_leg(url, body, route)["kv_transfer_params"])


def decode(url: str, body: Mapping[str, Any], params: object, route: str = COMPLETIONS_ROUTE) -> httpx.Response:
    """The decode leg: the client's body with what the prefill leg answered."""
    leg = {**body, "kv_transfer_params": params}
    return httpx.post(url + route, json=leg, headers={TRACE_HEADER: "1"}, timeout=TIMEOUT_S)


def rendezvous(url: str, name: str) -> dict[str, Any]:
    """``kv_transfer_params`` of a decode leg that follows the leg called ``name`` of the prefill node at ``url``."""
    port = int(url.rpartition(":")[2])
    leg = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "127.0.0.1", "remote_port": port}
    return {**leg, "tandem_rendezvous": name}


def release(url: str, params: Mapping[str, Any]) -> None:
    """Ends the lease early, as a decode node does after its read."""
    response = httpx.post(url + LEASE_RELEASE_ROUTE, json={"lease_ids": [params["tandem_lease_id"]]})
    assert response.status_code == 200, response.text


def renew(url: str, params: Mapping[str, Any]) -> bool:
    """Whether the lease is still there; then it lasts for a full period from now."""
    response = httpx.post(url + LEASE_RENEW_ROUTE, json={"lease_ids": [params["tandem_lease_id"]]})
    assert response.status_code == 200, response.text
    return not response.json()["unknown"]
