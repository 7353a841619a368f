"""Hostile and broken input on the internal routes and in handoffs: refused with a reason, nothing leaked or crashed.

What is still well formed after the damage may be served; then the answer is the right one, because nothing of a
manifest is believed before its holder and the holder's memory confirmed it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support import foreign
from tests.support.client import BUSY_STATES, completion_body
from tests.support.hangup import wait_until
from tests.support.models import checkpoint
from tests.support.mutate import JUNK, mutated
from tests.support.reference import Reference, random_tokens
from tests.support.service import Node, Service

pytestmark = pytest.mark.full  # each kind of damage as in test_api_handoff.py

ROUTE = "/v1/completions"
PROMPT = random_tokens(70, seed=230)
NUM_TOKENS = 2
KEY = "k" * 32
ROUTES = ("pull", "leases/renew", "leases/release", "info", "transfer", "cache/check", "liveness")
LOST_PREFIX = ("transfer_failed", "peer_restarted", "peer_unreachable")
REFUSED = frozenset({400, 401, 404, 405, 409, 413, 415, 422, 429})
SCALES = (
    pytest.param(0.06, id="60 inputs"),
    pytest.param(5.0, id="5000 inputs"),
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Nodes with a cluster key, small bodies and short leases; the decode node never computes a lost prompt itself."""
    key_file = tmp_path_factory.mktemp("key") / "cluster"
    key_file.write_text(KEY)
    common = (*NODE_FLAGS, "--cluster-key-file", str(key_file), "--max-body-bytes", "200000")
    flags = (*common, "--kv-lease-seconds", "2", "--kv-transfer-timeout-seconds", "2")
    with Service(
        checkpoint(FAMILY),
        prefill_flags=flags,
        # Without a cache of its own it reads what each manifest names.
        decode_flags=(*flags, "--kv-load-failure-policy", "fail", "--no-enable-prefix-caching"),
        proxy_flags=("--cluster-key-file", str(key_file)),
    ) as running:
        yield running


class Fuzzer:
    """Sends inputs and keeps account of what came back."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self.outcomes: Counter[str] = Counter()

    def send(self, url: str, content: bytes | Any, *, key: str = KEY, method: str = "POST") -> httpx.Response:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"X-Tandem-Cluster-Key": key, "Content-Type": "application/json"}
        response = self._client.request(method, url, content=body, headers=headers, timeout=30)
        self.outcomes[str(response.status_code)] += 1
        return response

    def refused(self, response: httpx.Response, what: Any) -> None:
        assert response.status_code in REFUSED, (response.status_code, response.text[:500], str(what)[:1000])
        error = response.json()["error"]
        assert error["message"], what
        assert error["code"], what


def is_settled(node: Node) -> bool:
    headers = {"X-Tandem-Cluster-Key": KEY}
    state = httpx.get(node.url + "/internal/v1/cache/check", headers=headers, timeout=30).raise_for_status().json()
    assert state["ok"], state
    busy = sum(state[pool][kind] for pool in ("blocks", "slots") for kind in BUSY_STATES)
    return not (busy or state["leases"] or state["sequences"])


def check_refused_or_right(fuzzer: Fuzzer, response: httpx.Response, expected: list[int], what: Any) -> None:
    if response.status_code == 200:
        assert response.json()["choices"][0]["token_ids"] == expected, str(what)[:2000]
    elif response.status_code == 502:
        assert response.json()["error"]["code"] in ("transfer_failed", "peer_restarted", "peer_unreachable"), (
            response.text
        )
    else:
        fuzzer.refused(response, what)


@pytest.mark.parametrize("scale", SCALES)
def test_internal_routes_and_manifests_when_input_is_damaged_then_it_is_refused_and_nothing_leaks(
    fuzzed: Service, reference: Reference, scale: float
) -> None:
    prefill, decode = fuzzed.prefill[0], fuzzed.decode[0]
    draw = random.Random(40 + int(scale))
    expected = reference.greedy(PROMPT, NUM_TOKENS).token_ids
    body = completion_body(PROMPT, NUM_TOKENS)
    with httpx.Client() as client:
        fuzzer = Fuzzer(client)
        good = client.post(
            prefill.url + ROUTE,
            json={**body, "max_tokens": 1, "kv_transfer_params": dict(foreign.PREFILL_PARAMS)},
            timeout=30,
        ).json()["kv_transfer_params"]
        for _ in range(int(500 * scale)):  # the decode leg: manifests
            params = mutated(good, draw)
            response = fuzzer.send(decode.url + ROUTE, {**body, "kv_transfer_params": params})
            check_refused_or_right(fuzzer, response, expected, params)
        pulls: tuple[dict[str, Any], ...] = (
            {"id": "a" * 32, "after": 0, "wait_seconds": 0.01},
            {
                "id": "b" * 32,
                "prompt_token_ids": PROMPT,
                "cache_salt": None,
                "fingerprint": good["tandem_fingerprint"],
                "prefix_key": good["tandem_prefix_key"],
                "have": 10_000,
            },
        )
        for _ in range(int(300 * scale)):  # the pull route
            pull = mutated(draw.choice(pulls), draw)
            if isinstance(pull, dict) and isinstance(pull.get("wait_seconds"), int | float):
                pull["wait_seconds"] = min(pull["wait_seconds"], 0.01)
            response = fuzzer.send(draw.choice((prefill, decode)).url + "/internal/v1/pull", pull)
            if response.status_code != 200:
                fuzzer.refused(response, pull)
        for _ in range(int(100 * scale)):  # leases: damaged, unknown and replayed
            action = draw.choice(("renew", "release"))
            leases = mutated({"lease_ids": [good["tandem_lease_id"], "nobody"]}, draw)
            response = fuzzer.send(f"{prefill.url}/internal/v1/leases/{action}", leases)
            if response.status_code != 200:
                fuzzer.refused(response, leases)
        for _ in range(int(100 * scale)):  # not even JSON, or no key, or the wrong one
            route = draw.choice(
                ("pull", "leases/renew", "leases/release", "info", "transfer", "cache/check", "liveness")
            )
            url = f"{draw.choice((prefill, decode)).url}/internal/v1/{route}"
            if draw.random() < 0.5:
                key = draw.choice(("", "K" * 32, KEY[:-1], KEY + "k"))
                response = fuzzer.send(url, {"lease_ids": []}, key=key, method=draw.choice(("GET", "POST")))
                assert response.status_code == 401, (route, key, response.status_code)
            elif route in ("pull", "leases/renew", "leases/release"):
                junk: Any = draw.choice((draw.randbytes(40), b"[" * 5000, b'{"lease_ids": [1', b"", draw.choice(JUNK)))
                fuzzer.refused(fuzzer.send(url, junk), junk)
        for node in (prefill, decode):
            too_large = fuzzer.send(node.url + "/internal/v1/leases/renew", {"lease_ids": ["x" * 250_000]})
            assert too_large.status_code == 413, too_large.text
        print(dict(fuzzer.outcomes))
        assert sum(fuzzer.outcomes.values()) >= 950 * scale
        assert fuzzer.outcomes["400"] > 400 * scale, fuzzer.outcomes
    for node in (prefill, decode):
        assert node.process.popen.poll() is None, node.process.tail()
        assert "Traceback" not in node.process.log.read_text(errors="replace"), node.process.tail()
        wait_until(lambda node=node: is_settled(node), f"the {node.role} node to give everything back")  # type: ignore[misc]
