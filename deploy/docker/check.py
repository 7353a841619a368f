"""Runs the Dockerfile's own install and start steps without a container engine: what can break in an image, minus the
image.

    python3 deploy/docker/check.py                      # proxy and node-cpu
    python3 deploy/docker/check.py --targets proxy      # a minute, no torch

Each target gets a clean folder that stands for the container's root, holds only what the Dockerfile copies (through
.dockerignore), and a fresh virtual environment made by the Dockerfile's own lines. All steps run as a user that is not
root, when this script is started by root. Then the targets are started as their ENTRYPOINT and CMD say (the node's
image twice, as a prefill and as a decode node), asked by their HEALTHCHECK, given one request, and ended by SIGTERM.
What needs a real image is skipped and listed at the end. Python 3.11, standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
UID = 10001
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
# Steps of the image's operating system: nothing of ours, and not to be done to this machine.
OF_THE_IMAGE = ("useradd", "apt-get")
INSTALL_TIMEOUT_S = 3600
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60
STARTS = {"proxy": (["proxy"],), "node-cpu": (["prefill"], ["decode"])}


@dataclass(frozen=True)
class Step:
    word: str
    text: str


@dataclass
class Image:
    """One target's folder and what its Dockerfile lines have set so far."""

    name: str
    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    user: str = "root"

    def inside(self, path: str) -> Path:
        """Where a path of the container is on this machine."""
        absolute = path if path.startswith("/") else f"{self.folder.rstrip('/')}/{path}"
        return self.root / absolute.lstrip("/")

    def environ(self, **more: str) -> dict[str, str]:
        """The container's environment; its absolute paths are those of the folder."""
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "SSL_CERT_FILE"}
        kept |= {"HOME": str(self.inside("/home/tandem")), "LANG": "C.UTF-8"}
        for name, value in (self.environment | more).items():
            kept[name] = f"{self.root}{value}" if value.startswith("/") else value
        kept["PATH"] = kept.get("PATH", "$PATH").replace("$PATH", SYSTEM_PATH)
        return kept


def stages(text: str) -> dict[str, tuple[str, list[Step]]]:
    """Stage -> what it is FROM, and its steps."""
    joined = re.sub(r"\\\n\s*", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    found: dict[str, tuple[str, list[Step]]] = {}
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = (base, [])
        else:
            next(reversed(found.values()))[1].append(Step(word, rest.strip()))
    return found


def steps_of(found: dict[str, tuple[str, list[Step]]], name: str) -> list[Step]:
    if name not in found:
        return []  # an image of somebody else
    base, steps = found[name]
    return [*steps_of(found, base), *steps]


def as_user() -> list[str]:
    """What goes before a command so that it does not run as root."""
    if os.geteuid() != 0:
        return []
    return ["/usr/bin/setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--inh-caps=-all"]


def run_step(image: Image, step: Step, python: str) -> None:
    if step.word == "ENV":
        for name, value in (word.split("=", 1) for word in shlex.split(step.text)):
            image.environment[name] = value
    elif step.word == "WORKDIR":
        image.folder = step.text
        image.inside(step.text).mkdir(parents=True, exist_ok=True)
    elif step.word == "COPY":
        copy(image, shlex.split(step.text))
    elif step.word == "USER":
        image.user = step.text
    elif step.word == "VOLUME":
        image.inside(step.text).mkdir(parents=True, exist_ok=True)
        give_away(image.root)
    elif step.word == "ENTRYPOINT":
        image.entrypoint = json.loads(step.text)
    elif step.word == "CMD":
        image.command = json.loads(step.text)
    elif step.word == "HEALTHCHECK":
        image.health = json.loads(step.text[step.text.index(" CMD ") + 5 :])
    elif step.word == "RUN":
        run_shell(image, step.text, python)
    elif step.word not in ("EXPOSE", "ARG"):
        raise SystemExit(f"{step.word}: this script does not know that line of the Dockerfile")


def run_shell(image: Image, text: str, python: str) -> None:
    if text.startswith(OF_THE_IMAGE):
        image.skipped.append(f"RUN {text.split(' && ')[0]} ...")
        return
    give_away(image.root)
    if text.startswith("python -m venv"):
        text = text.replace("python", shlex.quote(python), 1)
    say(f"{image.name}: RUN {text}")
    subprocess.run(
        [*as_user(), "sh", "-c", text],
        cwd=image.inside(image.folder),
        env=image.environ(),
        check=True,
        timeout=INSTALL_TIMEOUT_S,
    )


def copy(image: Image, words: list[str]) -> None:
    *sources, target = words
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in sources:
        if source not in allowed:
            raise SystemExit(f"COPY {source}: .dockerignore keeps it out of the build")
        found = ROOT / source
        place = image.inside(target) / (source if len(sources) > 1 or not found.is_dir() else "")
        if found.is_dir():
            shutil.copytree(found, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(found, place)


def give_away(root: Path) -> None:
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", f"{UID}:{UID}", str(root)], check=True)


def build(name: str, folder: Path, python: str) -> Image:
    image = Image(name, folder / name)
    image.inside("/home/tandem").mkdir(parents=True)
    found = stages((HERE / "Dockerfile").read_text())
    if name not in found:
        raise SystemExit(f"{name}: not a target of the Dockerfile, which has {', '.join(found)}")
    for step in steps_of(found, name):
        run_step(image, step, python)
    if image.user == "root":
        raise SystemExit(f"{name}: would run as root")
    return image


@dataclass
class Started:
    image: Image
    words: list[str]
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def is_well(self) -> bool:
        if self.process.poll() is not None:
            raise SystemExit(f"{self.words} ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
        command = [*as_user(), *located(self.image, self.image.health)]
        environment = self.image.environ(TANDEM_HOST="127.0.0.1", TANDEM_PORT=str(self.port))
        folder = self.image.inside(self.image.folder)
        return subprocess.run(command, env=environment, cwd=folder, capture_output=True, check=False).returncode == 0

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)


def located(image: Image, words: list[str]) -> list[str]:
    """A command with its program found on the container's PATH."""
    program = shutil.which(words[0], path=image.environ()["PATH"])
    if program is None:
        raise SystemExit(f"{words[0]}: not on the PATH of {image.name}")
    return [program, *words[1:]]


def start(image: Image, words: list[str], port: int, **environment: str) -> Started:
    log = image.root / f"{words[0]}.log"
    environment = image.environ(**environment) | {"TANDEM_HOST": "127.0.0.1", "TANDEM_PORT": str(port)}
    say(f"{image.name}: {' '.join([*image.entrypoint, *words])} on port {port}")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*as_user(), *located(image, image.entrypoint), *words],
            cwd=image.inside(image.folder),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(image, words, port, process, log)


def wait_until_well(started: Started) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not started.is_well():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{started.words}: not well after {START_TIMEOUT_S} s:\n{started.log.read_text()[-3000:]}")
        time.sleep(0.5)
    say(f"{started.image.name} {started.words[0]}: HEALTHCHECK passes, uid {uid_of(started.process.pid)}")
    if uid_of(started.process.pid) == 0:
        raise SystemExit(f"{started.words} runs as root")


def uid_of(pid: int) -> int:
    return int(re.findall(r"^Uid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])


def free_ports(count: int) -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [int(each.getsockname()[1]) for each in sockets]
    yield from ports


def call(port: int, path: str, body: object = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def run_together(images: dict[str, Image]) -> None:
    proxy_port, prefill_port, decode_port = free_ports(3)
    urls = {"prefill": f"http://127.0.0.1:{prefill_port}", "decode": f"http://127.0.0.1:{decode_port}"}
    running: list[Started] = []
    try:
        if (node := images.get("node-cpu")) is not None:
            [model] = node.inside("/app/venv").glob("lib/python*/site-packages/common/demo_model/tandem-demo")
            settings = {"TANDEM_MODEL": "/" + str(model.relative_to(node.root)), "TANDEM_KV_CACHE_MEMORY": "64MiB"}
            # An empty volume hides the image's own folder, as in Kubernetes: what is baked in must not be there.
            settings["XDG_CACHE_HOME"] = "/cache"
            for role, port in (("prefill", prefill_port), ("decode", decode_port)):
                peer = urls["decode" if role == "prefill" else "prefill"]
                running.append(start(node, [role], port, TANDEM_PEERS=peer, **settings))
        if (proxy := images.get("proxy")) is not None:
            nodes = {"TANDEM_PREFILL": urls["prefill"], "TANDEM_DECODE": urls["decode"]}
            running.append(start(proxy, proxy.command, proxy_port, **nodes))
        for each in running:
            wait_until_well(each)
        if proxy is not None:
            ask(proxy_port, has_nodes=node is not None)
        for each in running:
            check_baked(each)
    finally:
        statuses = {each.words[0]: each.stop() for each in running}
    say(f"SIGTERM: exit statuses {statuses}")
    if any(statuses.values()):
        raise SystemExit("a process did not end in order on SIGTERM")


def check_baked(started: Started) -> None:
    """Nodes run the compiled ops, and no start has compiled them."""
    if started.words == ["proxy"]:
        return
    log = started.log.read_text()
    if "compiling the C++ ops" in log or " ops=cpp " not in log:
        raise SystemExit(f"{started.words}: the image's compiled ops are not used:\n{log[-3000:]}")
    say(f"{started.image.name} {started.words[0]}: runs the image's compiled ops")


def ask(port: int, *, has_nodes: bool) -> None:
    for path in ("/", "/chat", "/pages/status.js", "/status.json"):
        if call(port, path)[0] != 200:
            raise SystemExit(f"{path}: {call(port, path)}")
    if not has_nodes:
        status, text = call(port, "/ready")
        say(f"proxy without nodes: /ready {status} {text[:100]}")
        if status != 503:
            raise SystemExit("a proxy without nodes must not be ready")
        return
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while call(port, "/ready")[0] != 200:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the service is not ready: {call(port, '/ready')}")
        time.sleep(0.5)
    status, text = call(port, "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8})
    say(f"a completion through proxy, prefill and decode: {status} {json.loads(text).get('choices', text)}")
    if status != 200:
        raise SystemExit("the service does not answer")


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=sorted(STARTS), default=sorted(STARTS, reverse=True))
    parser.add_argument("--python", default=default_python(), help="interpreter that stands for the base image's")
    parser.add_argument("--keep", action="store_true", help="leave the folder")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tandem-image-"))
    folder.chmod(0o755)
    try:
        images = {name: build(name, folder, given.python) for name in given.targets}
        run_together(images)
        skipped = sorted({each for image in images.values() for each in image.skipped})
        say("passed; not run here: the base image itself, " + "; ".join(skipped))
        return 0
    finally:
        if given.keep:
            say(f"kept: {folder}")
        else:
            shutil.rmtree(folder)


def default_python() -> str:
    """An interpreter that other users can run: root's own may lie in root's home."""
    return "/usr/bin/python3" if os.geteuid() == 0 and Path("/usr/bin/python3").exists() else sys.executable


if __name__ == "__main__":
    sys.exit(main())
