"""Runs the images, deploy/compose.yaml and the Kubernetes manifests in real containers, stage by stage.

build     every target that this machine can, and what is in them: size, user, compilers, list of packages
stack     compose.yaml with the built-in model, two decode nodes: health, pages, the answers of `tandem up`
kill      each container's process with SIGKILL: the engine starts it again, the proxy knows the new life alone
restart   each container is stopped, ends with status 0, and is started
upgrade   each node goes to a new image while clients stream: every answer as before, no error
kube      the manifests by `podman kube play`, with their probes

Status 0: all that could be run holds. 77: this machine can run nothing of it; the last line says why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import kube
from engine import ROOT, Engine, FailedError, UnavailableError, say
from stack import Load, Stack, answers, answers_of_up, get, questions, wait_until

# As compose.yaml names them.
IMAGES = {"proxy": "tandem-proxy", "node-cpu": "tandem-node:cpu", "node-cuda": "tandem-node:cuda"}
MAX_OVER_BASE_MB = {"proxy": 250, "node-cpu": 1600}
# Triton compiles what calls the driver.
COMPILERS = {"node-cuda": ["cc"]}
STAGES = ("build", "stack", "kill", "restart", "upgrade", "kube")
SKIPPED = 77
LOOK = (
    "import json, shutil; print([name for name in ('c++', 'cc', 'pip') if shutil.which(name)]); "
    "print(json.dumps(json.load(open('/app/sbom.json'))))"
)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    begin_s = time.monotonic()
    say(f"{name}:")
    yield
    say(f"  {name} took {time.monotonic() - begin_s:.0f} s")


def build(engine: Engine, base: str, targets: list[str], options: list[str]) -> None:
    base_mb = engine.image(base)["Size"] / 1e6
    say(f"  base {base}: {base_mb:.0f} MB")
    for target in targets:
        seconds = engine.build(target, IMAGES[target], ["--build-arg", f"BASE={base}", *options])
        image = engine.image(IMAGES[target])
        over_mb = image["Size"] / 1e6 - base_mb
        say(f"  {target}: {over_mb:.0f} MB over the base, built in {seconds:.0f} s")
        if over_mb > MAX_OVER_BASE_MB.get(target, float("inf")):
            raise FailedError(f"{target}: more than {MAX_OVER_BASE_MB[target]} MB over its base")
        if image["Config"]["User"] != "10001" or "org.opencontainers.image.version" not in image["Config"]["Labels"]:
            raise FailedError(f"{target}: runs as {image['Config']['User']!r}, labels {image['Config']['Labels']}")
        found, text = engine.in_image(IMAGES[target], "python", "-c", LOOK).splitlines()
        compilers = COMPILERS.get(target, [])
        if found != str(compilers):
            raise FailedError(f"{target}: has {found}, not {compilers}")
        packages = {each["name"]: each["version"] for each in json.loads(text)["components"]}
        torch = packages.get("torch", "none")
        say(f"  {target}: {len(packages)} packages, torch {torch}, user 10001, compilers {compilers}, no pip")


def start(stack: Stack, engine: Engine, folder: Path) -> list[str]:
    """The answers of the undisturbed stack to :func:`questions`."""
    begin_s = time.monotonic()
    stack.up(decode=2)
    wait_until(lambda: stack.is_ready(3), "a ready stack")
    say(f"  ready after {time.monotonic() - begin_s:.1f} s: proxy, prefill, 2 x decode")
    stack.check_health()
    say("  every HEALTHCHECK passes")
    for path in ("/", "/chat", "/pages/status.js", "/status.json"):
        if get(stack.url + path)[0] != 200:
            raise FailedError(f"{path}: {get(stack.url + path)}")
    for name in stack.all_containers():
        if name in stack.containers("proxy"):
            continue
        log = engine.logs(name)
        if "prebuilt C++ ops for=" not in log:
            raise FailedError(f"{name} does not run the image's compiled ops:\n{log[-2000:]}")
    level = re.findall(r"prebuilt C\+\+ ops for=(\S+)", log)[0]
    say(f"  nodes run the image's compiled ops for {level}")
    found = answers(stack.url, questions(12))
    expected = answers_of_up(questions(12), folder)
    if expected is None:
        say("  skipped: the answers of `tandem up`; there is no .venv (bash deploy/local.sh makes it)")
    elif found != expected:
        raise FailedError(f"the stack answers {found}, `tandem up` {expected}")
    else:
        say(f"  {len(found)} answers are those of `tandem up`")
    return found


def kill(stack: Stack, engine: Engine, expected: list[str]) -> None:
    for name in stack.all_containers():
        pid, epochs = engine.pid(name), stack.epochs()
        engine.kill(name)
        begin_s = time.monotonic()
        wait_until(lambda name=name, pid=pid: engine.pid(name) not in (0, pid), f"{name} to restart")
        num_kept = 3 if name in stack.containers("proxy") else 2
        wait_until(
            lambda epochs=epochs, kept=num_kept: stack.is_ready(3) and len(stack.epochs() & epochs) == kept,
            f"three ready nodes after {name} was killed",
        )
        took_s = time.monotonic() - begin_s
        if answers(stack.url, questions(12)) != expected:
            raise FailedError(f"other answers after {name} was killed")
        say(f"  {name}: started again, 3 nodes ready and none of the old life after {took_s:.1f} s, same answers")


def restart(stack: Stack, engine: Engine, expected: list[str]) -> None:
    for name in stack.all_containers():
        engine.stop(name)
        status = engine.container(name)["State"]["ExitCode"]
        if status != 0:
            raise FailedError(f"{name} ended with status {status}")
        engine.start(name)
        wait_until(lambda: stack.is_ready(3), f"{name} to be ready again")
    if answers(stack.url, questions(12)) != expected:
        raise FailedError("other answers after a restart")
    say("  each container ended with status 0 and came back, same answers")


def upgrade(stack: Stack, engine: Engine, expected: list[str]) -> None:
    old = engine.image(IMAGES["node-cpu"])["Id"]
    new = engine.remake(IMAGES["node-cpu"])
    if new == old:
        raise FailedError("the new image is the old one")
    with Load(stack.url, questions(12), expected) as load:
        time.sleep(5)
        for name in [*stack.containers("decode"), *stack.containers("prefill")]:
            epochs = stack.epochs()
            engine.stop(name)
            engine.remove(name)
            stack.up("decode" if "decode" in name else "prefill", decode=2)
            wait_until(lambda epochs=epochs: len(stack.epochs() & epochs) == 2 and stack.is_ready(3), f"the new {name}")
            say(f"  {name} is new, {load.num_answers} answers so far, {len(load.errors)} errors")
        time.sleep(5)
    for name in [*stack.containers("decode"), *stack.containers("prefill")]:
        if engine.container(name)["Image"].removeprefix("sha256:") != new.removeprefix("sha256:"):
            raise FailedError(f"{name} does not run the new image")
    if load.errors:
        raise FailedError(f"{len(load.errors)} of {load.num_answers} answers: {load.errors[:5]}")
    say(f"  {load.num_answers} streams under the upgrade, each as in the undisturbed run, 0 errors")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="deploy/check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", help="base image (default: the Dockerfile's)")
    parser.add_argument(
        "--debootstrap", metavar="SUITE", help="make the base image of Debian's packages of bookworm, trixie, ...; "
        "without this option it is done when the base image cannot be pulled"
    )  # fmt: skip
    parser.add_argument("--cuda", action="store_true", help="build node-cuda too (gigabytes), which no stage runs")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE", help="only these")
    parser.add_argument(
        "--build-options",
        default=os.environ.get("DEPLOY_CHECK_BUILD_OPTIONS", ""),
        help="more words for the builder, such as '--secret id=pip,src=/etc/pip.conf --network host' "
        "(default: $DEPLOY_CHECK_BUILD_OPTIONS)",
    )
    return parser.parse_args()


def main() -> int:
    given = parse()
    options = shlex.split(given.build_options)
    default_base = re.findall(r"^ARG BASE=(.*)$", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)[0]
    with tempfile.TemporaryDirectory(prefix="tandem-check-") as scratch:
        folder = Path(scratch)
        try:
            engine = Engine(folder)
            base = engine.bring_base(given.base or default_base, given.debootstrap)
            engine.can_run(base)
            if "build" in given.stages:
                engine.can_build(base, options)
        except UnavailableError as exc:
            say(f"skipped: {exc}")
            return SKIPPED
        try:
            run_stages(engine, base, folder, given, options)
        except FailedError as exc:
            say(f"failed: {exc}")
            return 1
    say("passed")
    return 0


def run_stages(engine: Engine, base: str, folder: Path, given: argparse.Namespace, options: list[str]) -> None:
    expected: list[str] | None = None
    if "build" in given.stages:
        with stage("build"):
            build(engine, base, ["proxy", "node-cpu", *(["node-cuda"] if given.cuda else [])], options)
    if {"stack", "kill", "restart", "upgrade"} & set(given.stages):
        stack = Stack(engine, folder, base)
        try:
            with stage("stack"):
                expected = start(stack, engine, folder)
            if "kill" in given.stages:
                with stage("kill"):
                    kill(stack, engine, expected)
            if "restart" in given.stages:
                with stage("restart"):
                    restart(stack, engine, expected)
            if "upgrade" in given.stages:
                with stage("upgrade"):
                    upgrade(stack, engine, expected)
        except FailedError:
            say(stack.logs())
            raise
        finally:
            stack.down()
    if "kube" in given.stages:
        with stage("kube"):
            if (why := kube.missing(engine)) is not None:
                say(f"  skipped: {why}")
                return
            played = kube.Kube(engine, folder, base)
            try:
                played.play()
                played.check(expected)
            finally:
                played.down()


if __name__ == "__main__":
    sys.exit(main())
