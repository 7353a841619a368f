"""Rendered manifests, the compose file and the Dockerfile against their schemas and against the code that reads them:
every process is configured from its manifest's environment by the parser that it uses itself."""

from __future__ import annotations

import copy
import functools
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from common.cli.main import _commands
from common.config.command_line import parse_config
from common.config.node import NodeConfig, parse_node_config
from common.config.proxy import ProxyConfig
from common.config.tiers import TierSpec
from common.errors import ConfigError
from common.node.peers.names import PeerNames
from common.server.gate import OPEN_PATHS
from common.wire.routes import HEALTH_ROUTE, METRICS_ROUTE, READY_ROUTE
from proxy.app import create_app

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = sorted(path.parent for path in (KUBERNETES / "overlays").glob("*/kustomization.yaml"))
CUSTOM = {"PodMonitor", "ScaledObject"}  # of the Prometheus operator, of KEDA; no schema of Kubernetes' own
DEFAULT_PORTS = {"prefill": 8100, "decode": 8200}
YAMLLINT = ("yamllint", "--strict", "--config-file", str(DEPLOY / ".yamllint.yaml"))
Document = dict[str, Any]
# A node whose engine has died says so at the one that its container is restarted for.
PROBES = {"startupProbe": HEALTH_ROUTE, "readinessProbe": READY_ROUTE, "livenessProbe": HEALTH_ROUTE}


def run_tool(*command: str, text: str | None = None, cwd: Path = ROOT) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    result = subprocess.run(command, input=text, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@functools.cache
def rendered(folder: Path) -> str:
    return run_tool("kubectl", "kustomize", str(folder))


def documents(folder: Path) -> list[Document]:
    return [each for each in yaml.safe_load_all(rendered(folder)) if each]


def workloads(folder: Path) -> list[Document]:
    return [each for each in documents(folder) if each["kind"] in ("Deployment", "StatefulSet")]


def container_of(workload: Document) -> Document:
    [container] = workload["spec"]["template"]["spec"]["containers"]
    return dict(container)


def check(document: Document) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


# --- schemas


@pytest.mark.parametrize(
    "folder",
    [OVERLAYS[0], KUBERNETES / "monitoring", *(pytest.param(each, marks=pytest.mark.full) for each in OVERLAYS[1:])],
    ids=lambda path: path.name,
)
def test_manifests_when_rendered_then_have_no_field_that_kubernetes_does_not_know(folder: Path) -> None:
    checked = [each for each in documents(folder) if each["kind"] not in CUSTOM]
    for each in checked:
        check(each)
    assert folder.name == "monitoring" or len(checked) >= 10
    run_tool(*YAMLLINT, "-", text=rendered(folder))


def test_files_when_linted_then_are_in_order() -> None:
    run_tool(*YAMLLINT, str(DEPLOY))


def pod_of(workload: Document) -> Document:
    return dict(workload["spec"]["template"]["spec"])


MISTAKES: Mapping[str, Callable[[Document], object]] = {
    "readynessProbe": lambda each: pod_of(each)["containers"][0].update(readynessProbe={"timeoutSeconds": 2}),
    "terminationGracePeriod": lambda each: each["spec"]["template"]["spec"].update(terminationGracePeriod=5),
    "a port that is a word": lambda each: pod_of(each)["containers"][0]["ports"][0].update(containerPort="web"),
    "replica": lambda each: each["spec"].update(replica=2),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_manifest_when_a_field_is_misspelt_then_is_refused(mistake: str) -> None:
    for workload in workloads(KUBERNETES / "base"):
        spoilt = copy.deepcopy(workload)
        MISTAKES[mistake](spoilt)
        with pytest.raises(kubernetes_validate.ValidationError):
            check(spoilt)


# --- manifests against the code


def environment_of(workload: Document, all_documents: list[Document], index: int = 0) -> dict[str, str]:
    """What the process of the workload's pod of that number finds in its environment, references resolved."""
    maps = {each["metadata"]["name"]: each["data"] for each in all_documents if each["kind"] == "ConfigMap"}
    container = container_of(workload)
    environment: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        environment |= maps[source["configMapRef"]["name"]]
    for entry in container["env"]:
        value = entry.get("value")
        if "valueFrom" in entry and "configMapKeyRef" in entry["valueFrom"]:
            reference = entry["valueFrom"]["configMapKeyRef"]
            value = maps[reference["name"]][reference["key"]]
        elif "valueFrom" in entry:
            value = f"{workload['metadata']['name']}-{index}"
        environment[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], str(value))
    return {name: value.strip() for name, value in environment.items()}


def config_of(role: str, environment: Mapping[str, str]) -> NodeConfig | ProxyConfig:
    if role == "proxy":
        return parse_config(ProxyConfig, [], environment, prog="tandem proxy")
    return parse_node_config([], environment, role=role, default_port=DEFAULT_PORTS[role])


def places(urls: Iterable[str]) -> set[tuple[str | None, int | None]]:
    """Headless service and port of nodes that are named all at once, by ``dns+``."""
    parts = [urlsplit(url.removeprefix("dns+")) for url in urls]
    return {(part.hostname, part.port) for part in parts}


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda path: path.name)
def test_processes_when_configured_by_their_manifests_then_listen_and_are_probed_where_those_say(folder: Path) -> None:
    found = workloads(folder)
    configs = {}
    for workload in found:
        container = container_of(workload)
        [role] = container["args"]
        assert role in _commands()
        config = configs[role] = config_of(role, environment_of(workload, documents(folder)))
        assert config.host == "0.0.0.0"
        assert container["ports"] == [{"name": "http", "containerPort": config.port}]
        for probe, path in PROBES.items():
            query = "?degraded=ok" if role == "proxy" and path == READY_ROUTE else ""
            assert container[probe]["httpGet"] == {"path": path + query, "port": "http"}
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for file in filter(None, (config.cluster_key_file, config.api_key_file)):
            assert any(file.startswith(mount + "/") for mount in mounts), file
        pod = pod_of(workload)
        assert pod.get("restartPolicy", "Always") == "Always"  # a process that has ended by itself is started again
        wait_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        if isinstance(config, NodeConfig):
            # A prefill node waits for its leases when it is asked to end.
            assert pod["terminationGracePeriodSeconds"] > wait_s + config.kv_lease_seconds
            assert config.advertise_host == f"{workload['metadata']['name']}-0.{workload['spec']['serviceName']}"
        assert pod["terminationGracePeriodSeconds"] > wait_s
    proxy, prefill, decode = configs["proxy"], configs["prefill"], configs["decode"]
    assert isinstance(proxy, ProxyConfig)
    assert isinstance(prefill, NodeConfig)
    assert isinstance(decode, NodeConfig)
    assert places(proxy.decode) == {("tandem-decode", DEFAULT_PORTS["decode"])}
    assert places(proxy.prefill) == {("tandem-prefill", DEFAULT_PORTS["prefill"])}
    assert places(prefill.peers) == places(decode.peers) == places(proxy.prefill) | places(proxy.decode)
    assert (prefill.port, decode.port) == (DEFAULT_PORTS["prefill"], DEFAULT_PORTS["decode"])


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda path: path.name)
def test_nodes_when_a_statefulset_is_scaled_then_all_may_pull_from_each_other(folder: Path) -> None:
    nodes = []
    for workload in workloads(folder):
        if workload["kind"] == "StatefulSet":
            for index in (0, 11):
                environment = environment_of(workload, documents(folder), index)
                nodes.append(config_of(container_of(workload)["args"][0], environment))
    assert len(nodes) == 4
    for reader in nodes:
        assert isinstance(reader, NodeConfig)
        names = PeerNames(reader.peers)
        for holder in nodes:
            assert isinstance(holder, NodeConfig)
            assert names.have_below(f"http://{holder.advertise_host}:{holder.port}")


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda path: path.name)
def test_nodes_when_configured_by_their_manifests_then_have_a_thread_for_each_processor_that_they_request(
    folder: Path,
) -> None:
    for node in workloads(folder):
        if node["kind"] == "StatefulSet":
            container = container_of(node)
            config = config_of(container["args"][0], environment_of(node, documents(folder)))
            assert isinstance(config, NodeConfig)
            assert int(container["resources"]["requests"]["cpu"]) == config.tensor_parallel_size * config.num_threads


def test_probe_paths_when_compared_with_the_app_then_are_its_routes() -> None:
    app = create_app(ProxyConfig(decode=("http://127.0.0.1:1",)))
    routes = {getattr(route, "path", None) for route in app.routes}
    assert {HEALTH_ROUTE, READY_ROUTE, METRICS_ROUTE} <= routes & OPEN_PATHS


@pytest.mark.parametrize(("profile", "more"), [("cpu", ()), ("gpu", ()), ("cpu", ("compose.ranks.yaml",))])
def test_compose_when_its_environment_is_read_then_configures_processes_that_find_each_other(
    profile: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    files = [word for name in ("compose.yaml", *more) for word in ("-f", name)]
    command = ("docker-compose", *files, "--env-file", ".env.example", "--profile", profile, "config")
    services = yaml.safe_load(run_tool(*command, cwd=tmp_path / "deploy"))["services"]
    suffix = "-gpu" if profile == "gpu" else ""
    prefill = config_of("prefill", services["prefill" + suffix]["environment"])
    decode = config_of("decode", services["decode" + suffix]["environment"])
    proxy = config_of("proxy", services["proxy"]["environment"])
    assert isinstance(proxy, ProxyConfig)
    assert isinstance(prefill, NodeConfig)
    assert isinstance(decode, NodeConfig)
    assert proxy.prefill == (f"dns+http://prefill:{prefill.port}",)
    assert proxy.decode == (f"dns+http://decode:{decode.port}",)
    assert prefill.peers == decode.peers == proxy.prefill + proxy.decode
    assert {each.cluster_key_file for each in (proxy, prefill, decode)} == {"/run/secrets/cluster_key"}
    for name in ("proxy", "prefill" + suffix, "decode" + suffix):
        assert services[name]["restart"] == "unless-stopped"
        grace = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", services[name]["stop_grace_period"])
        assert grace is not None
        assert int(grace[1] or 0) * 60 + int(grace[2] or 0) > prefill.kv_lease_seconds


def test_gpu_overlay_when_rendered_then_each_node_has_one_gpu_and_an_rdma_device_and_sizes_its_pools_itself() -> None:
    overlay = KUBERNETES / "overlays" / "gpu"
    nodes = [each for each in workloads(overlay) if each["kind"] == "StatefulSet"]
    assert len(nodes) == 2
    for node in nodes:
        container = container_of(node)
        for kind in ("requests", "limits"):
            assert container["resources"][kind]["nvidia.com/gpu"] == 1
            assert [each for each in container["resources"][kind] if each.startswith("rdma/")]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert container["image"] == "tandem-node:cuda"
        config = config_of(container["args"][0], environment_of(node, documents(overlay)))
        assert isinstance(config, NodeConfig)
        assert (config.device, config.kv_cache_memory, config.gpu_memory_utilization) == ("cuda", None, 0.9)


def test_gpu_compose_when_read_then_its_nodes_can_map_each_others_pools_and_take_a_gpu_by_number() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    prefill, decode = services["prefill-gpu"], services["decode-gpu"]
    assert prefill["ipc"] == "shareable"
    assert (decode["ipc"], decode["pid"]) == ("service:prefill-gpu", "service:prefill-gpu")
    for service, variable in ((prefill, "PREFILL_GPU"), (decode, "DECODE_GPU")):
        [devices] = service["deploy"]["resources"]["reservations"]["devices"]
        assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        assert service["environment"]["TANDEM_DEVICE"] == f"cuda:${{{variable}:-0}}"
        # Both share one by default, and have no size of their pools.
        assert service["environment"]["TANDEM_GPU_MEMORY_UTILIZATION"].endswith(":-0.45}")
        assert service["environment"]["TANDEM_KV_CACHE_MEMORY"] == "${GPU_KV_CACHE_MEMORY:-}"
    image = variables_of("node-cuda")
    assert (image["TANDEM_DEVICE"], image["NVIDIA_DRIVER_CAPABILITIES"]) == ("cuda", "compute,utility")


def ranks_of(prefill: NodeConfig | ProxyConfig, decode: NodeConfig | ProxyConfig) -> tuple[int, int]:
    assert isinstance(prefill, NodeConfig)
    assert isinstance(decode, NodeConfig)
    # A node of several ranks refuses these, and what is per rank has to be said.
    assert (prefill.device, prefill.kv_tier, prefill.async_scheduling) == ("cpu", (), False)
    assert prefill.kv_cache_memory is not None
    return prefill.tensor_parallel_size, decode.tensor_parallel_size


def test_ranks_overlay_when_rendered_then_a_larger_prefill_node_has_what_its_ranks_take() -> None:
    overlay = KUBERNETES / "overlays" / "ranks"
    found = {each["metadata"]["name"]: each for each in workloads(overlay)}
    nodes = {role: found[f"tandem-{role}"] for role in ("prefill", "decode")}
    environments = {role: environment_of(node, documents(overlay)) for role, node in nodes.items()}
    configs = {role: config_of(role, variables_of("node-cpu") | given) for role, given in environments.items()}
    assert ranks_of(configs["prefill"], configs["decode"]) == (2, 1)
    for role, config in configs.items():
        assert isinstance(config, NodeConfig)
        assert config.kv_cache_memory is not None
        container, num_ranks = container_of(nodes[role]), config.tensor_parallel_size
        resources = container["resources"]
        assert int(resources["requests"]["cpu"]) == num_ranks * config.num_threads
        memory = int(resources["limits"]["memory"].removesuffix("Gi")) << 30
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert memory >= num_ranks * (config.kv_cache_memory + (3 << 30))
        # Where the ranks find each other, and what each one's transfer agent takes.
        assert {"/tmp", "/dev/shm"} <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_ranks_compose_when_read_then_its_prefill_node_alone_has_ranks() -> None:
    services = yaml.safe_load((DEPLOY / "compose.ranks.yaml").read_text())["services"]
    usual = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services) == {"prefill"}
    found = {}
    for role in ("prefill", "decode"):
        given = {**usual[role]["environment"], **services.get(role, {}).get("environment", {})}
        set_by_default = {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in given.items()}
        found[role] = config_of(role, variables_of("node-cpu") | set_by_default)
    assert ranks_of(found["prefill"], found["decode"]) == (2, 1)
    assert usual["prefill"]["tmpfs"] == ["/tmp"]  # where the ranks find each other


def tiers_of(environment: Mapping[str, str]) -> list[TierSpec]:
    config = config_of("decode", {**environment, "TANDEM_CLUSTER_KEY_FILE": "/key"})
    assert isinstance(config, NodeConfig)
    return list(config.kv_tier)


def ports_of(words: Iterable[str]) -> set[int]:
    return {int(word.rpartition("=")[2]) for word in words if "_port=" in word}


@pytest.mark.full
def test_mooncake_component_when_rendered_then_nodes_find_the_master_that_it_starts(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / "overlays" / "cpu-demo"
    with (overlay / "kustomization.yaml").open("a") as file:
        file.write("components: [../../components/mooncake]\n")
    text = run_tool("kubectl", "kustomize", str(overlay))
    found = [each for each in yaml.safe_load_all(text) if each]
    for each in found:
        check(each)
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in found}
    [tier] = tiers_of(by_name["ConfigMap", "tandem-node"]["data"])
    host, _, port = tier.path.rpartition(":")
    master = container_of(by_name["Deployment", host])
    assert master["command"] == ["mooncake_master"]
    assert ports_of(master["args"]) == {int(port), tier.admin_port}
    assert {each["port"] for each in by_name["Service", host]["spec"]["ports"]} == {int(port), tier.admin_port}
    [rule] = by_name["NetworkPolicy", host]["spec"]["ingress"]
    assert {each["port"] for each in rule["ports"]} == {int(port), tier.admin_port}
    assert master["image"] == container_of(by_name["StatefulSet", "tandem-decode"])["image"]


def test_mooncake_compose_when_read_then_nodes_find_the_master_that_it_starts() -> None:
    services = yaml.safe_load((DEPLOY / "compose.mooncake.yaml").read_text())["services"]
    usual = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("prefill", "decode"):
        [tier] = tiers_of({**services[name]["environment"], "TANDEM_MODEL": "a"})
        host, _, port = tier.path.rpartition(":")
        assert ports_of(services[host]["command"]) == {int(port), tier.admin_port}
        assert "mooncake" in services[name]["build"]["args"]["NODE_EXTRAS"].split(",")
        assert services[host]["image"] == usual[name]["image"]
        assert ("build" in services[host], services[host]["pull_policy"]) == (False, "never")  # one way to build it
        assert "ports" not in services[host]


# --- the Dockerfile


class Step(NamedTuple):
    word: str
    text: str


def dockerfile() -> dict[str, list[Step]]:
    """Target -> its steps, those of the stages that it is made from first; COPY --from is another stage's."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    joined = re.sub(r"\\\n(\s*#.*\n)*\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    found: dict[str, list[Step]] = {}
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = list(found.get(base, ()))
        elif found:
            next(reversed(found.values())).append(Step(word, rest.strip()))
    return found


def variables_of(target: str) -> dict[str, str]:
    """What an image sets in the environment of its processes."""
    steps = [step.text for step in dockerfile()[target] if step.word == "ENV"]
    return dict(word.split("=", 1) for text in steps for word in shlex.split(text))


def test_images_when_their_processes_get_no_cluster_key_then_they_refuse_to_listen_and_compose_gives_it() -> None:
    """They listen beyond loopback; Kubernetes' manifests are held to the same rule by the test that parses them."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    roles = {
        "proxy": "proxy",
        "prefill": "prefill",
        "decode": "decode",
        "prefill-gpu": "prefill",
        "decode-gpu": "decode",
    }
    assert {name for name, service in services.items() if service["image"].startswith("tandem-")} == set(roles)
    for name, role in roles.items():
        service = services[name]
        environment = {variable: "1" if "${" in value else value for variable, value in service["environment"].items()}
        environment |= variables_of(service["build"]["target"]) | {"TANDEM_DTYPE": "auto", "TANDEM_POLICY": "cost"}
        environment["TANDEM_KV_CACHE_MEMORY"] = environment["TANDEM_MAX_MODEL_LEN"] = "4096"
        config = config_of(role, environment)
        assert (config.host, config.is_exposed) == ("0.0.0.0", False)
        assert config.cluster_key_file == "/run/secrets/cluster_key"
        assert service["secrets"] == ["cluster_key"]
        del environment["TANDEM_CLUSTER_KEY_FILE"]
        with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 .*--cluster-key-file.*--insecure-internal"):
            config_of(role, environment)
        assert config_of(role, {**environment, "TANDEM_INSECURE_INTERNAL": "1"}).is_exposed


def test_labels_when_read_then_are_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [labels] = [step.text for step in dockerfile()["runtime"] if step.word == "LABEL"]
    given = dict(word.split("=", 1) for word in shlex.split(labels))
    for name in ("version", "description"):
        assert given[f"org.opencontainers.image.{name}"] == project[name]
    assert given["org.opencontainers.image.licenses"] == project["license"]


@pytest.mark.parametrize("target", ["proxy", "node-cpu", "node-cuda"])
def test_image_when_read_then_starts_our_command_as_another_user_from_files_that_exist(target: str) -> None:
    stages = dockerfile()
    steps = stages[target]
    last = {step.word: step.text for step in steps}
    assert last["USER"] not in ("root", "0")
    assert last["ENTRYPOINT"] == '["tandem"]'
    assert "CMD" not in last or last["CMD"] == '["proxy"]'
    sources = [shlex.split(step.text)[:-1] for step in steps if step.word == "COPY"]
    assert all(words[0].removeprefix("--from=") in stages for words in sources)  # nothing of the build folder itself
    assert ["--from=code", "/app/code"] in sources
    [packages] = {words[0].removeprefix("--from=") for words in sources if words[1] == "/app/venv"}
    [install] = [step.text for step in stages[packages] if "deploy/install.py" in step.text and step.word == "RUN"]
    extras = [step.text for step in stages[packages] if step == Step("ARG", "NODE_EXTRAS=node,images")]
    assert ("$NODE_EXTRAS" in install) is bool(extras) is (target != "proxy")
    assert ("--device cpu" in install) is (target == "node-cpu")
    copied = [word for step in stages["code"] if step.word == "COPY" for word in shlex.split(step.text)[:-1]]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"common", "proxy", "prefill_node", "decode_node", "pyproject.toml"} <= set(copied) <= allowed
    assert all((ROOT / name).exists() for name in copied)
    ports = {int(port) for step in steps if step.word == "EXPOSE" for port in step.text.split()}
    assert ports == ({ProxyConfig(decode=("http://a",)).port} if target == "proxy" else set(DEFAULT_PORTS.values()))
    health = last["HEALTHCHECK"].partition(" CMD ")[2]
    assert health == '["python", "-m", "common.cli.probe", "/health"]'


def test_node_image_when_ops_are_baked_in_then_no_volume_hides_them_and_nodes_look_there() -> None:
    stages = dockerfile()
    steps = stages["node-cpu"]
    [folder] = [step.text for step in steps if step.word == "WORKDIR"]
    [made] = [step.text.split()[-1] for step in stages["ops"] if "common.ops.cpu.prebuild " in step.text]
    [baked] = [step.text.split()[-1] for step in steps if f"--from=ops {folder}/{made} " in step.text]
    variables = {**variables_of("node-cpu"), "TANDEM_CLUSTER_KEY_FILE": "/key", "TANDEM_MODEL": "m"}
    config = parse_node_config([], variables, role="decode", default_port=8200)
    assert config.prebuilt_ops == f"{folder}/{baked}"
    mounts = {
        mount["mountPath"] for each in OVERLAYS for w in workloads(each) for mount in container_of(w)["volumeMounts"]
    }
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    mounts |= {volume.split(":")[1] for service in services for volume in service.get("volumes", ())}
    mounts |= {step.text for step in steps if step.word == "VOLUME"}
    assert {"/cache", "/models"} <= mounts
    assert not [mount for mount in mounts if f"{config.prebuilt_ops}/".startswith(mount.rstrip("/") + "/")]


def test_gpu_image_when_read_then_has_the_compiler_that_triton_runs_and_triton_may_write_its_cache() -> None:
    """On a read-only root: in the image, and so in compose, in its volume; in Kubernetes in a pod's own folder."""
    steps = dockerfile()["node-cuda"]
    words = [step.word for step in steps]
    [install] = [at for at, step in enumerate(steps) if step.word == "RUN" and "gcc" in step.text.split()]
    assert "libc6-dev" in steps[install].text.split()
    assert install < words.index("USER")
    assert not {"gcc", "g++"} & {word for step in dockerfile()["node-cpu"] for word in step.text.split()}
    [volume] = [step.text for step in steps if step.word == "VOLUME"]
    image = variables_of("node-cuda")
    for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        assert image[name].startswith(volume + "/")
    for role in ("prefill", "decode"):
        parts = yaml.safe_load_all((KUBERNETES / "base" / f"{role}.yaml").read_text())
        [node] = [each for each in parts if each["kind"] == "StatefulSet"]
        given = {each["name"]: each.get("value") for each in container_of(node)["env"]}
        own = {each["name"] for each in pod_of(node)["volumes"] if each.get("emptyDir") == {}}
        mounts = [each["mountPath"] for each in container_of(node)["volumeMounts"] if each["name"] in own]
        assert given["XDG_CACHE_HOME"] in mounts
        assert given["TRITON_CACHE_DIR"].startswith(given["XDG_CACHE_HOME"] + "/")
