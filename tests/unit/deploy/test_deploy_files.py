"""What is under deploy/ fits the code: metrics exist, flags exist, ports and probes are those of the processes."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.values import parse_node_url
from common.metrics.table import METRICS, PREFIX, Kind

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.parent for path in (DEPLOY / "kubernetes" / "overlays").glob("*/kustomization.yaml"))
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
# Made by the adapter's rules from the metrics that those name.
ADAPTER = DEPLOY / "kubernetes" / "monitoring" / "adapter-rules.yaml"
ADAPTED = {rule["name"]["as"]: rule["metricsQuery"] for rule in yaml.safe_load(ADAPTER.read_text())["rules"]}
# Of the images and of compose, not of the processes.
NOT_FLAGS = {"TANDEM_TEST_HOOKS"}


def exposed_names() -> set[str]:
    names = set()
    for spec in METRICS:
        name = PREFIX + spec.name
        suffixes = ("_bucket", "_sum", "_count") if spec.kind is Kind.HISTOGRAM else ("",)
        names |= {name + suffix for suffix in suffixes}
    return names


def rules() -> Iterator[dict[str, Any]]:
    for path in sorted((DEPLOY / "prometheus" / "rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def recorded_names() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def names_in(expression: str) -> set[str]:
    """Metrics and recording rules that an expression asks for."""
    recorded = set(re.findall(r"\w+:tandem_\w+:\w+", expression))
    for name in recorded:
        expression = expression.replace(name, "")
    return recorded | set(re.findall(r"\btandem_\w+", expression))


def panels(path: Path) -> Iterator[dict[str, Any]]:
    yield from (panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row")


def flag_variables() -> set[str]:
    flags = set(re.findall(r"^\| `(--[a-z-]+)", (ROOT / "docs" / "flags.md").read_text(), re.MULTILINE))
    return {"TANDEM_" + flag.removeprefix("--").replace("-", "_").upper() for flag in flags}


def test_rules_when_read_then_ask_for_metrics_that_exist() -> None:
    known = exposed_names() | recorded_names()
    asked = {name for rule in rules() for name in names_in(rule["expr"])}
    assert asked - known == set()
    assert len(asked) > 10


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_when_read_then_asks_for_metrics_that_exist_and_explains_every_panel(path: Path) -> None:
    known = exposed_names() | recorded_names()
    found = list(panels(path))
    assert len(found) >= 6
    for panel in found:
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            names = names_in(target["expr"])
            assert names, target["expr"]
            assert names <= known, (panel["title"], names - known)


def test_metrics_when_exposed_then_each_is_on_a_dashboard_or_in_a_rule() -> None:
    shown = {
        name for path in DASHBOARDS for panel in panels(path) for t in panel["targets"] for name in names_in(t["expr"])
    }
    shown |= {name for rule in rules() for name in names_in(rule["expr"])}
    missing = [
        spec.name
        for spec in METRICS
        if not any(PREFIX + spec.name + suffix in shown for suffix in ("", "_bucket", "_sum", "_count"))
    ]
    assert missing == []


def test_dashboards_when_built_again_then_are_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DEPLOY / "grafana")
    build = runpy.run_path(str(DEPLOY / "grafana" / "build.py"))
    assert {path.stem for path in DASHBOARDS} == set(build["DASHBOARDS"])
    for path in DASHBOARDS:
        assert path.read_text() == build["render"](path.stem), "run `python deploy/grafana/build.py`"


def test_alerts_when_listed_then_each_has_its_runbook_entry_and_its_rule_test() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    tested = (DEPLOY / "prometheus" / "tests" / "alerts_test.yml").read_text()
    assert set(re.findall(r"^## (\w+)$", runbook, re.MULTILINE)) == set(alerts)
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert f"alertname: {name}\n" in tested


def test_environment_names_when_set_in_deploy_files_then_are_flags() -> None:
    known = flag_variables() | NOT_FLAGS
    files = [
        *DEPLOY.glob("compose*.yaml"),
        DEPLOY / ".env.example",
        DEPLOY / "docker" / "Dockerfile",
        *(DEPLOY / "kubernetes").rglob("*.yaml"),
    ]
    for path in files:
        names = set(re.findall(r"\bTANDEM_[A-Z_]+", path.read_text()))
        assert names <= known, (path, names - known)


def test_compose_variables_when_used_then_are_explained_in_the_example() -> None:
    used = set(re.findall(r"\$\{([A-Z_]+)", (DEPLOY / "compose.yaml").read_text()))
    explained = set(re.findall(r"^#? ?([A-Z_]+)=", (DEPLOY / ".env.example").read_text(), re.MULTILINE))
    assert used == explained


def test_compose_variables_when_commented_out_then_the_example_shows_the_default() -> None:
    defaults = dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", (DEPLOY / "compose.yaml").read_text()))
    shown = dict(re.findall(r"^# ([A-Z_]+)=(.*)$", (DEPLOY / ".env.example").read_text(), re.MULTILINE))
    assert shown == defaults


def test_compose_when_read_then_ports_commands_and_addresses_fit_together() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    places = {"prefill": "dns+http://prefill:8100", "decode": "dns+http://decode:8200"}
    assert services["proxy"]["environment"]["TANDEM_PREFILL"] == places["prefill"]
    assert services["proxy"]["environment"]["TANDEM_DECODE"] == places["decode"]
    for name, port in (("prefill", "8100"), ("decode", "8200")):
        for variant in (name, name + "-gpu"):
            assert services[variant]["command"] == [name]
            assert services[variant]["environment"]["TANDEM_PORT"] == port
            # Each of several containers of a service has its own address, which its peers find behind the name.
            assert services[variant]["environment"]["TANDEM_PEERS"] == ",".join(places.values())
            assert "TANDEM_ADVERTISE_HOST" not in services[variant]["environment"]
    for service in services.values():
        for published in service.get("ports", ()):
            assert published.startswith("127.0.0.1:"), published
    [scrape, _] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    found = {(name, each["port"]) for each in scrape["dns_sd_configs"] for name in each["names"]}
    assert found == {("proxy", 8000), ("prefill", 8100), ("decode", 8200)}


def test_compose_when_no_setting_is_given_then_nothing_is_missing_and_the_model_is_the_images_own() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    assert not re.findall(r"\$\{[A-Z_]+:?\?", text)
    assert not re.findall(r"^[A-Z_]+=", (DEPLOY / ".env.example").read_text(), re.MULTILINE)
    [model] = set(re.findall(r"\$\{TANDEM_MODEL:-([^}]*)\}", text))
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    for target in ("node-cpu", "node-cuda"):
        stage = dockerfile.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        assert f"COPY --from=code {model} {Path(model).name}\n" in stage


def test_compose_services_when_started_then_cannot_write_their_image_and_have_no_rights() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("proxy", "prefill", "decode", "prefill-gpu", "decode-gpu"):
        assert services[name]["read_only"] is True
        assert services[name]["tmpfs"] == ["/tmp"]
        assert services[name]["cap_drop"] == ["ALL"]
    assert all("healthcheck" in services[name] for name in ("prometheus", "grafana"))


def test_secrets_when_made_then_are_a_key_and_made_once(tmp_path: Path) -> None:
    file, made = tmp_path / "new" / "key", set()
    for _ in range(2):
        subprocess.run(["bash", str(DEPLOY / "secrets.sh"), str(file)], check=True, capture_output=True, timeout=30)
        made.add(file.read_text())
    [key] = made
    assert re.fullmatch(r"[0-9a-f]{64}", key)
    assert file.stat().st_mode & 0o777 == 0o644
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_secrets_when_asked_for_help_then_usage_and_no_file(tmp_path: Path) -> None:
    command = ["bash", str(DEPLOY / "secrets.sh"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (2, "usage: bash deploy/secrets.sh [FILE]\n")
    assert not list(tmp_path.iterdir())


def test_secrets_when_made_in_a_folder_that_is_there_then_its_mode_stays_and_a_note_says_who_can_read_them(
    tmp_path: Path,
) -> None:
    for mode, is_open in ((0o755, True), (0o700, False)):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        command = ["bash", str(DEPLOY / "secrets.sh"), str(folder / "key")]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        assert folder.stat().st_mode & 0o777 == mode
        assert (f"note: {folder} is open to others" in done.stderr) is is_open


def test_kubernetes_workloads_when_read_then_probes_ports_and_roles_are_those_of_the_processes() -> None:
    for name, port in (("proxy", 8000), ("prefill", 8100), ("decode", 8200)):
        documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / f"{name}.yaml").read_text()))
        [workload] = [each for each in documents if each["kind"] in ("Deployment", "StatefulSet")]
        pod = workload["spec"]["template"]
        assert pod["metadata"]["labels"]["tandem.role"] == name
        [container] = pod["spec"]["containers"]
        assert container["args"] == [name]
        assert container["ports"] == [{"name": "http", "containerPort": port}]
        paths = {
            probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        }
        is_ready = "/ready?degraded=ok" if name == "proxy" else "/ready"
        assert paths == {"startupProbe": "/health", "readinessProbe": is_ready, "livenessProbe": "/health"}
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True


def test_drain_timeouts_when_read_then_end_before_the_grace_periods() -> None:
    margin_s = 10  # the end itself, and a slow machine
    base = DEPLOY / "kubernetes" / "base"
    settings = list(yaml.safe_load_all((base / "config.yaml").read_text()))
    [of_nodes] = [each["data"] for each in settings if each["metadata"]["name"] == "tandem-node"]
    for name in ("proxy", "prefill", "decode"):
        documents = list(yaml.safe_load_all((base / f"{name}.yaml").read_text()))
        [pod] = [each["spec"]["template"]["spec"] for each in documents if "template" in each["spec"]]
        [container] = pod["containers"]
        own = {each["name"]: each.get("value") for each in container["env"]}
        drain_s = float(own.get("TANDEM_DRAIN_TIMEOUT_SECONDS") or of_nodes["TANDEM_DRAIN_TIMEOUT_SECONDS"])
        [_, pause] = container["lifecycle"]["preStop"]["exec"]["command"]
        assert float(pause) + drain_s + margin_s <= pod["terminationGracePeriodSeconds"], name
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("proxy", "prefill", "decode", "prefill-gpu", "decode-gpu"):
        grace_s = float(services[name]["stop_grace_period"].removesuffix("s"))
        assert float(services[name]["environment"]["TANDEM_DRAIN_TIMEOUT_SECONDS"]) + margin_s <= grace_s, name


def test_kubernetes_proxy_when_read_then_its_nodes_are_the_addresses_of_their_services() -> None:
    base = DEPLOY / "kubernetes" / "base"
    [deployment] = [
        each for each in yaml.safe_load_all((base / "proxy.yaml").read_text()) if each["kind"] == "Deployment"
    ]
    given = {each["name"]: each["value"] for each in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    for role in ("prefill", "decode"):
        documents = yaml.safe_load_all((base / f"{role}.yaml").read_text())
        [service] = [each for each in documents if each["kind"] == "Service"]
        [port] = service["spec"]["ports"]
        assert service["spec"]["clusterIP"] == "None"
        url = f"dns+http://{service['metadata']['name']}:{port['port']}"
        assert parse_node_url(given[f"TANDEM_{role.upper()}"]) == url


def test_kubernetes_proxies_when_there_are_several_then_their_service_keeps_a_client_at_one() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / "proxy.yaml").read_text()))
    by_kind = {each["kind"]: each["spec"] for each in documents}
    assert by_kind["Deployment"]["replicas"] > 1
    assert by_kind["Service"]["sessionAffinity"] == "ClientIP"


def run_tool(*command: str, cwd: Path = ROOT) -> str:
    """Output of a tool that is not ours; the test is skipped where it is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_prometheus_when_it_reads_the_rules_then_accepts_them() -> None:
    folder = DEPLOY / "prometheus"
    run_tool("promtool", "check", "rules", *(str(path) for path in sorted((folder / "rules").glob("*.yml"))))
    run_tool("promtool", "check", "config", str(folder / "prometheus.yml"))


@pytest.mark.full
def test_rules_when_prometheus_plays_their_tests_then_alerts_fire_as_they_say() -> None:
    run_tool("promtool", "test", "rules", "alerts_test.yml", cwd=DEPLOY / "prometheus" / "tests")


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_overlay_when_built_then_its_parts_refer_to_each_other(overlay: Path) -> None:
    documents = [each for each in yaml.safe_load_all(run_tool("kubectl", "kustomize", str(overlay))) if each]
    names = {(each["kind"], each["metadata"]["name"]) for each in documents}
    scalers = {
        each["spec"]["scaleTargetRef"]["name"]: each["spec"]
        for each in documents
        if "scaleTargetRef" in each.get("spec", {})
    }
    for each in documents:
        if each["kind"] != "StatefulSet":
            continue
        assert bool(scalers) is ("replicas" not in each["spec"])  # applying the manifest again undoes no scaling
        assert ("Service", each["spec"]["serviceName"]) in names
        for source in each["spec"]["template"]["spec"]["containers"][0]["envFrom"]:
            assert ("ConfigMap", source["configMapRef"]["name"]) in names
    for spec in scalers.values():
        for entry in spec.get("metrics", ()):
            name = entry["pods"]["metric"]["name"]
            assert name in ADAPTED
            assert names_in(ADAPTED[name]) <= exposed_names()
        for trigger in spec.get("triggers", ()):
            assert names_in(trigger["metadata"]["query"]) <= exposed_names()
