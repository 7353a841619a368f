"""What every transfer backend has to do; see the docstrings of common/transfer/backend.py."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from common.errors import LayoutMismatchError, TransferError
from common.transfer.backend import TransferBackend
from common.transfer.codes import TransferCode
from common.transfer.reads import Handle, Piece, Read, ReadStatus, merge_runs
from common.transfer.regions import Region
from tests.support.transfer_memory import BLOCK_GENERATIONS, BLOCKS, SLOTS, EndpointMemory
from tests.support.transfer_sites import Holder, Site, finish


def test_merge_runs_when_one_begins_where_another_ends_on_both_sides_then_one_run() -> None:
    runs = [(70, 30, 10), (50, 10, 12), (62, 22, 8), (90, 40, 10), (204, 304, 1), (190, 290, 14), (20, 305, 10)]
    expected = [[50, 10, 30], [90, 40, 10], [190, 290, 15], [20, 305, 10]]
    assert merge_runs(np.array(runs)).tolist() == expected
    assert merge_runs(np.empty((0, 3), dtype=np.int64)).tolist() == []


def test_read_when_done_then_exactly_the_named_units_hold_the_peers_bytes(site: Site, memory: EndpointMemory) -> None:
    holder = site.holder()
    backend = site.backend(memory)
    peer = backend.add_peer(holder.metadata)
    pairs = [(1, 10), (2, 11), (3, 5), (9, 63), (63, 1)]

    handle = backend.post_read(peer, [Read(BLOCKS, BLOCKS, pairs), Read(SLOTS, SLOTS, [(7, 2)])])

    assert finish(backend, handle) is ReadStatus.DONE
    assert handle.num_descriptors == 5
    assert handle.num_bytes == 5 * 4096 + 16384
    sources = dict(pairs)
    for unit in range(1, 64):
        expected = holder.pattern(BLOCKS, sources[unit]) if unit in sources else memory.pattern(1, BLOCKS, unit)
        assert memory.read(BLOCKS, unit) == expected, unit
    assert memory.read(BLOCKS, 0) == bytes(4096)
    assert memory.read(SLOTS, 7) == holder.pattern(SLOTS, 2)
    assert memory.read(SLOTS, 6) == memory.pattern(1, SLOTS, 6)


def test_read_when_nothing_is_named_then_done(site: Site, memory: EndpointMemory) -> None:
    holder = site.holder()
    backend = site.backend(memory)
    handle = backend.post_read(backend.add_peer(holder.metadata), [Read(BLOCKS, BLOCKS, [])])
    assert finish(backend, handle) is ReadStatus.DONE
    assert handle.num_descriptors == 0


def test_read_when_it_names_pieces_then_exactly_those_bytes_of_each_unit_are_copied(
    site: Site, memory: EndpointMemory
) -> None:
    """Between units of two sizes, as those of ranks are; what goes on from each other is one descriptor."""
    holder = site.holder()
    backend = site.backend(memory)
    peer = backend.add_peer(holder.metadata)
    sources = {3: 1, 4: 2, 9: 5}
    pieces = [Piece(2048, 0, 100), Piece(1024, 9216, 512), Piece(0, 8192, 1024), Piece(4000, 16300, 84)]

    handle = backend.post_read(peer, [Read(BLOCKS, SLOTS, list(sources.items()), pieces)])

    assert finish(backend, handle) is ReadStatus.DONE
    assert (handle.num_bytes, handle.num_descriptors) == (3 * 1720, 3 * 3)
    for unit in range(1, 64):
        expected = bytearray(memory.pattern(1, BLOCKS, unit))
        for piece in pieces if unit in sources else ():
            there = holder.pattern(SLOTS, sources[unit])[piece.remote_offset :][: piece.length]
            expected[piece.local_offset : piece.local_offset + piece.length] = there
        assert memory.read(BLOCKS, unit) == expected, unit


def test_read_when_pieces_are_a_whole_unit_then_it_is_the_read_without_them(site: Site, memory: EndpointMemory) -> None:
    holder = site.holder()
    backend = site.backend(memory)
    pieces = [Piece(3000, 3000, 1096), Piece(0, 0, 3000)]
    read = Read(BLOCKS, BLOCKS, [(1, 10), (2, 11), (3, 5)], pieces)
    handle = backend.post_read(backend.add_peer(holder.metadata), [read])
    assert finish(backend, handle) is ReadStatus.DONE
    assert (handle.num_bytes, handle.num_descriptors) == (3 * 4096, 2)
    for local, remote in read.pairs:
        assert memory.read(BLOCKS, local) == holder.pattern(BLOCKS, remote)


WRONG_READS = (
    (
        Read(BLOCKS, SLOTS, [(1, 1)], [Piece(0, 16380, 5)]),
        TransferCode.UNIT_OUT_OF_RANGE,
        "5 bytes at 16380 of a remote",
    ),
    (Read(BLOCKS, SLOTS, [(1, 1)], [Piece(4090, 0, 7)]), TransferCode.UNIT_OUT_OF_RANGE, "7 bytes at 4090 of a local"),
    (Read(BLOCKS, BLOCKS, [(1, 1)], [Piece(-1, 0, 7)]), TransferCode.UNIT_OUT_OF_RANGE, "at -1 of a local unit"),
    (Read(BLOCKS, BLOCKS, [(1, 1)], [Piece(0, -1, 7)]), TransferCode.UNIT_OUT_OF_RANGE, "at -1 of a remote unit"),
    (Read(BLOCKS, BLOCKS, [(1, 1)], [Piece(0, 0, 0)]), TransferCode.UNIT_OUT_OF_RANGE, "0 bytes at 0"),
    (
        Read(BLOCKS, BLOCKS, [(1, 1)], [Piece(8, 100, 8), Piece(0, 0, 9)]),
        TransferCode.UNIT_OUT_OF_RANGE,
        "byte 8 of a unit is the destination of two",
    ),
    (Read(BLOCKS, BLOCKS, [(1, 1), (64, 2)]), TransferCode.UNIT_OUT_OF_RANGE, "local unit 64"),
    (Read(BLOCKS, BLOCKS, [(1, 1), (2, 64)]), TransferCode.UNIT_OUT_OF_RANGE, "remote unit 64"),
    (Read(BLOCKS, BLOCKS, [(1, 1), (2, -1)]), TransferCode.UNIT_OUT_OF_RANGE, "remote unit -1"),
    (Read(BLOCKS, BLOCKS, [(1, 1), (2, 1 << 70)]), TransferCode.UNIT_OUT_OF_RANGE, "unit numbers"),
    (Read(BLOCKS, BLOCKS, [(1, 1), (0, 2)]), TransferCode.UNIT_OUT_OF_RANGE, "local unit 0"),
    (Read(BLOCKS, BLOCKS, [(1, 1), (1, 2)]), TransferCode.UNIT_OUT_OF_RANGE, "two remote units"),
    (Read("pages", BLOCKS, [(1, 1)]), TransferCode.UNKNOWN_REGION, "pages"),
    (Read(BLOCKS, "pages", [(1, 1)]), TransferCode.UNKNOWN_REGION, "pages"),
    (Read(BLOCKS, SLOTS, [(1, 1)]), TransferCode.REGION_MISMATCH, "16384 bytes per unit.*has 4096"),
)


def test_post_read_when_a_name_or_id_is_wrong_then_nothing_is_posted(site: Site, memory: EndpointMemory) -> None:
    holder = site.holder()
    backend = site.backend(memory)
    peer = backend.add_peer(holder.metadata)

    for read, code, named in WRONG_READS:
        with pytest.raises(TransferError, match=named) as caught:
            backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(5, 5)]), read])
        assert caught.value.code == code

    # A read that is really posted completes; what the refused ones named is still as it was.
    assert finish(backend, backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(9, 9)])])) is ReadStatus.DONE
    for unit in (1, 2, 5):
        assert memory.read(BLOCKS, unit) == memory.pattern(1, BLOCKS, unit)


def test_add_peer_when_unit_bytes_differ_then_refused_with_both_values(site: Site, memory: EndpointMemory) -> None:
    holder = site.holder(block_bytes=8192)
    backend = site.backend(memory)
    with pytest.raises(TransferError, match=r"(?s)8192.*4096") as caught:
        backend.add_peer(holder.metadata)
    assert caught.value.code == TransferCode.REGION_MISMATCH


def test_add_peer_when_the_fingerprint_differs_then_refused_with_both_values(
    site: Site, memory: EndpointMemory
) -> None:
    holder = site.holder(fingerprint="layout-b")
    backend = site.backend(memory, fingerprint="layout-a")
    with pytest.raises(TransferError, match=r"layout-b.*layout-a") as caught:
        backend.add_peer(holder.metadata)
    assert caught.value.code == TransferCode.FINGERPRINT_MISMATCH


class BlockLayout:
    """``PoolLayout`` of one number; a peer of another ``scale`` has blocks so many times as large."""

    def __init__(self, block_size: int = 4, scale: int = 1) -> None:
        self.document = {"block_size": block_size, "scale": scale}

    def check(self, document: Mapping[str, Any] | None) -> Mapping[str, int]:
        theirs = {"block_size": 4, "scale": 1} if document is None else document
        if theirs["block_size"] != self.document["block_size"]:
            raise LayoutMismatchError(f"block_size is {theirs['block_size']}, not {self.document['block_size']}")
        return {BLOCKS: 4096 * theirs["scale"], SLOTS: 16384}

    def num_ranks(self, document: Mapping[str, Any] | None) -> int:
        return 1


def test_add_peer_when_its_layout_differs_then_refused_before_anything_else_and_nothing_can_be_read(
    site: Site, memory: EndpointMemory
) -> None:
    holder = site.holder(fingerprint="layout-b", block_bytes=8192)
    backend = site.backend(memory, fingerprint="layout-a", layout=BlockLayout())
    own = json.loads(backend.metadata())
    assert own["layout"] == {"block_size": 4, "scale": 1}
    known = backend.add_peer(site.holder(engine_id="known", fingerprint="layout-a").metadata)
    document = {**json.loads(holder.metadata), "layout": {"block_size": 8, "scale": 1}}
    with pytest.raises(TransferError, match="peer holder: block_size is 8, not 4") as caught:
        backend.add_peer(json.dumps(document).encode())
    assert caught.value.code == TransferCode.LAYOUT_MISMATCH
    refused = replace(known, name=document["name"], engine_id="holder")
    with pytest.raises(TransferError) as caught:
        backend.post_read(refused, [Read(BLOCKS, BLOCKS, [(1, 1)])])
    assert caught.value.code == TransferCode.UNKNOWN_PEER
    assert memory.read(BLOCKS, 1) == memory.pattern(1, BLOCKS, 1)
    assert finish(backend, backend.post_read(known, [Read(BLOCKS, BLOCKS, [(1, 4)])])) is ReadStatus.DONE
    # Alike in all fields, and another model: that is what the fingerprint is for.
    document["layout"] = own["layout"]
    with pytest.raises(TransferError, match=r"layout-b.*layout-a") as caught:
        backend.add_peer(json.dumps(document).encode())
    assert caught.value.code == TransferCode.FINGERPRINT_MISMATCH
    document["layout"] = [7]
    with pytest.raises(TransferError, match="layout must be dict, got list") as caught:
        backend.add_peer(json.dumps(document).encode())
    assert caught.value.code == TransferCode.BAD_METADATA


def test_add_peer_when_its_layout_says_how_large_its_units_are_then_they_are_that_large_or_refused(
    site: Site, memory: EndpointMemory
) -> None:
    document = json.loads(site.holder(block_bytes=8192).metadata)
    backend = site.backend(memory, layout=BlockLayout())
    peer = backend.add_peer(json.dumps({**document, "layout": {"block_size": 4, "scale": 2}}).encode())
    handle = backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 1)], [Piece(0, 4096, 4096)])])
    assert finish(backend, handle) is ReadStatus.DONE
    with pytest.raises(TransferError, match=r"8192 bytes per unit.*has 4096") as caught:
        backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 1)])])
    assert caught.value.code == TransferCode.REGION_MISMATCH
    with pytest.raises(TransferError, match="8192 bytes per unit, its layout 4096") as caught:
        backend.add_peer(json.dumps({**document, "layout": {"block_size": 4, "scale": 1}}).encode())
    assert caught.value.code == TransferCode.REGION_MISMATCH


@pytest.mark.parametrize("is_reader_new", [True, False])
def test_add_peer_when_one_side_is_of_before_layouts_were_announced_then_its_fingerprint_is_enough(
    site: Site, memory: EndpointMemory, is_reader_new: bool
) -> None:
    """A rolling upgrade: the announcement keeps its version, of which a layout is one field more."""
    holder = site.holder()
    document = json.loads(holder.metadata)
    assert "layout" not in document
    if not is_reader_new:
        document["layout"] = BlockLayout().document
    assert document["version"] == 2
    backend = site.backend(memory, layout=BlockLayout() if is_reader_new else None)
    peer = backend.add_peer(json.dumps(document).encode())
    assert finish(backend, backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 4)])])) is ReadStatus.DONE
    assert memory.read(BLOCKS, 1) == holder.pattern(BLOCKS, 4)
    with pytest.raises(TransferError) as caught:
        backend.add_peer(json.dumps({**document, "fingerprint": "another"}).encode())
    assert caught.value.code == TransferCode.FINGERPRINT_MISMATCH


def test_add_peer_when_the_announcement_is_damaged_then_refused(site: Site, memory: EndpointMemory) -> None:
    good = json.loads(site.holder().metadata)
    backend = site.backend(memory)

    def code_of(document: object) -> str:
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        with pytest.raises(TransferError) as caught:
            backend.add_peer(data)
        return caught.value.code

    short = [{**good["regions"][0], "num_bytes": good["regions"][0]["num_bytes"] - 1}, *good["regions"][1:]]
    assert code_of({**good, "regions": short}) == TransferCode.REGION_MISMATCH
    assert code_of({**good, "regions": good["regions"] * 2}) == TransferCode.REGION_MISMATCH
    assert code_of({**good, "version": 99}) == TransferCode.BAD_METADATA
    assert code_of({**good, "backend": "carrier_pigeon"}) == TransferCode.BAD_METADATA
    assert code_of({**good, "epoch": "1"}) == TransferCode.BAD_METADATA
    assert code_of({**good, "regions": [7]}) == TransferCode.BAD_METADATA
    assert code_of([]) == TransferCode.BAD_METADATA
    assert code_of(b"\x80\x04pickle") == TransferCode.BAD_METADATA


def test_metadata_when_scratch_is_registered_then_it_is_not_announced(site: Site, memory: EndpointMemory) -> None:
    backend = site.backend(memory)
    scratch = memory.regions[BLOCK_GENERATIONS]
    backend.register(
        [Region("scratch", scratch.address, scratch.num_units, scratch.unit_bytes, exported=False, owner=memory)]
    )
    document = json.loads(backend.metadata())
    assert {region["name"] for region in document["regions"]} == set(memory.regions)
    assert "scratch" in backend.regions


def test_register_when_a_name_is_taken_or_the_device_unknown_then_refused(site: Site, memory: EndpointMemory) -> None:
    backend = site.backend(memory)
    address = memory.regions[BLOCKS].address
    for region in (Region(BLOCKS, address, 4, 4096), Region("other", address, 4, 4096, device="abacus:0")):
        with pytest.raises(TransferError) as caught:
            backend.register([region])
        assert caught.value.code == TransferCode.REGISTRATION_FAILED
    assert set(backend.regions) == set(memory.regions)


def test_peer_when_its_pools_are_of_another_kind_of_memory_then_refused_by_name_and_others_are_read(
    site: Site, memory: EndpointMemory
) -> None:
    holder = site.holder()
    backend = site.backend(memory)
    document = json.loads(holder.metadata)
    for region in document["regions"]:
        region["device"] = "cuda:1" if region["name"] == SLOTS else "cpu"
    with pytest.raises(TransferError, match=r"'slots' of peer .* on cuda:1, local region 'slots' on cpu") as caught:
        backend.add_peer(json.dumps(document).encode())
    assert caught.value.code == TransferCode.REGION_MISMATCH
    peer = backend.add_peer(holder.metadata)
    assert finish(backend, backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 4)])])) is ReadStatus.DONE


def test_peer_when_removed_then_refused_until_added_again(site: Site, memory: EndpointMemory) -> None:
    holder = site.holder()
    backend = site.backend(memory)
    peer = backend.add_peer(holder.metadata)
    assert backend.add_peer(holder.metadata) == peer

    backend.remove_peer(peer)
    with pytest.raises(TransferError) as caught:
        backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 1)])])
    assert caught.value.code == TransferCode.UNKNOWN_PEER

    peer = backend.add_peer(holder.metadata)
    assert finish(backend, backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 4)])])) is ReadStatus.DONE
    assert memory.read(BLOCKS, 1) == holder.pattern(BLOCKS, 4)


def test_peer_when_killed_and_restarted_then_reads_fail_until_the_new_life_is_added(
    site: Site, memory: EndpointMemory
) -> None:
    holder = site.holder(epoch=1, seed=2)
    backend = site.backend(memory)
    old = backend.add_peer(holder.metadata)
    assert finish(backend, backend.post_read(old, [Read(BLOCKS, BLOCKS, [(1, 1)])])) is ReadStatus.DONE
    holder.kill()

    handle = backend.post_read(old, [Read(BLOCKS, BLOCKS, [(2, 2)])])
    assert finish(backend, handle) is ReadStatus.FAILED
    assert handle.error is not None
    assert handle.error.code == TransferCode.PEER_DISCONNECTED
    with pytest.raises(TransferError) as caught:
        backend.post_read(old, [Read(BLOCKS, BLOCKS, [(2, 2)])])
    assert caught.value.code == TransferCode.PEER_DISCONNECTED

    restarted = site.holder(epoch=2, seed=3)
    new = backend.add_peer(restarted.metadata)
    assert (new.engine_id, new.epoch, old.epoch) == (old.engine_id, 2, 1)
    assert finish(backend, backend.post_read(new, [Read(BLOCKS, BLOCKS, [(2, 2)])])) is ReadStatus.DONE
    assert memory.read(BLOCKS, 2) == restarted.pattern(BLOCKS, 2) != holder.pattern(BLOCKS, 2)
    with pytest.raises(TransferError) as caught:
        backend.post_read(old, [Read(BLOCKS, BLOCKS, [(3, 3)])])
    assert caught.value.code == TransferCode.UNKNOWN_PEER


def test_release_when_the_holder_is_frozen_then_refused_until_it_wakes(
    freezable_site: Site, memory: EndpointMemory
) -> None:
    holder = freezable_site.holder()
    backend = freezable_site.backend(memory)
    peer = backend.add_peer(holder.metadata)
    assert finish(backend, backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 1)])])) is ReadStatus.DONE

    holder.freeze()
    handle = backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(2, 2)])])
    assert not backend.poll(handle).is_terminal
    with pytest.raises(TransferError) as caught:
        backend.release(handle)
    assert caught.value.code == TransferCode.HANDLE_ACTIVE
    backend.remove_peer(peer)  # proves nothing about the read
    assert not backend.poll(handle).is_terminal

    holder.thaw()
    assert finish(backend, handle) is ReadStatus.DONE
    assert memory.read(BLOCKS, 2) == holder.pattern(BLOCKS, 2)
    backend.release(handle)


def test_close_when_a_read_is_in_flight_then_its_destination_is_never_written(
    freezable_site: Site, memory: EndpointMemory
) -> None:
    holder = freezable_site.holder()
    backend = freezable_site.backend(memory)
    peer = backend.add_peer(holder.metadata)
    assert finish(backend, backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 1)])])) is ReadStatus.DONE
    holder.freeze()
    handle = backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(unit, unit) for unit in range(2, 64, 2)])])
    assert not backend.poll(handle).is_terminal

    backend.close()
    holder.thaw()

    # Once the woken holder has answered (or dropped) another reader, what it still had to send to the first has left.
    other = freezable_site.backend(EndpointMemory(epoch=6, seed=4), engine_id="other")
    with contextlib.suppress(TransferError):
        finish(other, other.post_read(other.add_peer(holder.metadata), [Read(BLOCKS, BLOCKS, [(1, 1)])]))
    for unit in range(2, 64):
        assert memory.read(BLOCKS, unit) == memory.pattern(1, BLOCKS, unit)


def test_recreate_when_a_read_is_in_flight_then_it_failed_and_its_destination_is_never_written(
    freezable_site: Site, memory: EndpointMemory
) -> None:
    holder = freezable_site.holder()
    witness = freezable_site.holder(engine_id="witness", epoch=78, seed=3)
    backend = freezable_site.backend(memory)
    peer = backend.add_peer(holder.metadata)
    assert finish(backend, backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 1)])])) is ReadStatus.DONE
    announced = backend.metadata()
    holder.freeze()
    handle = backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(unit, unit) for unit in range(2, 64, 2)])])
    assert not backend.poll(handle).is_terminal

    backend.recreate()

    assert backend.poll(handle) is ReadStatus.FAILED
    assert handle.error is not None
    assert handle.error.code == TransferCode.AGENT_RECREATED
    backend.release(handle)
    with pytest.raises(TransferError) as caught:
        backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 1)])])
    assert caught.value.code == TransferCode.UNKNOWN_PEER
    old, new = json.loads(announced), json.loads(backend.metadata())
    assert (new["engine_id"], new["epoch"], new["regions"]) == (old["engine_id"], old["epoch"], old["regions"])
    assert new["name"] != old["name"]

    holder.thaw()
    # The new agent reads from a peer that was never frozen, into memory that was registered before.
    again = backend.add_peer(witness.metadata)
    assert finish(backend, backend.post_read(again, [Read(BLOCKS, BLOCKS, [(3, 3)])])) is ReadStatus.DONE
    assert memory.read(BLOCKS, 3) == witness.pattern(BLOCKS, 3)
    for unit in range(2, 64, 2):
        assert memory.read(BLOCKS, unit) == memory.pattern(1, BLOCKS, unit)


@dataclass
class Hung:
    """A reader with a read that hangs, after an earlier one that failed, whose error somebody keeps."""

    backend: TransferBackend
    memory: EndpointMemory
    holder: Holder
    handle: Handle
    kept: list[object]

    UNITS = range(2, 64, 2)

    def is_untouched(self) -> bool:
        return all(self.memory.read(BLOCKS, unit) == self.memory.pattern(1, BLOCKS, unit) for unit in self.UNITS)

    @property
    def agent_name(self) -> str:
        name = json.loads(self.backend.metadata())["name"]
        assert isinstance(name, str)
        return name


@pytest.fixture
def hung(freezable_site: Site, memory: EndpointMemory) -> Iterator[Hung]:
    """The pair that a broken network makes. Nothing may depend on when garbage is collected."""
    gc.disable()
    holder, dying = freezable_site.holder(), freezable_site.holder(engine_id="dying", epoch=79, seed=4)
    backend = freezable_site.backend(memory)
    peer, lost = backend.add_peer(holder.metadata), backend.add_peer(dying.metadata)
    for each in (peer, lost):
        assert finish(backend, backend.post_read(each, [Read(BLOCKS, BLOCKS, [(1, 1)])])) is ReadStatus.DONE
    dying.kill()
    failed = backend.post_read(lost, [Read(BLOCKS, BLOCKS, [(1, 2)])])
    assert finish(backend, failed) is ReadStatus.FAILED
    kept: list[object] = [failed]
    for call in (lambda: backend.post_read(lost, [Read(BLOCKS, BLOCKS, [(1, 2)])]), lambda: backend.add_peer(b"{}")):
        with pytest.raises(TransferError) as caught:
            call()
        kept.append(caught.value)
    holder.freeze()
    handle = backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(unit, unit) for unit in Hung.UNITS])])
    assert not backend.poll(handle).is_terminal
    yield Hung(backend, memory, holder, handle, kept)
    gc.enable()


def test_recreate_when_an_earlier_error_is_kept_then_the_old_agent_is_dead_before_the_hung_read_counts_as_ended(
    freezable_site: Site, hung: Hung
) -> None:
    name = hung.agent_name
    assert freezable_site.agent(name) is not None
    hung.backend.recreate()
    assert freezable_site.agent(name) is None
    assert hung.backend.poll(hung.handle) is ReadStatus.FAILED
    assert hung.handle.error is not None
    assert hung.handle.error.code == TransferCode.AGENT_RECREATED
    assert len(hung.kept) == 3
    hung.holder.thaw()
    assert hung.is_untouched()


def test_recreate_when_the_old_agent_is_held_then_refused_and_the_hung_read_has_not_ended(
    freezable_site: Site, hung: Hung
) -> None:
    name, announced = hung.agent_name, hung.backend.metadata()
    keeper = [freezable_site.agent(name)]
    for call in (hung.backend.recreate, hung.backend.close):
        with pytest.raises(TransferError, match="list") as caught:
            call()
        assert caught.value.code == TransferCode.AGENT_ALIVE
        assert hung.backend.poll(hung.handle) is ReadStatus.IN_PROGRESS
        with pytest.raises(TransferError) as caught:
            hung.backend.release(hung.handle)
        assert caught.value.code == TransferCode.HANDLE_ACTIVE
    # Everything is as before: the same agent, which reads from its peers.
    assert hung.backend.metadata() == announced
    witness = freezable_site.holder(engine_id="witness", epoch=78, seed=3)
    peer = hung.backend.add_peer(witness.metadata)
    assert finish(hung.backend, hung.backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(3, 3)])])) is ReadStatus.DONE

    keeper.clear()
    hung.backend.recreate()
    assert freezable_site.agent(name) is None
    assert hung.backend.poll(hung.handle) is ReadStatus.FAILED
    hung.holder.thaw()
    assert hung.is_untouched()


@pytest.mark.full
def test_recreate_when_the_old_agent_is_held_and_the_holder_wakes_then_the_read_still_ends_as_it_would(
    freezable_site: Site, hung: Hung
) -> None:
    keeper = [freezable_site.agent(hung.agent_name)]
    with pytest.raises(TransferError):
        hung.backend.recreate()
    hung.holder.thaw()
    assert finish(hung.backend, hung.handle) is ReadStatus.DONE
    assert hung.memory.read(BLOCKS, 2) == hung.holder.pattern(BLOCKS, 2)
    keeper.clear()


@pytest.mark.full
def test_recreate_when_only_garbage_holds_the_old_agent_then_it_is_collected(freezable_site: Site, hung: Hung) -> None:
    name = hung.agent_name
    circle: list[object] = [freezable_site.agent(name)]
    circle.append(circle)
    del circle
    hung.backend.recreate()
    assert freezable_site.agent(name) is None
    assert hung.backend.poll(hung.handle) is ReadStatus.FAILED


def test_add_peer_when_it_has_other_metadata_under_its_name_then_refused_while_a_read_hangs(
    hung: Hung,
) -> None:
    document = json.loads(hung.holder.metadata)
    if document["agent"]:  # a transport whose peers have metadata of its own
        other = {**document, "agent": "aGVsbG8="}
        with pytest.raises(TransferError, match="1 reads from it are in flight") as caught:
            hung.backend.add_peer(json.dumps(other).encode())
        assert caught.value.code == TransferCode.BAD_METADATA
    assert hung.backend.poll(hung.handle) is ReadStatus.IN_PROGRESS
    hung.holder.thaw()
    assert finish(hung.backend, hung.handle) is ReadStatus.DONE


def test_peer_when_it_recreated_its_agent_then_reads_fail_until_it_is_added_again(
    site: Site, memory: EndpointMemory
) -> None:
    holder = site.holder()
    backend = site.backend(memory)
    old = backend.add_peer(holder.metadata)
    assert finish(backend, backend.post_read(old, [Read(BLOCKS, BLOCKS, [(1, 1)])])) is ReadStatus.DONE

    holder.recreate()

    handle = backend.post_read(old, [Read(BLOCKS, BLOCKS, [(2, 2)])])
    assert finish(backend, handle) is ReadStatus.FAILED
    assert handle.error is not None
    assert handle.error.code == TransferCode.PEER_DISCONNECTED
    new = backend.add_peer(holder.metadata)
    assert (new.engine_id, new.epoch) == (old.engine_id, old.epoch)
    assert finish(backend, backend.post_read(new, [Read(BLOCKS, BLOCKS, [(2, 2)])])) is ReadStatus.DONE
    assert memory.read(BLOCKS, 2) == holder.pattern(BLOCKS, 2)


def test_backend_when_closed_then_every_call_says_so(site: Site, memory: EndpointMemory) -> None:
    holder = site.holder()
    backend = site.backend(memory)
    peer = backend.add_peer(holder.metadata)
    handle = backend.post_read(peer, [Read(BLOCKS, BLOCKS, [(1, 1)])])
    backend.close()
    backend.close()
    calls = (
        lambda: backend.register([]),
        backend.metadata,
        backend.recreate,
        lambda: backend.add_peer(holder.metadata),
        lambda: backend.remove_peer(peer),
        lambda: backend.post_read(peer, []),
        lambda: backend.poll(handle),
        lambda: backend.release(handle),
    )
    for call in calls:
        with pytest.raises(TransferError) as caught:
            call()
        assert caught.value.code == TransferCode.CLOSED
