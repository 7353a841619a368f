"""A Mooncake Store as a tier, against its real master: what one node wrote another reads, and its lies are caught."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("mooncake.store", reason="mooncake-transfer-engine-non-cuda is not installed")

from common.errors import ConfigError
from common.tiers.mooncake import HEADER, MooncakeStore, MooncakeWatch, connect
from common.tiers.object_header import ObjectHeader, object_name
from common.tiers.secrets import derived_secret
from common.tiers.store import ObjectReadError, ObjectWriteError
from tests.engine.test_tier_folders import KEY, wait_written
from tests.engine.test_tiers import PROMPT, answer_cold, run, tokens
from tests.support.mooncake import Master, master
from tests.support.service import free_port
from tests.support.tier_node import TierNode
from tests.unit.tiers.test_folder import EXTENT, MODEL, STATE, TAIL, get, payload_of, put, read_reason

SECRET = derived_secret(KEY)


@pytest.fixture(scope="module")
def running() -> Iterator[Master]:
    with master() as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Master) -> Iterator[Any]:
    found = connect(f"127.0.0.1:{running.port}", running.admin_port, 16 << 20, 1 << 20)
    yield found
    found.close()


@pytest.fixture
def store(client: Any) -> MooncakeStore:
    client.remove_all(True)
    return MooncakeStore(client, "a store", SECRET)


def test_object_when_it_was_put_then_it_is_read_found_by_others_and_deleted(
    running: Master, client: Any, store: MooncakeStore
) -> None:
    watch = MooncakeWatch(store, "127.0.0.1", running.admin_port, MODEL)
    assert watch.look().added == []
    for header in (EXTENT, TAIL, STATE):
        put(store, header)
        assert store.has(header)
        assert get(store, header) == payload_of(header)
    others = MooncakeStore(client, "a store", derived_secret("another key"))
    assert read_reason(others, EXTENT) == "missing"
    changes = watch.look()
    assert {header.kind: header for header in changes.added} == {each.kind: each for each in (EXTENT, TAIL, STATE)}
    put(others, EXTENT)
    store.delete(TAIL)
    assert read_reason(store, TAIL) == "missing"
    changes = watch.look()
    assert (changes.added, changes.removed, dict(changes.useless)) == ([], [TAIL], {"header": 1})
    assert watch.look().useless == {}
    with pytest.raises(ObjectWriteError, match="stale"):
        store.put(TAIL, [memoryview(payload_of(TAIL))], lambda: False)
    assert not store.has(TAIL)


def flip(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "header": (HEADER, flip(20), "header"),
    "header's end": (HEADER, flip(4095), "header"),
    "payload": ("", flip(50), "digest"),
    "payload's end": ("", flip(-2), "digest"),
    "zeros": ("", lambda data: bytes(len(data)), "digest"),
    "short": ("", lambda data: data[:-1], "short"),
    "one byte": ("", lambda data: data[:1], "short"),
    "short header": (HEADER, lambda data: data[:100], "short"),
    "no payload": ("", lambda data: None, "missing"),
    "no header": (HEADER, lambda data: None, "missing"),
}


def damage(client: Any, name: str, change: Callable[[bytes], bytes | None]) -> None:
    data = change(client.get(name))
    assert client.remove(name, True) == 0
    if data is not None:
        assert client.put(name, data) == 0


@pytest.mark.parametrize("header", [EXTENT, TAIL, STATE], ids=lambda header: header.kind.name)
@pytest.mark.parametrize("name", DAMAGES)
def test_object_when_the_store_gives_something_else_then_it_is_an_error_and_a_new_one_replaces_it(
    client: Any, store: MooncakeStore, name: str, header: ObjectHeader
) -> None:
    suffix, change, reason = DAMAGES[name]
    put(store, header)
    damage(client, object_name(SECRET, header) + suffix, change)
    assert read_reason(store, header) == reason
    put(store, header)
    assert get(store, header) == payload_of(header)


def test_object_when_another_is_under_its_name_then_it_is_not_taken_for_it(client: Any, store: MooncakeStore) -> None:
    put(store, EXTENT)
    put(store, TAIL)
    for suffix in ("", HEADER):
        theirs = client.get(object_name(SECRET, TAIL) + suffix)
        damage(client, object_name(SECRET, EXTENT) + suffix, lambda data, theirs=theirs: theirs)  # type: ignore[misc]
    assert read_reason(store, EXTENT) == "other"


def test_store_when_it_is_full_then_a_write_is_refused_and_leaves_nothing(client: Any, store: MooncakeStore) -> None:
    large = ObjectHeader(EXTENT.kind, MODEL, 0, b"l" * 32, b"p" * 32, 512, 17 << 20, start=16, num_blocks=16)
    with pytest.raises(ObjectWriteError):
        store.put(large, [memoryview(random.Random(1).randbytes(large.payload_bytes))])
    with pytest.raises(ObjectReadError, match="missing"):
        get(store, large)


def test_tier_when_there_is_no_master_then_the_node_says_so() -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=f"mooncake:127.0.0.1:{port}: no master at port {port}"):
        TierNode(f"mooncake:127.0.0.1:{port}?size=1MiB", cluster_key=KEY)


def test_prefix_when_another_node_computed_it_then_it_comes_from_the_store_and_damage_is_found(
    running: Master, client: Any, store: MooncakeStore
) -> None:
    async def main() -> None:
        async with (
            TierNode(running.tier(), cluster_key=KEY) as first,
            TierNode(running.tier(), cluster_key=KEY) as second,
        ):
            expected, _ = await first.generate(PROMPT)
            await wait_written(first)
            await second.until(lambda: second.metric("tier_objects") == first.metric("tier_objects") > 0)
            assert await second.generate(PROMPT) == (expected, len(PROMPT))
            turn = [*PROMPT, *expected, *tokens(5, 20)]
            answer, num_cached = await second.generate(turn)
            assert num_cached >= len(PROMPT)
            assert answer == await answer_cold("granitemoehybrid", turn)
            assert second.metric("tier_read_errors_total") == 0
            # Every value of the store is damaged: nothing of it is believed, and it is written anew.
            await second.forget_memory()
            assert second.tiers is not None
            [tier] = second.tiers._tiers.values()
            names = [
                object_name(SECRET, second.tiers._objects.extent(extent, b""))
                for prefix in tier.tier.index
                for extent in prefix.extents
            ]
            for name in set(names):
                damage(client, name, flip(50))
            assert await second.generate(PROMPT) == (expected, 0)
            assert second.metric("tier_read_errors_total", reason="digest") >= 1
            await second.check()
            await first.check()

    run(main())


def test_node_when_the_master_dies_then_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with master() as mine:
            async with TierNode(mine.tier(), cluster_key=KEY, kv_transfer_timeout_seconds=1.0) as node:
                expected, _ = await node.generate(PROMPT)
                await wait_written(node)
                await node.forget_memory()
                mine.process.kill()
                mine.process.wait()
                assert (await node.generate(PROMPT))[0] == expected
                assert await node.generate(tokens(7, 90)) == (await answer_cold("granitemoehybrid", tokens(7, 90)), 0)

    run(main())
