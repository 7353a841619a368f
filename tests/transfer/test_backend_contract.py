"""What every transfer backend has to do; see the docstrings of common/transfer/backend.py."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest

from common.errors import TransferError
from common.transfer.codes import TransferCode
from common.transfer.reads import Read, ReadStatus, merge_pairs
from common.transfer.regions import Region
from tests.support.transfer_memory import BLOCK_GENERATIONS, BLOCKS, SLOTS, EndpointMemory
from tests.support.transfer_sites import Site, finish


def test_merge_pairs_when_both_sides_are_consecutive_then_one_run() -> None:
    pairs = [(7, 3), (5, 1), (6, 2), (9, 4), (20, 30), (19, 29), (2, 31)]
    assert merge_pairs(np.array(pairs)).tolist() == [[5, 1, 3], [9, 4, 1], [19, 29, 2], [2, 31, 1]]
    assert merge_pairs(np.empty((0, 2), dtype=np.int64)).tolist() == []


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


WRONG_READS = (
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
