"""The container engine of this machine: docker with compose, or buildah and podman with podman-compose."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_PACKAGE = "podman-compose>=1.5,<2"
BUILD_TIMEOUT_S, COMMAND_TIMEOUT_S = 3600, 300
NPROC = 16384
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class UnavailableError(Exception):
    """This machine cannot run containers; the text says what is missing."""


class FailedError(Exception):
    """Something that should hold does not."""


def say(text: str) -> None:
    print(text, flush=True)


def run(
    words: Sequence[str], *, check: bool = True, timeout_s: float = COMMAND_TIMEOUT_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if check and done.returncode:
        raise FailedError(f"{' '.join(words)}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done


class Engine:
    """``folder``: for what the engine needs of this check, such as podman-compose."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings = {"containers": "", "engine": ""}  # of podman's containers.conf, when it needs one
        if works("docker", "info") and works("docker", "compose", "version"):
            self.name, self._builder, self.compose = "docker", ["docker", "build"], ["docker", "compose"]
        elif works("podman", "info") and works("buildah", "version"):
            self.name, self._builder = "podman", ["buildah", "build", "--layers", "--format", "docker"]
            self.compose = [self._find_compose()]
        else:
            raise UnavailableError("neither docker with its daemon and compose, nor buildah and podman, work here")

    def _find_compose(self) -> str:
        found = shutil.which("podman-compose")
        if found is None:
            run([sys.executable, "-m", "venv", str(self._folder / "compose")])
            found = str(self._folder / "compose" / "bin" / "podman-compose")
            run([str(Path(found).with_name("pip")), "install", "--quiet", COMPOSE_PACKAGE])
        return found

    def can_run(self, image: str) -> None:
        """Raises UnavailableError with the engine's reason.

        podman raises limits as far as root may, and its first runtime may not like this system's cgroups: where that
        fails, the limits of this process and runc are tried, by a configuration of this check's own."""
        probe = [self.name, "run", "--rm", image, "python3", "--version"]
        if self.name == "podman" and not self._has_names():
            raise UnavailableError(
                "podman's networks resolve no names here: its CNI plugin dnsname is missing "
                "(Debian 12: golang-github-containernetworking-plugin-dnsname)"
            )
        if (first := run(probe, check=False)).returncode == 0:
            return
        if self.name == "podman":
            nofile = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            self._settings["containers"] = f'default_ulimits = ["nofile={nofile}:{nofile}", "nproc={NPROC}:{NPROC}"]'
            self._settings["engine"] = 'runtime = "runc"'
            self._configure()
            if run(probe, check=False).returncode == 0:
                say("podman runs containers here with runc and lower limits only")
                return
        raise UnavailableError(f"{self.name} runs no container: {first.stderr.strip()[-300:]}")

    def _has_names(self) -> bool:
        """Whether containers of one network find each other by name, as those of compose.yaml have to."""
        name = "tandem-check-names"
        run([self.name, "network", "create", name])
        try:
            return bool(json.loads(run([self.name, "network", "inspect", name]).stdout)[0]["dns_enabled"])
        finally:
            run([self.name, "network", "rm", name], check=False)

    def can_build(self, base: str, options: Sequence[str]) -> None:
        """Raises UnavailableError when a build on ``base`` reaches no packages: the images are made of them."""
        get = "python3 -m venv /probe && /probe/bin/pip download --quiet --no-deps --no-cache-dir --retries 1 -d / idna"
        file, name = self._folder / "Probe", "localhost/tandem-probe"
        file.write_text(
            f"FROM {base}\nENV PIP_CONFIG_FILE=/run/secrets/pip\n"
            f"RUN --mount=type=secret,id=pip {get}\nRUN apt-get update\n"
        )
        done = run(
            [*self._builder, "--no-cache", *options, "-t", name, "-f", str(file), str(self._folder)], check=False
        )
        if done.returncode:
            last = " ".join((done.stderr or done.stdout).split())[-600:]
            raise UnavailableError(f"a build here reaches no packages (--build-options may say how): {last}")
        run([self.name, "rmi", name])

    def _configure(self) -> None:
        file = self._folder / "containers.conf"
        file.write_text("".join(f"[{name}]\n{text}\n" for name, text in self._settings.items()))
        os.environ["CONTAINERS_CONF"] = str(file)

    def prepare_pods(self, base: str) -> None:
        """A pod needs a process that does nothing: podman's own is catatonit, a package that may be missing."""
        if any(shutil.which("catatonit", path=path) for path in (os.environ["PATH"], "/usr/libexec/podman")):
            return
        file = self._folder / "Pause"
        file.write_text(f'FROM {base}\nSTOPSIGNAL SIGKILL\nENTRYPOINT ["sleep", "infinity"]\n')
        run([*self._builder, "-t", "localhost/tandem-pause", "-f", str(file), str(self._folder)])
        self._settings["engine"] += '\ninfra_image = "localhost/tandem-pause"'
        self._configure()

    def bring_base(self, image: str, suite: str | None) -> str:
        """The base image's name: ``image``, pulled; or one of Debian's own packages when a suite is given, or when it
        cannot be pulled and debootstrap is here."""
        has_image = (self.name, "image", "inspect", image), (self.name, "pull", "--quiet", image)
        if suite is None and any(works(*words) for words in has_image):
            return image
        if shutil.which("debootstrap") is None or os.geteuid() != 0:
            raise UnavailableError(f"{image} cannot be pulled, and debootstrap, run by root, is not here to replace it")
        suite = suite or "bookworm"
        name = f"localhost/tandem-base:{suite}"
        if not works(self.name, "image", "inspect", name):
            say(f"base image {name}: Debian's packages of {suite}, by debootstrap")
            with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
                root = f"{scratch}/root"
                packages = "--include=ca-certificates,python3,python3-venv"
                run(["debootstrap", "--variant=minbase", packages, suite, root], timeout_s=BUILD_TIMEOUT_S)
                run(["sh", "-c", f"rm -rf {root}/var/cache/apt/archives/*.deb {root}/var/lib/apt/lists/*"])
                run(["tar", "-C", root, "--exclude=./dev/*", "-cf", f"{scratch}/base.tar", "."])
                run([self.name, "import", "--change", f"ENV PATH={PATH}", f"{scratch}/base.tar", name])
        return name

    def build(self, target: str, tag: str, options: Sequence[str]) -> float:
        """Seconds that it took."""
        begin_s = time.monotonic()
        where = ["-f", "deploy/docker/Dockerfile", "--target", target, "-t", tag, "."]
        run([*self._builder, *options, *where], timeout_s=BUILD_TIMEOUT_S)
        return time.monotonic() - begin_s

    def remake(self, image: str) -> str:
        """Another image of the same content under that name; its id."""
        file = self._folder / "Another"
        file.write_text(f"FROM {image}\nLABEL tandem.check={time.time_ns()}\n")
        run([*self._builder, "-t", image, "-f", str(file), str(self._folder)])
        return str(self.image(image)["Id"])

    def image(self, name: str) -> dict[str, Any]:
        return dict(json.loads(run([self.name, "image", "inspect", name]).stdout)[0])

    def container(self, name: str) -> dict[str, Any]:
        return dict(json.loads(run([self.name, "inspect", name]).stdout)[0])

    def pid(self, name: str) -> int:
        """Of the container's process; 0: it does not run."""
        return int(self.container(name)["State"]["Pid"])

    def kill(self, name: str) -> None:
        """SIGKILL to the process itself, behind the engine's back: its restart policy has to see to it."""
        os.kill(self.pid(name), signal.SIGKILL)

    def stop(self, name: str) -> None:
        """SIGTERM, and as long as an answer may take."""
        run([self.name, "stop", "-t", "60", name])

    def start(self, name: str) -> None:
        run([self.name, "start", name])

    def remove(self, name: str) -> None:
        run([self.name, "rm", name])

    def logs(self, name: str) -> str:
        done = run([self.name, "logs", name], check=False)
        return done.stdout + done.stderr

    def in_image(self, image: str, *command: str) -> str:
        """Output of a command in a container of the image, as strict as the manifests say."""
        strict = ["--rm", "--read-only", "--cap-drop=ALL", "--network=none", "--entrypoint", command[0]]
        return run([self.name, "run", *strict, image, *command[1:]]).stdout


def works(*words: str) -> bool:
    if shutil.which(words[0]) is None:
        return False
    return run(words, check=False, timeout_s=900).returncode == 0
