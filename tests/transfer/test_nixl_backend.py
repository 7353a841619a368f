"""What is NIXL's alone: loading it, its plugins, and that it keeps quiet."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from common.errors import TransferError
from common.transfer.codes import TransferCode
from common.transfer.nixl import fresh_pages
from common.transfer.nixl.backend import NixlBackend
from common.transfer.nixl.bindings import load_bindings, wheels
from common.transfer.reads import Handle, Read, ReadStatus
from common.transfer.regions import Peer
from tests.support.transfer_memory import BLOCKS, EndpointMemory
from tests.support.transfer_sites import NIXL_PACKAGES, Site, finish


def test_import_when_nothing_is_moved_then_neither_nixl_nor_torch_is_loaded() -> None:
    code = (
        "import sys, json, common.transfer.nixl.backend, common.transfer.puller, common.transfer.testing.inprocess;"
        "print(json.dumps([name for name in ('torch', 'nixl', 'nixl_cu12') if name in sys.modules]))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == []


def test_load_bindings_when_the_first_package_is_absent_then_the_next_one_is_taken() -> None:
    bindings = load_bindings(("no_such_package", *NIXL_PACKAGES))
    assert bindings.__name__ in {f"{package}._bindings" for package in NIXL_PACKAGES}
    assert logging.getLogger("nixl").handlers == []


def test_load_bindings_when_no_package_is_there_then_unavailable_with_the_reasons() -> None:
    with pytest.raises(TransferError, match=r"no_such_package.*nor_this_one") as caught:
        load_bindings(("no_such_package", "nor_this_one"))
    assert caught.value.code == TransferCode.BACKEND_UNAVAILABLE


@pytest.mark.parametrize(
    ("torch_version", "first"),
    [
        ("2.13.0", "nixl_cu13"),
        ("2.13.0+cu130", "nixl_cu13"),
        ("2.13.0+cu126", "nixl_cu12"),
        ("2.13.0+cpu", "nixl_cu13"),
        ("", "nixl_cu13"),
    ],
)
def test_wheels_when_both_are_installed_then_the_one_for_torchs_cuda_is_tried_first(
    torch_version: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wheels(torch_version)[0] == first
    assert set(wheels(torch_version)) == set(NIXL_PACKAGES)
    tried: list[str] = []

    def absent(name: str) -> None:
        tried.append(name)
        raise ImportError(name)

    monkeypatch.setattr(importlib.metadata, "version", lambda name: torch_version)
    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(TransferError, match="nixl_cu13"):
        load_bindings()
    assert tried == ["nixl", *wheels(torch_version)]


def test_backend_when_it_has_a_device_then_each_thread_enters_it_once_before_nixl_is_called_there(
    memory: EndpointMemory,
) -> None:
    entered: list[threading.Thread] = []
    backend = NixlBackend(
        engine_id="reader",
        epoch=1,
        bindings=load_bindings(NIXL_PACKAGES),
        enter_thread=lambda: entered.append(threading.current_thread()),
    )
    try:
        backend.register(list(memory.regions.values()))
        other = NixlBackend(engine_id="holder", epoch=2, bindings=load_bindings(NIXL_PACKAGES))
        other.register(list(memory.regions.values()))
        add = threading.Thread(target=lambda: [backend.add_peer(other.metadata()) for _ in range(2)])
        add.start()
        add.join()
        assert entered == [threading.current_thread(), add]
        other.close()
        end = threading.Thread(target=backend.close)
        end.start()
        end.join()
        assert entered == [threading.current_thread(), add, end]
    finally:
        backend.close()


@pytest.mark.parametrize("backends", [["PIGEON"], []])
def test_backend_when_a_plugin_is_unknown_then_the_flag_is_named(backends: list[str]) -> None:
    with pytest.raises(TransferError, match="--nixl-backends") as caught:
        NixlBackend(engine_id="reader", epoch=1, backends=backends, bindings=load_bindings(NIXL_PACKAGES))
    assert (caught.value.code, caught.value.param) == (TransferCode.BACKEND_UNAVAILABLE, "nixl_backends")


def test_recreate_when_no_agent_starts_then_everything_says_so_until_one_does(memory: EndpointMemory) -> None:
    # The bindings' own module must stay as it is: others use it.
    bindings = types.ModuleType("bindings")
    bindings.__dict__.update(vars(load_bindings(NIXL_PACKAGES)))
    make_agent = bindings.nixlAgent

    def refuse(*_: object) -> None:
        raise RuntimeError("no memory for an agent")

    backend = NixlBackend(engine_id="reader", epoch=1, bindings=bindings)
    backend.register(list(memory.regions.values()))
    try:
        bindings.nixlAgent = refuse
        for call in (backend.recreate, backend.metadata, backend.recreate):
            with pytest.raises(TransferError) as caught:
                call()
            assert caught.value.code == TransferCode.BACKEND_UNAVAILABLE
        bindings.nixlAgent = make_agent
        backend.recreate()
        assert {region["name"] for region in json.loads(backend.metadata())["regions"]} == set(memory.regions)
    finally:
        backend.close()


class FailingAgent:
    """NIXL's agent, whose status of a read is what a test wants."""

    status: ClassVar[type[Exception] | int | None] = None

    def __init__(self, name: str, config: object) -> None:
        self._agent = load_bindings(NIXL_PACKAGES).nixlAgent(name, config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def getXferStatus(self, transfer: int) -> Any:  # noqa: N802 - NIXL's name
        if isinstance(self.status, type):
            raise self.status("by a test")
        return self._agent.getXferStatus(transfer) if self.status is None else self.status


@pytest.fixture
def failing(memory: EndpointMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NixlBackend, Handle]]:
    """A read from a frozen holder."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    bindings = types.ModuleType("bindings")
    bindings.__dict__.update(vars(load_bindings(NIXL_PACKAGES)))
    monkeypatch.setattr(bindings, "nixlAgent", FailingAgent)
    monkeypatch.setattr(FailingAgent, "status", None)
    site = Site("nixl")
    holder = site.holder()
    backend = NixlBackend(engine_id="reader", epoch=1, bindings=bindings)
    backend.register(list(memory.regions.values()))
    peer = backend.add_peer(holder.metadata)
    assert finish(backend, backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 1)])])) is ReadStatus.DONE
    holder.freeze()
    handle = backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(2, 2)])])
    assert backend.poll(handle) is ReadStatus.IN_PROGRESS
    yield backend, handle
    backend.close()
    site.close()


@pytest.mark.parametrize(
    "error",
    [
        *("nixlBackendError", 99),
        *(pytest.param(n, marks=pytest.mark.full) for n in ("nixlCancelledError", "nixlUnknownError", "MemoryError")),
    ],
)
def test_poll_when_a_read_failed_and_its_connection_did_not_then_it_goes_on_until_the_agent_is_gone(
    failing: tuple[NixlBackend, Handle], error: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was posted before the error may still arrive."""
    backend, handle = failing
    nixl = load_bindings(NIXL_PACKAGES)
    status = getattr(nixl, error, MemoryError) if isinstance(error, str) else error
    monkeypatch.setattr(FailingAgent, "status", status)
    for _ in range(2):
        assert backend.poll(handle) is ReadStatus.IN_PROGRESS
    assert handle.error is not None
    assert str(error) in handle.error.message
    with pytest.raises(TransferError) as caught:
        backend.release(handle)
    assert caught.value.code == TransferCode.HANDLE_ACTIVE
    backend.recreate()
    assert backend.poll(handle) is ReadStatus.FAILED


@pytest.mark.parametrize("error", ["nixlRemoteDisconnectError", "nixlNotFoundError"])
def test_poll_when_the_connection_of_a_read_failed_then_it_is_over(
    failing: tuple[NixlBackend, Handle], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, handle = failing
    monkeypatch.setattr(FailingAgent, "status", getattr(load_bindings(NIXL_PACKAGES), error))
    assert backend.poll(handle) is ReadStatus.FAILED
    assert handle.error is not None
    assert handle.error.code == TransferCode.PEER_DISCONNECTED


def test_add_peer_when_the_blob_is_not_nixls_then_refused(memory: EndpointMemory) -> None:
    site = Site("nixl")
    try:
        backend = site.backend(memory)
        good = json.loads(site.backend(EndpointMemory(epoch=2, seed=2), engine_id="holder").metadata())
        for blob, code in (("?", TransferCode.BAD_METADATA), ("aGVsbG8=", TransferCode.TRANSFER_FAILED)):
            with pytest.raises(TransferError) as caught:
                backend.add_peer(json.dumps({**good, "agent": blob}).encode())
            assert caught.value.code == code
        with pytest.raises(TransferError, match="announces the name") as caught:
            backend.add_peer(json.dumps({**good, "name": "somebody else"}).encode())
        assert caught.value.code == TransferCode.BAD_METADATA
        peer = backend.add_peer(json.dumps(good).encode())
        assert isinstance(peer, Peer)
        assert finish(backend, backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 2)])])) is ReadStatus.DONE
    finally:
        site.close()


def test_post_read_when_its_destination_is_fresh_then_touched_before_anything_is_copied(
    memory: EndpointMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, old = memory.regions[BLOCKS], memory.read(BLOCKS, 3)
    touched: list[tuple[int, int, bytes]] = []
    monkeypatch.setattr(
        fresh_pages, "_populate", lambda begin, end: touched.append((begin, end, memory.read(BLOCKS, 3)))
    )
    site = Site("nixl")
    try:
        backend = site.backend(memory)
        peer = backend.add_peer(site.backend(EndpointMemory(epoch=2, seed=2), engine_id="holder").metadata())
        for _ in range(2):
            assert finish(backend, backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(3, 2)])])) is ReadStatus.DONE
        [(begin, end, content)] = touched
        assert begin <= region.address + 3 * region.unit_bytes < region.address + 4 * region.unit_bytes <= end
        assert content == old != memory.read(BLOCKS, 3)
    finally:
        site.close()
