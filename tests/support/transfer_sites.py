"""One process's view of a transfer: a puller's backend here, holders elsewhere, over either transport.

An in-process holder is another backend of the same hub; a NIXL holder is a process of its own, told what to do through
a pipe. Both answer to the same few verbs, so that one suite says what every backend has to do.
"""

from __future__ import annotations

import abc
import gc
import json
import signal
import subprocess
import sys
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.transfer.backend import TransferBackend
from common.transfer.nixl.backend import NixlBackend
from common.transfer.nixl.bindings import load_bindings
from common.transfer.reads import Handle, ReadStatus
from common.transfer.regions import PoolLayout
from common.transfer.testing.faulty import FaultyBackend
from common.transfer.testing.inprocess import InProcessAgent, InProcessBackend, InProcessHub
from tests.support.transfer_memory import EndpointMemory

# The package without the meta package in front: importing the latter imports torch.
NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13")
PATIENCE_S = 30.0


class Holder(abc.ABC):
    """Memory that others read. ``pattern`` is what it was filled with."""

    metadata: bytes

    def __init__(self, engine_id: str, sizes: dict[str, int]) -> None:
        self.engine_id = engine_id
        self.epoch = sizes["epoch"]
        self.seed = sizes["seed"]
        # A unit's pattern depends on its size alone, not on how many there are.
        self._reference = EndpointMemory(**{**sizes, "num_blocks": 1, "num_slots": 1})

    def pattern(self, region: str, unit: int) -> bytes:
        return self._reference.pattern(self.seed, region, unit)

    @abc.abstractmethod
    def write(self, region: str, unit: int, data: bytes) -> None: ...

    @abc.abstractmethod
    def set_generation(self, region: str, unit: int, value: int, tag: int | None = None) -> None: ...

    @abc.abstractmethod
    def recreate(self) -> None:
        """Its agent is made again; ``metadata`` is the new one's."""

    @abc.abstractmethod
    def freeze(self) -> None: ...

    @abc.abstractmethod
    def thaw(self) -> None: ...

    @abc.abstractmethod
    def kill(self) -> None: ...


class InProcessHolder(Holder):
    def __init__(self, hub: InProcessHub, engine_id: str, fingerprint: str, sizes: dict[str, int]) -> None:
        super().__init__(engine_id, sizes)
        self._hub = hub
        self._memory = EndpointMemory(**sizes)
        self._backend = InProcessBackend(hub, engine_id=engine_id, epoch=self.epoch, fingerprint=fingerprint)
        self._backend.register(list(self._memory.regions.values()))
        self.metadata = self._backend.metadata()

    def write(self, region: str, unit: int, data: bytes) -> None:
        self._memory.write(region, unit, data)

    def set_generation(self, region: str, unit: int, value: int, tag: int | None = None) -> None:
        self._memory.set_generation(region, unit, value, tag)

    def recreate(self) -> None:
        self._backend.recreate()
        self.metadata = self._backend.metadata()

    def freeze(self) -> None:
        self._hub.freeze(self._backend.name)

    def thaw(self) -> None:
        self._hub.thaw(self._backend.name)

    def kill(self) -> None:
        self._backend.close()


class ProcessHolder(Holder):
    def __init__(self, engine_id: str, fingerprint: str, sizes: dict[str, int], device: str = "cpu") -> None:
        super().__init__(engine_id, sizes)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.transfer_holder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        config = {"engine_id": engine_id, "fingerprint": fingerprint, "memory": sizes, "device": device}
        self.metadata = self._ask(config).encode()

    def _ask(self, command: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, str)
        return answer

    def write(self, region: str, unit: int, data: bytes) -> None:
        self._ask({"do": "write", "region": region, "unit": unit, "data": data.hex()})

    def set_generation(self, region: str, unit: int, value: int, tag: int | None = None) -> None:
        self._ask({"do": "set_generation", "region": region, "unit": unit, "value": value, "tag": tag})

    def recreate(self) -> None:
        self.metadata = self._ask({"do": "recreate"}).encode()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        assert wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def exit_code_after_waking(self, settle_s: float) -> int | None:
        """After ``thaw``: None once the process has answered and ``settle_s`` have passed, else what it ended with."""
        try:
            self._ask({"do": "nothing"})
        except (BrokenPipeError, json.JSONDecodeError):
            return self._process.wait(PATIENCE_S)
        time.sleep(settle_s)
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Site:
    """Makes backends and holders of one transport, and ends them all."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._hub = InProcessHub()
        self._holders: list[Holder] = []
        self._backends: list[TransferBackend] = []
        self._nixl_agents: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
        self._bindings: Any = None

    def agent(self, name: str) -> object | None:
        """The transport's agent of this name (``PeerMetadata.name``); None once it has ended. Whoever keeps it keeps it
        alive."""
        if self.kind == "nixl":
            return self._nixl_agents.get(name)
        found = [each for each in gc.get_objects() if type(each) is InProcessAgent and each.name == name]
        return found[0] if found else None

    def bindings(self) -> Any:
        """NIXL's, which also write down the agents that are made with them; the module itself stays as it is."""
        if self._bindings is None:
            original = load_bindings(NIXL_PACKAGES)
            self._bindings = types.ModuleType("bindings")
            self._bindings.__dict__.update(vars(original))

            def make_agent(name: str, config: object) -> object:
                agent = self._nixl_agents[name] = original.nixlAgent(name, config)
                return agent

            self._bindings.nixlAgent = make_agent
        return self._bindings

    def holder(self, *, engine_id: str = "holder", epoch: int = 77, seed: int = 2, **options: Any) -> Holder:
        fingerprint, device = options.pop("fingerprint", ""), options.pop("device", "cpu")
        sizes = {"epoch": epoch, "seed": seed, **options}
        holder: Holder = (
            ProcessHolder(engine_id, fingerprint, sizes, device)
            if self.kind == "nixl"
            else InProcessHolder(self._hub, engine_id, fingerprint, sizes)
        )
        self._holders.append(holder)
        return holder

    def backend(
        self,
        memory: EndpointMemory,
        *,
        engine_id: str = "reader",
        fingerprint: str = "",
        layout: PoolLayout | None = None,
    ) -> TransferBackend:
        backend: TransferBackend = (
            NixlBackend(
                engine_id=engine_id,
                epoch=memory.epoch,
                fingerprint=fingerprint,
                layout=layout,
                bindings=self.bindings(),
                enter_thread=memory.enter_thread,
            )
            if self.kind == "nixl"
            else InProcessBackend(
                self._hub, engine_id=engine_id, epoch=memory.epoch, fingerprint=fingerprint, layout=layout
            )
        )
        if self.kind == "faulty":
            backend = FaultyBackend(backend)
        self._backends.append(backend)
        backend.register(list(memory.regions.values()))
        return backend

    def close(self) -> None:
        for backend in self._backends:
            backend.close()
        for holder in self._holders:
            holder.kill()


def wait_for(condition: Callable[[], bool]) -> bool:
    """Poll until true; False after a time that only a hang can take."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.0005)
    return True


def finish(backend: TransferBackend, handle: Handle) -> ReadStatus:
    """Poll a read to its terminal status and release it."""
    assert wait_for(lambda: backend.poll(handle).is_terminal), "the read hangs"
    backend.release(handle)
    return handle.status
