"""compose.yaml as a running service: its containers by service, what the proxy knows of its nodes, answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine import ROOT, Engine, FailedError, run

PROJECT = "tandem-check"
READY_TIMEOUT_S = 300.0
PEOPLE, PLACES = ("mill", "castle", "harbour", "tower", "bridge", "garden"), ("amber", "golden", "silver", "crimson")
ANIMALS = ("falcon", "otter", "heron", "badger", "lynx", "raven", "marten")


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = READY_TIMEOUT_S) -> float:
    """Seconds that it took."""
    begin_s = time.monotonic()
    while not is_so():
        if time.monotonic() - begin_s > timeout_s:
            raise FailedError(f"after {timeout_s:.0f} s still waiting for {what}")
        time.sleep(0.3)
    return time.monotonic() - begin_s


def get(url: str, **headers: str) -> tuple[int, bytes]:
    """Status and body; status 0 when there is no answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read()
    except OSError:
        return 0, b""


def questions(count: int) -> list[dict[str, Any]]:
    """Bodies of requests, each with a prompt of its own; greedy."""
    bodies = []
    for index in range(count):
        told = " ".join(
            f"The code word of the {place} is {PLACES[(index + turn) % 4]} {ANIMALS[(index * 3 + turn) % 7]}."
            for turn, place in enumerate(PEOPLE)
        )
        asked = f"What is the code word of the {PEOPLE[index % 6]}? ({index})"
        said = [(told, "user"), ("Noted.", "assistant"), (asked, "user")]
        messages = [{"role": role, "content": text} for text, role in said]
        bodies.append({"messages": messages, "temperature": 0, "max_tokens": 160, "ignore_eos": True, "stream": True})
    return bodies


def ask(url: str, body: dict[str, Any], key: str | None = None) -> str:
    """The text of a streamed answer, with an API key where one is needed. Raises FailedError unless it is whole."""
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    text, is_whole = "", False
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                _, is_data, data = line.decode().strip().partition("data: ")
                if not is_data:
                    continue
                if data == "[DONE]":
                    is_whole = True
                else:
                    event = json.loads(data)
                    if "error" in event:
                        raise FailedError(f"a stream ended with {event['error']}")
                    text += "".join(each["delta"].get("content") or "" for each in event["choices"])
    except OSError as exc:
        detail = exc.read().decode()[:300] if isinstance(exc, urllib.error.HTTPError) else ""
        raise FailedError(f"a request failed: {exc} {detail}") from exc
    if not is_whole:
        raise FailedError("a stream was cut off")
    return text


def answers(url: str, bodies: Sequence[dict[str, Any]]) -> list[str]:
    return [ask(url, body) for body in bodies]


class Load:
    """Clients that ask the same questions over and over; every answer has to be the undisturbed one."""

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]], expected: Sequence[str], num_clients: int = 3):
        self._url, self._pairs = url, list(zip(bodies, expected, strict=True))
        self._ends = threading.Event()
        self.num_answers, self.errors = 0, list[str]()
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self, turn: int) -> None:
        while not self._ends.is_set():
            body, expected = self._pairs[turn % len(self._pairs)]
            turn += 1
            try:
                text = ask(self._url, body)
                if text != expected:
                    self.errors.append(f"another answer: {text!r} instead of {expected!r}")
            except FailedError as exc:
                self.errors.append(str(exc))
            self.num_answers += 1


class Stack:
    """Of the services proxy, prefill and decode (Prometheus and Grafana are images of others)."""

    def __init__(self, engine: Engine, folder: Path, base: str) -> None:
        self._engine = engine
        self.key_file = folder / "secrets" / "cluster_key"
        run(["bash", "deploy/secrets.sh", str(self.key_file)])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._environment = {
            "PROXY_PORT": str(port),
            "CLUSTER_KEY_FILE": str(self.key_file),
            "BASE_IMAGE": base,
            "TANDEM_KV_CACHE_MEMORY": "128MiB",
            "TANDEM_MAX_MODEL_LEN": "2048",
        }

    def compose(self, *words: str) -> str:
        command = [*self._engine.compose, "-p", PROJECT, "-f", "deploy/compose.yaml", "--profile", "cpu", *words]
        return run(command, **self._environment).stdout

    def up(self, *services: str, decode: int = 1) -> None:
        kept = ("--no-recreate", "--no-deps") if services else ()
        services = services or ("proxy", "prefill", "decode")
        # Words of both compose programs: one --scale is all that podman-compose takes.
        self.compose("up", "-d", "--no-build", *kept, "--scale", f"decode={decode}", *services)

    def down(self) -> None:
        if names := self.all_containers():  # podman-compose forgets those that were scaled
            run([self._engine.name, "rm", "-f", *names])
        self.compose("down", "-v")

    def containers(self, service: str) -> list[str]:
        labels = {"com.docker.compose.project": PROJECT, "com.docker.compose.service": service}
        filters = [word for name, value in labels.items() for word in ("--filter", f"label={name}={value}")]
        return sorted(run([self._engine.name, "ps", "-a", *filters, "--format", "{{.Names}}"]).stdout.split())

    def all_containers(self) -> list[str]:
        return [name for service in ("prefill", "decode", "proxy") for name in self.containers(service)]

    def nodes(self) -> list[dict[str, Any]]:
        key = self.key_file.read_text().strip()
        status, body = get(f"{self.url}/internal/v1/nodes", **{"X-Tandem-Cluster-Key": key})
        return json.loads(body)["nodes"] if status == 200 else []

    def is_ready(self, num_nodes: int) -> bool:
        """The proxy serves, and knows exactly that many nodes, all of them ready."""
        nodes = self.nodes()
        is_whole = len(nodes) == num_nodes and all(each["state"] == "ready" for each in nodes)
        return is_whole and get(self.url + "/ready")[0] == 200

    def epochs(self) -> set[str]:
        return {each["epoch"] for each in self.nodes()}

    def check_health(self) -> None:
        """What `ps` shows; podman without systemd runs no timers, so it is asked to run each check."""
        for name in self.all_containers():
            if self._engine.name == "podman":
                run(["podman", "healthcheck", "run", name])
            status = self._engine.container(name)["State"]
            health = (status.get("Health") or status.get("Healthcheck") or {}).get("Status")
            if health != "healthy":
                raise FailedError(f"{name} is {health}, not healthy")

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self._engine.logs(name)[-3000:]}" for name in self.all_containers())


def answers_of_up(bodies: Sequence[dict[str, Any]], folder: Path) -> list[str] | None:
    """The same questions to ``tandem up`` of this checkout's .venv; None where that is not installed."""
    program = ROOT / ".venv" / "bin" / "python"
    if not program.exists():
        return None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--port", str(port), "--kv-cache-memory", "128MiB", "--max-model-len", "2048"]
    with (folder / "up.log").open("wb") as log:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        process = subprocess.Popen(
            [str(program), "-m", "common.cli", "up", *flags], cwd=ROOT, stdout=log, stderr=log, env=environment
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: get(url + "/ready")[0] == 200, "`tandem up`")
            return answers(url, bodies)
        finally:
            process.terminate()
            process.wait(90)
