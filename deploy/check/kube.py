"""The Kubernetes manifests of the cpu-demo overlay, as far as `podman kube play` goes, with the part of a cluster that
it leaves out played here: StatefulSets become pods of their first name, Services become names in each pod's hosts file,
and probes are asked from outside, as a kubelet does. Not played: NetworkPolicy, PodDisruptionBudget, spreading over
machines, preStop. The model is the built-in one, requests and limits are left out."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from engine import Engine, FailedError, run, say
from stack import ask, get, questions, wait_until

OVERLAY = "deploy/kubernetes/overlays/cpu-demo"
NETWORK, SUBNET = "tandem-check-kube", "10.213.7"
IMAGES = {"tandem-proxy": "localhost/tandem-proxy:latest", "tandem-node:cpu": "localhost/tandem-node:cpu"}
CHANGED = {"TANDEM_MODEL": "/app/demo", "TANDEM_KV_CACHE_MEMORY": "128MiB", "TANDEM_MAX_MODEL_LEN": "2048"}
Document = dict[str, Any]


def missing(engine: Engine) -> str | None:
    """Why this stage cannot run; None: it can."""
    if engine.name != "podman":
        return "`podman kube play` is podman's"
    if os.geteuid() != 0:
        return "only root reaches the addresses of podman's pods"
    if importlib.util.find_spec("yaml") is None:
        return f"{sys.executable} has no pyyaml (.venv has it)"
    return None if shutil.which("kubectl") else "kubectl, which renders the overlay, is not installed"


class Kube:
    def __init__(self, engine: Engine, folder: Path, base: str) -> None:
        self._engine, self._folder = engine, folder
        engine.prepare_pods(base)
        import yaml

        self.documents: list[Document] = list(yaml.safe_load_all(run(["kubectl", "kustomize", OVERLAY]).stdout))
        self.probes: dict[str, dict[str, tuple[int, str]]] = {}
        workloads = [each for each in self.documents if each["kind"] in ("Deployment", "StatefulSet")]
        self.pods = {each["metadata"]["name"]: self._pod(each) for each in workloads}
        self.addresses = {name: f"{SUBNET}.{10 + index}" for index, name in enumerate(sorted(self.pods))}

    def _pod(self, workload: Document) -> Document:
        """The workload's first pod, by the name that a StatefulSet gives it."""
        spec = workload["spec"]["template"]["spec"]
        for container in spec["containers"]:
            container["image"] = IMAGES[container["image"]]
            container["imagePullPolicy"] = "Never"
            container.pop("resources", None)
        name = workload["metadata"]["name"]
        container = spec["containers"][0]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        kinds = ("startupProbe", "readinessProbe", "livenessProbe")
        self.probes[name] = {kind: (ports["http"], container.pop(kind)["httpGet"]["path"]) for kind in kinds}
        container.pop("lifecycle", None)
        del container["ports"]  # podman would publish them on every address of this machine
        for entry in container["env"]:  # a cluster's: the downward API, and variables within variables
            if "fieldRef" in entry.get("valueFrom", {}):
                entry.pop("valueFrom")
                entry["value"] = f"{name}-0"
        known = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        for entry in container["env"]:
            for variable, value in known.items():
                if "value" in entry:
                    entry["value"] = entry["value"].replace(f"$({variable})", value)
        spec.pop("topologySpreadConstraints", None)
        metadata = {"name": f"{name}-0", "labels": workload["spec"]["template"]["metadata"]["labels"]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**spec, "restartPolicy": "Always"}}

    def play(self) -> None:
        run(["podman", "network", "create", "--subnet", f"{SUBNET}.0/24", NETWORK])
        hosts = [{"ip": address, "hostnames": [name, f"{name}-0.{name}"]} for name, address in self.addresses.items()]
        for pod in self.pods.values():
            for volume in pod["spec"]["volumes"]:
                volume.get("secret", {}).setdefault("optional", False)  # podman 4.3 fails without a word for it
        maps = [each for each in self.documents if each["kind"] == "ConfigMap"]
        for each in maps:
            each["data"] |= {name: value for name, value in CHANGED.items() if name in each["data"]}
        keys = {"cluster_key": "a2V5LW9mLXRoaXMtY2hlY2stYWxvbmU=", "api_keys": "Y2xpZW50LWtleQ=="}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tandem-keys"}, "data": keys}
        for name, pod in self.pods.items():
            pod["spec"]["hostAliases"] = hosts
            file = self._folder / f"{name}.yaml"
            file.write_text("\n---\n".join(json.dumps(each) for each in (*maps, secret, pod)))
            run(["podman", "kube", "play", "--network", NETWORK, "--ip", self.addresses[name], str(file)])

    def check(self, expected: list[str] | None) -> None:
        """``expected``: the answers of the compose stack, where that stage ran."""
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            for name, address in self.addresses.items():
                port, path = self.probes[name][kind]
                url = f"http://{address}:{port}{path}"
                took_s = wait_until(lambda url=url: get(url)[0] == 200, f"{name}: {kind} {url}")
                say(f"  {name}-0: {kind} {path} after {took_s:.1f} s more")
        self.url = f"http://{self.addresses['tandem-proxy']}:8000"
        body = questions(1)[0]
        # As the container sees it: podman 4.3 mounts a secret's values as they are written, still encoded.
        read = "print(open('/etc/tandem/keys/api_keys').read())"
        key = run(["podman", "exec", "tandem-proxy-0-proxy", "python", "-c", read]).stdout.strip()
        first = ask(self.url, body, key=key)
        if expected is not None and first != expected[0]:
            raise FailedError(f"the pods answer {first!r}, the compose stack {expected[0]!r}")
        name = "tandem-decode-0-node"
        before = self._engine.pid(name)
        self._engine.kill(name)
        wait_until(lambda: self._engine.pid(name) not in (0, before), "the pod's restart policy")
        url = f"http://{self.addresses['tandem-decode']}:8200/ready"
        wait_until(lambda: get(url)[0] == 200, "the killed node")
        wait_until(lambda: get(self.url + "/ready")[0] == 200, "the proxy")
        time.sleep(6)
        if ask(self.url, body, key=key) != first:
            raise FailedError("another answer after a node was killed")
        say("  the decode node was killed, started again by its pod's policy, and answers the same")

    def down(self) -> None:
        for name in self.pods:
            run(["podman", "pod", "rm", "-f", "-t", "30", f"{name}-0"], check=False)
        run(["podman", "secret", "rm", "tandem-keys"], check=False)
        run(["podman", "volume", "rm", "-f", "tandem-keys"], check=False)  # podman 4.3 leaves the secret's values there
        run(["podman", "network", "rm", "-f", NETWORK], check=False)
