"""The alerts on provoked faults: each fires in a real Prometheus, what its runbook entry says to look at shows the
fault, and after what it says to do the alert is gone.

Windows and waits of the rules are shortened, expressions are as shipped.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from common.wire.headers import DEADLINE_HEADER
from tests.e2e.conftest import FAMILY, NODE_FLAGS, TIGHT_FLAGS
from tests.support import foreign
from tests.support.client import completion_body, metric
from tests.support.faulty_node import mark
from tests.support.hangup import stopped, wait_until
from tests.support.models import checkpoint
from tests.support.reference import random_tokens
from tests.support.service import ROOT, Node, Process, Service, free_port

pytestmark = pytest.mark.full

RULES = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
SHORTER = {"[5m]": "[8s]", "[10m]": "[16s]", "[1h]": "[16s]", "[6h]": "[90s]"}
FIRES_WITHIN_S = 90.0
QUIET_S = 20.0
"""Longer than the shortened windows of the rules."""

# Leases last long enough to hold all slots at once, also on a busy machine.
SLOW = ("--max-num-batched-tokens", "8", "--kv-cache-memory", "2MiB", "--kv-lease-seconds", "6")
RACE = ("--dtype", "float32", "--max-model-len", "320", "--max-num-seqs", "4", "--state-memory-share", "0.5")
LEASE_S = 0.05
VALUES = (
    "up",
    "role:tandem_build_info:count",
    "role:tandem_requests_queued:avg",
    "instance:tandem_leased:ratio",
    "instance:tandem_kv_blocks:occupied_ratio",
    "instance:tandem_state_slots:occupied_ratio",
    'instance:tandem_prefix_cache_hit:ratio_rate5m{group="joint"}',
    'avg_over_time(instance:tandem_prefix_cache_hit:ratio_rate5m{group="joint"}[90s])',
    "decode:tandem_request_itl:within_100ms_ratio_rate5m",
    "decode:tandem_request_itl:within_100ms_ratio_rate1h",
)


class Drill:
    """A service that is watched by Prometheus."""

    def __init__(self, service: Service, prometheus: str) -> None:
        self.service, self.prometheus = service, prometheus
        self.stop = threading.Event()
        self.turn = 0

    def firing(self) -> set[str]:
        alerts = httpx.get(self.prometheus + "/api/v1/alerts", timeout=30).json()["data"]["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def expect(self, *names: str) -> None:
        seen: set[str] = set()

        def all_seen() -> bool:
            seen.update(self.firing())
            return set(names) <= seen

        start_s = time.monotonic()
        try:
            wait_until(all_seen, f"{names} to fire", FIRES_WITHIN_S)
        finally:
            missing = sorted(set(names) - seen)
            if missing:
                print("did not fire:", missing, "; values:", self.values())
        print(f"{', '.join(names)}: fired after {time.monotonic() - start_s:.0f} s; all that fire: {sorted(seen)}")

    def values(self) -> dict[str, Any]:
        """What the rules are made of, for a drill that did not work."""
        found = {}
        for expression in VALUES:
            answer = httpx.get(self.prometheus + "/api/v1/query", params={"query": expression}, timeout=30).json()
            found[expression] = [(each["metric"], each["value"][1]) for each in answer["data"]["result"]]
        return found

    def expect_gone(self, *names: str) -> None:
        wait_until(lambda: not set(names) & self.firing(), f"{names} to be gone", FIRES_WITHIN_S)
        print(f"{', '.join(names)}: gone")

    @contextlib.contextmanager
    def load(self, num: int, ask: Callable[[int], object]) -> Iterator[None]:
        """``num`` clients that ask again and again; what goes wrong is the drill."""
        stop = threading.Event()

        def client(index: int) -> None:
            while not stop.is_set():
                self.turn += 1
                with contextlib.suppress(httpx.HTTPError):
                    ask(self.turn * 100 + index)
                stop.wait(0.02)

        threads = [threading.Thread(target=client, args=(index,), daemon=True) for index in range(num)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)

    def complete(self, num_prompt: int, num_tokens: int, seed: int) -> httpx.Response:
        body: dict[str, Any] = {"prompt": random_tokens(num_prompt, seed=seed), "max_tokens": num_tokens}
        body |= {"ignore_eos": True, "stream": True}
        return httpx.post(self.service.url + "/v1/completions", json=body, timeout=60)

    def do_wrong(self, seed: int) -> None:
        """What is a client's own fault, by turns: too long a prompt, none, a deadline that passes, leaving."""
        url, fault = self.service.url + "/v1/completions", seed % 4
        body: dict[str, Any] = {"prompt": random_tokens(40, seed=seed), "max_tokens": 250, "ignore_eos": True}
        if fault == 0:
            httpx.post(url, json=body | {"max_tokens": 10**6}, timeout=60)
        elif fault == 1:
            httpx.post(url, json={"prompt": ""}, timeout=60)
        elif fault == 2:
            httpx.post(url, json=body, headers={DEADLINE_HEADER: "100"}, timeout=60)
        else:
            with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as answer:
                next(answer.iter_bytes())

    def fail(self, seed: int) -> httpx.Response:
        """A stream in the middle of which the engine fails."""
        return self.complete_marked(seed, mark("decode", "sampling", 45))

    def dawdle(self, seed: int) -> httpx.Response:
        """A stream that makes steps of its decode node long."""
        return self.complete_marked(seed, mark("decode", "slow"))

    def complete_marked(self, seed: int, salt: str) -> httpx.Response:
        body = completion_body(random_tokens(40, seed=seed), 20, stream=True, cache_salt=salt)
        return httpx.post(self.service.url + "/v1/completions", json=body, timeout=60)

    def by_a_slow_proxy(self, seed: int) -> httpx.Response:
        """Both legs by a proxy that dawdles between them for longer than a lease lasts."""
        body = completion_body(random_tokens(60 + seed % 100, seed=seed), 4)
        params = foreign.prefill(self.service.prefill[0].url, body)
        time.sleep(2 * LEASE_S)
        answer = foreign.decode(self.service.decode[0].url, body, params)
        assert answer.status_code == 200, answer.text
        return answer

    def inject(self, **fault: object) -> None:
        url = self.service.decode[0].url + "/internal/v1/test/transfer-fault"
        httpx.post(url, json=fault, timeout=10).raise_for_status()

    def orphan(self, seed: int) -> httpx.Response:
        """A prefill leg whose second leg never comes, as of a proxy that dropped it."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        body = {"prompt": random_tokens(20, seed=seed), "max_tokens": 1, "kv_transfer_params": params}
        return httpx.post(self.service.prefill[0].url + "/v1/completions", json=body, timeout=60)


@contextlib.contextmanager
def watched(service: Service, folder: Path) -> Iterator[Drill]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian package prometheus)")
    for path in RULES:
        text = path.read_text()
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        (folder / path.name).write_text(re.sub(r"for: \w+", "for: 1s", text))
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / path.name) for path in RULES],
        "scrape_configs": [
            {
                "job_name": "tandem",
                "static_configs": [{"targets": [node.url.removeprefix("http://") for node in service.nodes]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    argv = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    process = Process([*argv, f"--web.listen-address=127.0.0.1:{port}"], folder / "prometheus.log")
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_ready(url), "prometheus to be ready")
        drill = Drill(service, url)
        num_nodes = len(list(service.nodes))
        # What a node was like before a fault is part of some rules.
        wait_until(
            lambda: [each[1] for each in drill.values()["up"]] == ["1"] * num_nodes, "prometheus to have read all"
        )
        yield drill
    finally:
        process.stop()


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    """Little memory, a slow prefill node and two decode nodes."""
    flags = {
        "prefill_flags": (*TIGHT_FLAGS, *SLOW),
        "decode_flags": (*TIGHT_FLAGS, "--max-num-batched-tokens", "64", "--kv-cache-memory", "1400KiB"),
    }
    with (
        Service(checkpoint(FAMILY), num_decode=2, **flags) as service,
        watched(service, tmp_path_factory.mktemp("drill")) as each,
    ):
        yield each


@pytest.fixture(scope="module")
def transfer_drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    """A prefill node whose memory is used again at once, and a decode node of whose memory one prompt is a small part:
    what a single read holds in quarantine is not worth a new agent there."""
    flags = {
        "prefill_flags": (*RACE, "--kv-cache-memory", "400KiB", "--kv-lease-seconds", str(LEASE_S)),
        "decode_flags": (*RACE, "--kv-cache-memory", "64MiB", "--kv-transfer-timeout-seconds", "3"),
    }
    with (
        Service(checkpoint(FAMILY), **flags) as service,
        watched(service, tmp_path_factory.mktemp("transfers")) as each,
    ):
        yield each


@pytest.fixture(scope="module")
def fault_drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    """Nodes in which marked requests fail or are slow, and a proxy that goes on sending them there."""
    flags = {"prefill_flags": NODE_FLAGS, "decode_flags": NODE_FLAGS, "proxy_flags": ("--breaker-failures", "1000")}
    with (
        Service(checkpoint(FAMILY), is_faulty=True, **flags) as service,
        watched(service, tmp_path_factory.mktemp("faults")) as each,
    ):
        yield each


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/-/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def status_of(drill: Drill) -> dict[str, Any]:
    return dict(httpx.get(drill.service.url + "/status.json", timeout=30).json())


def test_overload_of_prefill_nodes_when_prompts_are_long_and_new(drill: Drill) -> None:
    """TandemHitRateCollapse, TandemTtftBudgetBurn, TandemRolesOutOfBalance."""
    [prefill] = drill.service.prefill
    with drill.load(1, lambda seed: drill.complete(200 + seed % 16, 2, seed=77)):
        time.sleep(20)
    hits = metric(prefill, "prefix_cache_hit_tokens_total", group="joint")
    assert hits > 0
    with drill.load(24, lambda seed: drill.complete(1500, 2, seed=seed)):
        names = ("TandemHitRateCollapse", "TandemTtftBudgetBurn", "TandemRolesOutOfBalance")
        drill.expect(*names)
        # Look: the queue is at the prefill node; its blocks are held; found tokens do not grow.
        assert metric(prefill, "requests_waiting") > 4
        print("preemptions", metric(prefill, "preemptions_total"), prefill.check_cache()["blocks"])
        print("hit tokens before and now", hits, metric(prefill, "prefix_cache_hit_tokens_total", group="joint"))
        slow = [each for each in status_of(drill)["requests"] if (each["ttft_seconds"] or 0) > 1]
        assert slow
        print("a slow one on the status page:", slow[0]["ttft_seconds"], slow[0]["seconds"])
    drill.expect_gone("TandemTtftBudgetBurn", "TandemRolesOutOfBalance")


def test_prompts_that_nobody_fetches(drill: Drill) -> None:
    """TandemLeasesExpire, TandemNoStateSlots: their slots are leased until the leases run out."""
    [prefill] = drill.service.prefill
    with drill.load(12, drill.orphan):
        drill.expect("TandemLeasesExpire", "TandemNoStateSlots")
        check = prefill.check_cache()
        print("cache/check:", check)
        assert check["ok"]
        assert metric(prefill, "leases", state="active") > 0
    drill.expect_gone("TandemLeasesExpire", "TandemNoStateSlots")


def test_prefill_node_that_stands_still(drill: Drill) -> None:
    """TandemTransfersFail, TandemNodeDown: pulls from a frozen holder are given up."""
    [prefill] = drill.service.prefill
    end_s = time.monotonic() + FIRES_WITHIN_S
    with drill.load(6, lambda seed: drill.complete(300, 2, seed=seed)):
        while "TandemTransfersFail" not in drill.firing():
            assert time.monotonic() < end_s
            os.kill(prefill.process.pid, signal.SIGSTOP)
            time.sleep(3.0)
            os.kill(prefill.process.pid, signal.SIGCONT)
            time.sleep(1.5)
        reasons = status_of(drill)["nodes"][1]["figures"]["transfer_failures_total"]
        print("transfer failures by reason", reasons)
        assert reasons
    drill.expect_gone("TandemTransfersFail")


def test_decode_nodes_that_die(drill: Drill) -> None:
    """TandemNodeDown, TandemNodesGone and, half an hour later, TandemNodeDoesNotStart with one of two, TandemErrorRate
    with both; gone when they are back."""
    first, second = drill.service.decode
    with drill.load(2, lambda seed: drill.complete(40, 4, seed=seed)):
        first.process.kill()
        drill.expect("TandemNodeDown", "TandemNodesGone", "TandemNodeDoesNotStart")
        down = [node for node in status_of(drill)["nodes"] if node["state"] == "suspect"]
        assert [node["url"] for node in down] == [first.url]
        print("the status page says:", down[0]["reason"])
        second.process.kill()
        drill.expect("TandemErrorRate")
        answer = drill.complete(40, 4, seed=1)
        print("clients get", answer.status_code, answer.json()["error"]["code"])
        assert answer.status_code == 503
        for node in (first, second):
            drill.service.start_again(node)
        drill.expect_gone("TandemNodeDown", "TandemNodesGone", "TandemNodeDoesNotStart", "TandemErrorRate")


def test_proxy_that_stands_still(drill: Drill) -> None:
    """TandemProxyDown: Prometheus gets nothing from it, and so nothing of what clients see."""
    with stopped(drill.service.proxy):
        drill.expect("TandemProxyDown")
        with pytest.raises(httpx.TimeoutException):  # look: it lives, and does not answer
            httpx.get(drill.service.url + "/health", timeout=2)
    drill.expect_gone("TandemProxyDown")


def test_memory_that_is_held_by_long_answers(drill: Drill) -> None:
    """TandemKvBlocksHigh, TandemKvBlocksFull."""
    with drill.load(16, lambda seed: drill.complete(300, 1000, seed=seed)):
        drill.expect("TandemKvBlocksHigh", "TandemKvBlocksFull")
        # Look: by whom they are held, and what it costs.
        for node in drill.service.decode:
            print("blocks", node.check_cache()["blocks"], "preemptions", metric(node, "preemptions_total"))
        assert sum(metric(node, "requests_waiting") for node in drill.service.decode) > 0
    drill.expect_gone("TandemKvBlocksHigh", "TandemKvBlocksFull")


def test_reads_that_come_when_their_lease_is_over(transfer_drill: Drill) -> None:
    """TandemLateReads: leases that are too short, and pauses; every answer is right all the same."""
    drill = transfer_drill
    [prefill], [decode] = drill.service.prefill, drill.service.decode
    drill.inject(kind="delay", seconds=0.3, count=100_000, on="data")
    with drill.load(8, drill.by_a_slow_proxy):
        drill.expect("TandemLateReads")
        # Look: the leases ran out at the holder.
        expired = metric(prefill, "leases_expired_total")
        print("leases expired", expired, "late reads", metric(decode, "late_reads_rejected_total"))
        assert expired > 0
    # Do: find the pause.
    drill.inject(kind="clear")
    drill.expect_gone("TandemLateReads")
    assert prefill.check_cache()["ok"]
    assert decode.check_cache()["ok"]


def quarantined(node: Node) -> float:
    return metric(node, "kv_blocks", state="quarantined")


def test_read_that_does_not_end(transfer_drill: Drill) -> None:
    """TandemQuarantineStays: gone when the other side goes on, and by itself with a new transfer agent."""
    drill = transfer_drill
    [decode] = drill.service.decode
    for is_ended in (True, False):
        recreated = metric(decode, "agent_recreations_total")
        drill.inject(kind="hang", count=1, on="data")
        assert drill.complete(150, 4, seed=4242 + is_ended).status_code == 200
        drill.expect("TandemQuarantineStays")
        # Look: so many blocks, and what the node's log says.
        blocks = decode.check_cache()["blocks"]
        print("cache/check:", blocks, "; log:", decode.process.tail(600))
        if is_ended:
            drill.inject(kind="clear")
            drill.expect_gone("TandemQuarantineStays")
            assert metric(decode, "agent_recreations_total") == recreated
        else:
            wait_until(lambda: quarantined(decode) == 0, "the memory to come back", FIRES_WITHIN_S)
            assert metric(decode, "agent_recreations_total") == recreated + 1
            assert "recreating the transfer agent" in decode.process.tail(20_000)
            drill.expect_gone("TandemQuarantineStays")


def test_engine_that_fails_beside_clients_that_do_wrong(fault_drill: Drill) -> None:
    """TandemErrorRate: never by what clients do wrong; by answers that fail, though most requests are wrong ones."""
    drill, proxy = fault_drill, fault_drill.service.proxy
    with drill.load(4, drill.do_wrong), drill.load(1, lambda seed: drill.complete(40, 8, seed=seed)):
        counts: dict[str, float] = {}
        end_s = time.monotonic() + QUIET_S
        while time.monotonic() < end_s or min(counts.values()) < 10:
            counts = {each: metric(proxy, "requests_total", outcome=each) for each in ("rejected", "deadline", "abort")}
            assert "TandemErrorRate" not in drill.firing(), counts
            assert time.monotonic() < end_s + FIRES_WITHIN_S, counts
            time.sleep(1.0)
        print("clients' own faults", counts)
        assert metric(proxy, "requests_total", outcome="error") == 0
        answer = drill.fail(1)
        assert answer.status_code == 200
        assert '"code":"internal_error"' in answer.text.splitlines()[-2]
        with drill.load(1, drill.fail):
            drill.expect("TandemErrorRate")
            print("errors", metric(proxy, "requests_total", outcome="error"))
    drill.expect_gone("TandemErrorRate")


def test_gaps_between_tokens(fault_drill: Drill) -> None:
    """TandemItlBudgetBurn: by the decode node's own steps, as with too many sequences or too few cores. The steps are
    long by themselves: on a fast machine as on a busy one each gap is, and the node answers scrapes all the while."""
    drill, [node] = fault_drill, fault_drill.service.decode

    def counts() -> tuple[float, float]:
        return metric(node, "generation_tokens_total"), metric(node, "prompt_tokens_total", source="computed")

    before = counts()
    with drill.load(4, drill.dawdle):
        drill.expect("TandemItlBudgetBurn")
        # Look: not prompts beside them.
        generated, computed = (now - then for now, then in zip(counts(), before, strict=True))
        print("tokens generated and prompt tokens computed on the decode node", generated, computed)
        print("share of gaps of at most 100 ms", drill.values()["decode:tandem_request_itl:within_100ms_ratio_rate5m"])
        assert generated > computed
    # Do: less at once.
    drill.expect_gone("TandemItlBudgetBurn")


def test_disk_that_damages_what_is_on_it(tmp_path: Path) -> None:
    """TandemTierErrors."""
    folder = tmp_path / "tier"
    flags = (*TIGHT_FLAGS, "--kv-cache-memory", "2MiB", "--kv-tier", f"disk:{folder}?size=256MiB")
    with (
        Service(checkpoint(FAMILY), prefill_flags=flags, decode_flags=flags) as service,
        watched(service, tmp_path) as drill,
    ):

        def ask(seed: int) -> None:
            drill.complete(600, 2, seed=seed // 100 % 12)  # more prompts than the pools hold
            for path in folder.rglob("*.kv"):
                with contextlib.suppress(OSError), path.open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_END)
                    file.write(bytes([byte[0] ^ 1]))

        with drill.load(1, ask):
            drill.expect("TandemTierErrors")
            errors = [metric(node, "tier_read_errors_total", reason="digest") for node in drill.service.nodes]
            print("damaged objects", errors)
            assert sum(errors)
        for path in folder.rglob("*.kv"):  # what the runbook says: it can be emptied
            path.unlink()
        drill.expect_gone("TandemTierErrors")


def test_alerts_when_counted_then_each_was_provoked_here() -> None:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert set(re.findall(r'"(Tandem\w+)"', Path(__file__).read_text())) == alerts
