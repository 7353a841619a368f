"""A real Prometheus that scrapes a running service: what dashboards and rules ask for can be asked, and has data."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from common.metrics.labels import LABEL_VALUES
from common.metrics.table import PREFIX
from common.wire.headers import ITL_TARGET_HEADER, PLACEMENT_HEADER, TTFT_TARGET_HEADER
from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import completion_body, together
from tests.support.hangup import wait_until
from tests.support.models import checkpoint
from tests.support.reference import random_tokens
from tests.support.service import ROOT, Node, Process, Service, free_port
from tests.unit.deploy.test_autoscaling import adapter_queries
from tests.unit.deploy.test_autoscaling import targets as scaler_targets

pytestmark = pytest.mark.full

DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
RULES = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
# Series that only come into being with the first failure, eviction or preemption.
EMPTY_WHILE_ALL_IS_WELL = {"Evictions", "Tokens found and computed again", "The other role's work"}
UNUSED_ROWS = {"Tiers", "Structured output", "Speculative decoding, steps ahead"}
"""By this service: it has neither tiers nor drafts nor steps ahead, and its requests have no schemas."""
LOAD_S = 20.0
MOVED, STAYS = {PLACEMENT_HEADER: "remote"}, {PLACEMENT_HEADER: "local"}
IN_TIME = {TTFT_TARGET_HEADER: "60000", ITL_TARGET_HEADER: "60000"}


@pytest.fixture(scope="module")
def observed() -> Iterator[Service]:
    """With the policy that a service has by default: what it estimates is on the boards."""
    flags = {"prefill_flags": NODE_FLAGS, "decode_flags": NODE_FLAGS, "proxy_flags": ("--policy", "cost")}
    with Service(checkpoint(FAMILY), **flags) as running:
        yield running


def ask(url: str, num_tokens: int, seed: int, headers: Mapping[str, str]) -> None:
    body = completion_body(random_tokens(num_tokens, seed=seed), 12, stream=True)
    response = httpx.post(url + "/v1/completions", json=body, headers=headers, timeout=60)
    assert response.text.rstrip().endswith("[DONE]"), response.text


@pytest.fixture(scope="module")
def prometheus(observed: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL, after it has scraped the three processes under load for a while."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian package prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    targets = [
        # As the PodMonitor labels them.
        {"targets": [node.url.removeprefix("http://")], "labels": {"namespace": "tandem", "pod": pod_of(node)}}
        for node in observed.nodes
    ]
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(path) for path in RULES]
    config["scrape_configs"] = [{"job_name": "tandem", "static_configs": targets}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    argv = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = Process(argv, folder / "prometheus.log")
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_ready(url), "prometheus to be ready")
        end_s = time.monotonic() + LOAD_S
        turn = 0
        while time.monotonic() < end_s:
            turn += 1
            together(
                [
                    functools.partial(ask, observed.url, 100 + 40 * index, 240 + (turn + index) % 7, headers)
                    for index, headers in enumerate(({}, MOVED, IN_TIME, MOVED))
                ]
            )
            # A prefix that only the decode node has, then a longer prompt for the prefill node: it asks for it.
            ask(observed.url, 400, 1000 + turn, STAYS)
            ask(observed.url, 700, 1000 + turn, MOVED)
        time.sleep(2.0)
        yield url
    finally:
        process.stop()


def pod_of(node: Node) -> str:
    return f"tandem-{node.role}-0"


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/-/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def query(url: str, expression: str) -> list[dict[str, Any]]:
    answer = httpx.get(url + "/api/v1/query", params={"query": expression}, timeout=30).json()
    assert answer["status"] == "success", (expression, answer)
    return list(answer["data"]["result"])


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_when_a_service_was_under_load_then_every_panel_has_data(prometheus: str, path: Path) -> None:
    empty, row = [], ""
    for panel in json.loads(path.read_text())["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        results = [query(prometheus, target["expr"]) for target in panel["targets"]]
        if row in UNUSED_ROWS or panel["title"] in EMPTY_WHILE_ALL_IS_WELL:
            continue
        if panel["fieldConfig"]["defaults"]["noValue"] == "none":  # a panel of failures
            continue
        for target, result in zip(panel["targets"], results, strict=True):
            if not any(not math.isnan(float(each["value"][1])) for each in result):
                empty.append((panel["title"], target["expr"]))
    assert not empty


def test_adapter_when_a_service_was_under_load_then_every_scaler_has_a_figure_of_its_pods(prometheus: str) -> None:
    for role, metrics in scaler_targets().items():
        queries = adapter_queries(f"tandem-{role}-0")
        for metric in metrics:
            [result] = query(prometheus, queries[metric])
            assert result["metric"] == {"pod": f"tandem-{role}-0"}
            assert float(result["value"][1]) >= 0, metric


def test_rules_when_a_service_was_under_load_then_all_are_evaluated_and_no_alert_fires(prometheus: str) -> None:
    groups = httpx.get(prometheus + "/api/v1/rules", timeout=30).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == sum(
        len(group["rules"]) for path in RULES for group in yaml.safe_load(path.read_text())["groups"]
    )
    for rule in rules:
        assert rule["health"] == "ok", rule
        if rule["type"] == "alerting":
            assert rule["state"] != "firing", rule


def test_labels_when_a_service_was_under_load_then_their_values_are_documented(
    prometheus: str, observed: Service
) -> None:
    found = set()
    for node in observed.nodes:
        for family in text_string_to_metric_families(httpx.get(node.url + "/metrics", timeout=30).text):
            for sample in family.samples:
                found |= {(family.name, label, re.sub(r"\d+", "<N>", value)) for label, value in sample.labels.items()}
    explained = {(each.label, PREFIX + name): each.values for each in LABEL_VALUES for name in each.metrics}
    seen = 0
    for family, label, value in found:
        values = explained.get((label, family), explained.get((label, family + "_total")))
        if values is not None:
            assert value in values, (family, label, value)
            seen += 1
    assert seen > 20


def test_metrics_when_promtool_lints_them_then_names_and_types_are_in_order(observed: Service) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    for node in observed.nodes:
        text = httpx.get(node.url + "/metrics", timeout=30).text
        result = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
        assert result.returncode == 0, (node.role, result.stdout, result.stderr)
