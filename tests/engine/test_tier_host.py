"""Host memory as a tier: what leaves the pools passes there, what leaves it goes to the disk below, and a drain leaves
nothing behind that a start would miss."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from common.tiers.folder import ObjectFolder
from common.tiers.host_memory import HostMemory
from common.tiers.object_header import HEADER_BYTES, ObjectHeader, ObjectKind
from common.tiers.store import ObjectReadError
from tests.engine.test_tiers import PROMPT, SMALL, answer_cold, disk, run, tokens
from tests.support.tier_node import TierNode, objects_in

EXTENT = ObjectHeader(ObjectKind.EXTENT, b"m" * 32, 0, b"k" * 32, b"p" * 32, 16, 6, num_blocks=1)


def host_of(node: TierNode) -> HostMemory:
    assert node.tiers is not None
    store = next(each.store for each in node.tiers._tiers.values() if each.kind == "host")
    assert isinstance(store, HostMemory)
    return store


def bytes_in(store: HostMemory) -> int:
    return sum(HEADER_BYTES + len(payload) for _, payload in store._objects.values())


async def settled(node: TierNode) -> None:
    """Once all that was decided is done, each tier holds what its index says, within its size."""
    assert node.tiers is not None
    await node.flush()
    await node.until(lambda: bytes_in(host_of(node)) == node.metric("tier_used_bytes", tier="host"))
    assert node.metric("tier_used_bytes", tier="host") <= node.metric("tier_size_bytes", tier="host")
    await node.check()


def test_prompt_when_it_left_the_pools_then_it_comes_from_host_memory_and_no_disk_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        # The order of the flag does not matter: what is fastest is on top.
        async with TierNode(disk(tmp_path), "host:64MiB") as node:
            expected, _ = await node.generate(PROMPT)
            await settled(node)
            await node.forget_memory()
            monkeypatch.setattr(ObjectFolder, "get", None)
            assert await node.generate(PROMPT) == (expected, len(PROMPT))
            assert node.metric("tier_hit_tokens_total", tier="host") == len(PROMPT)
            turn = [*PROMPT, *expected, *tokens(3, 9)]
            await node.forget_memory()
            answer, num_cached = await node.generate(turn)
            assert num_cached >= len(PROMPT)
            assert answer == await answer_cold("granitemoehybrid", turn)
            assert node.metric("tier_read_errors_total") == 0
            await settled(node)

    run(main())


def test_state_when_host_memory_gives_another_then_it_is_not_believed(tmp_path: Path) -> None:
    async def main() -> None:
        async with TierNode("host:64MiB") as node:
            expected, _ = await node.generate(PROMPT)
            await node.generate(tokens(9, len(PROMPT)))
            await settled(node)
            store = host_of(node)
            states = [name for name, (header, _) in store._objects.items() if header.row_bytes]
            assert len(states) == 2
            one, other = (store._objects[name] for name in states)
            store._objects[states[0]], store._objects[states[1]] = other, one
            await node.forget_memory()
            answer, num_cached = await node.generate(PROMPT)
            assert (answer, num_cached < len(PROMPT)) == (expected, True)
            assert node.metric("tier_read_errors_total", tier="host", reason="other") == 1
            await settled(node)
            store._objects.clear()
            await node.forget_memory()
            assert (await node.generate(PROMPT))[0] == expected
            assert node.metric("tier_read_errors_total", tier="host", reason="missing") >= 1
            await node.check()

    run(main())


def test_host_memory_when_the_disk_below_hangs_then_it_takes_on_what_leaves_the_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, released = ObjectFolder.put, threading.Event()

    def hang(self: ObjectFolder, *args: Any) -> int:
        released.wait()
        return put(self, *args)

    async def main() -> None:
        async with TierNode("host:512KiB", disk(tmp_path), kv_tier_min_return=0.0, **SMALL) as node:
            assert node.tiers is not None
            indexes = {each.kind: each.tier.index for each in node.tiers._tiers.values()}
            await node.until(lambda: node.tiers is not None and node.tiers.is_scanned)
            for seed in range(16):  # many times what host memory holds, so that the disk is to take what goes
                await node.generate(tokens(seed, 100))
                key = node.manager.prefix_keys(tokens(seed, 100)).key_at(100)
                await node.until(lambda key=key: key in indexes["host"])  # type: ignore[misc]
            assert indexes["disk"].unwritten  # they hang
            assert node.metric("tier_skipped_total", tier="disk", reason="late") > 0
            released.set()
            await settled(node)

    monkeypatch.setattr(ObjectFolder, "put", hang)
    monkeypatch.setattr("common.node.tiers.node_tiers.WRITE_HANG_S", 0.3)
    run(main())


def test_drain_when_each_write_takes_longer_than_a_hang_then_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = ObjectFolder.put

    def put_slowly(self: ObjectFolder, header: ObjectHeader, *args: Any) -> int:
        if header.kind is ObjectKind.STATE:
            time.sleep(0.15)
        return put(self, header, *args)

    async def main() -> None:
        async with TierNode(disk(tmp_path), kv_tier_min_return=0.0) as node:
            assert node.tiers is not None
            [each] = node.tiers._tiers.values()
            await node.until(lambda: node.tiers is not None and node.tiers.is_scanned)
            for seed in range(8):
                await node.generate(tokens(seed, 100))
            was_hung = False
            while await node.tiers.flush():
                was_hung |= each.tier.is_hung
                await asyncio.sleep(0.02)
            assert was_hung
            keys = [node.manager.prefix_keys(tokens(seed, 100)).key_at(100) for seed in range(8)]
            assert all(key in each.tier.index for key in keys)
            assert not each.tier.index.unwritten

    monkeypatch.setattr(ObjectFolder, "put", put_slowly)
    monkeypatch.setattr("common.node.tiers.node_tiers.WRITE_HANG_S", 0.1)
    run(main())


@pytest.mark.full
def test_conversations_when_host_memory_holds_few_then_the_disk_has_the_rest_and_keeps_it(tmp_path: Path) -> None:
    """Each turn hits its whole history, from wherever; after a drain and a start from the disk alone."""
    words = ("host:1536KiB", disk(tmp_path))

    async def main() -> None:
        async with TierNode() as reference:
            lines = {seed: (tokens(200 + seed, 40 + seed % 7), 0) for seed in range(12)}

            async def turns(node: TierNode, number: int) -> None:
                for seed in random.Random(number).sample(sorted(lines), len(lines)):
                    prompt, history = lines[seed]
                    answer, num_cached = await node.generate(prompt, 9)
                    assert answer == (await reference.generate(prompt, 9))[0]
                    assert num_cached >= history, seed
                    following = [*prompt, *answer, *tokens(1000 * seed + number, 11)]
                    lines[seed] = (following, len(prompt) + len(answer) - 1)
                    await node.settle()

            async with TierNode(*words, kv_tier_min_return=0.0, **SMALL) as node:
                for number in range(3):
                    await turns(node, number)
                assert node.metric("tier_hit_tokens_total", tier="host") > 0
                assert node.metric("tier_bytes_total", tier="disk", op="write") > 0
                assert node.metric("tier_read_errors_total") == 0
                await settled(node)
            assert objects_in(tmp_path / "tier")
            async with TierNode(*words, kv_tier_min_return=0.0, **SMALL) as node:
                await node.until(lambda: node.tiers is not None and node.tiers.is_scanned)
                await turns(node, 3)
                assert node.metric("tier_hit_tokens_total", tier="disk") > 0
                assert node.metric("tier_read_errors_total") == 0

    run(main())


def test_object_when_it_is_deleted_then_who_writes_it_on_has_it_still() -> None:
    store = HostMemory()
    with pytest.raises(ObjectReadError, match="missing"):
        store.stored(EXTENT)
    store.put(EXTENT, [memoryview(b"abc"), memoryview(b"def")])
    header, payload = store.stored(EXTENT)
    store.delete(EXTENT)
    assert (header, bytes(payload), store.has(EXTENT)) == (EXTENT, b"abcdef", False)
