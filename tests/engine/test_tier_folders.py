"""Folders of tiers with more than one user, or too small, or left behind by a writer that was killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.tiers.folder import ObjectFolder
from common.tiers.folder_use import FolderUse
from common.tiers.object_header import ObjectHeader, ObjectKind
from tests.engine.test_tiers import PROMPT, SMALL, answer_cold, disk, run, small_node, tokens
from tests.support.service import ROOT, child_environment
from tests.support.tier_node import TierNode, objects_in

KEY = "a cluster key"


def shared_node(folder: Path, **flags: Any) -> TierNode:
    return TierNode(f"shared:{folder / 'tier'}?size=1GiB", cluster_key=KEY, **flags)


def num_bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.suffix in (".kv", ".tmp") else 0
        except FileNotFoundError:
            continue
    return total


async def wait_written(node: TierNode) -> None:
    """What was published is written at once, without a look at what goes next."""
    assert node.tiers is not None
    await node.until(lambda: node.metric("tier_bytes_total", op="write") > 0)
    await node.until(lambda: not len(node.manager.leases))


def test_prefix_when_another_node_computed_it_then_it_comes_from_the_shared_folder(tmp_path: Path) -> None:
    async def main() -> None:
        async with shared_node(tmp_path) as first, shared_node(tmp_path) as second:
            expected, _ = await first.generate(PROMPT)
            await wait_written(first)
            await second.until(lambda: second.metric("tier_objects") == first.metric("tier_objects") > 0)
            assert await second.generate(PROMPT) == (expected, len(PROMPT))
            turn = [*PROMPT, *expected, *tokens(5, 20)]
            answer, num_cached = await second.generate(turn)
            assert num_cached == len(PROMPT) + len(expected) - 1
            assert answer == await answer_cold("granitemoehybrid", turn)
            # Both write the same one; and one that ends changes nothing for the other.
            both = tokens(6, 300)
            one, other = await asyncio.gather(first.generate(both), second.generate(both))
            assert one[0] == other[0]
            await first.check()
            await first.__aexit__()
            await second.flush()
            await second.forget_memory()
            assert (await second.generate(both)) == (one[0], len(both))
            assert second.metric("tier_read_errors_total") == second.metric("tier_write_errors_total") == 0
            await second.check()

    run(main())


@pytest.mark.parametrize("kind", [ObjectKind.EXTENT, pytest.param(ObjectKind.STATE, marks=pytest.mark.full)])
def test_object_when_it_is_deleted_beside_a_reader_then_the_prompt_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: ObjectKind
) -> None:
    """By another node, after this one has found it and before it has opened it."""

    async def main() -> None:
        async with shared_node(tmp_path) as first, shared_node(tmp_path) as second:
            expected, _ = await first.generate(PROMPT)
            await wait_written(first)
            await second.until(lambda: second.metric("tier_objects") == first.metric("tier_objects") > 0)
            get = ObjectFolder.get

            def delete_first(self: ObjectFolder, wanted: ObjectHeader, buffers: Sequence[memoryview]) -> ObjectHeader:
                if wanted.kind is kind:
                    self.delete(wanted)
                return get(self, wanted, buffers)

            monkeypatch.setattr(ObjectFolder, "get", delete_first)
            answer, num_cached = await second.generate(PROMPT)
            assert (answer, num_cached) == (expected, 0)
            assert second.metric("tier_read_errors_total", reason="missing") >= 1
            monkeypatch.undo()
            await second.check()

    run(main())


@pytest.mark.parametrize("kind", [pytest.param(ObjectKind.EXTENT, marks=pytest.mark.full), ObjectKind.STATE])
def test_prefix_when_a_part_of_it_is_gone_at_the_start_then_it_is_not_found_and_the_rest_is_swept(
    tmp_path: Path, kind: ObjectKind
) -> None:
    async def main() -> None:
        async with TierNode(disk(tmp_path)) as node:
            expected, _ = await node.generate(PROMPT)
            await node.flush()
            assert node.tiers is not None
            for tier in node.tiers._tiers.values():
                for prefix in tier.tier.index:
                    first = prefix.extents[0]
                    objects = node.tiers._objects
                    header = (
                        objects.extent(first, b"")
                        if kind is ObjectKind.EXTENT
                        else objects.state(prefix.checkpoint, has_row=prefix.has_row)
                    )
                    tier.store.delete(header)
        async with TierNode(disk(tmp_path)) as node:
            await node.until(lambda: node.tiers is not None and node.tiers.is_scanned)
            assert node.metric("tier_objects") == 0
            await node.until(lambda: objects_in(tmp_path / "tier") == [])
            assert await node.generate(PROMPT) == (expected, 0)
            await node.check()

    run(main())


def test_folder_when_it_is_small_then_it_stays_within_its_size(tmp_path: Path) -> None:
    size = 1 << 19

    async def main() -> None:
        async with TierNode(disk(tmp_path, str(size)), kv_tier_min_return=0.0) as node:
            largest, most = 0, 0
            answers = {}
            for seed in range(12):
                answers[seed] = (await node.generate(tokens(seed, 500)))[0]
                await node.flush()
                largest = max(largest, *(path.stat().st_size for path in objects_in(tmp_path / "tier")), 1)
                most = max(most, num_bytes_in(tmp_path / "tier"))
            assert size // 2 < most <= size + largest
            await node.until(lambda: num_bytes_in(tmp_path / "tier") == node.metric("tier_used_bytes"))
            await node.forget_memory()
            num_hits = 0
            for seed, expected in answers.items():
                answer, num_cached = await node.generate(tokens(seed, 500))
                assert answer == expected
                num_hits += num_cached > 0
            assert 0 < num_hits < 12
            assert node.metric("tier_read_errors_total") == 0
            await node.check()

    run(main())


@pytest.mark.full
@pytest.mark.parametrize("count", [12, 64])
def test_requests_when_many_come_at_once_and_some_leave_then_answers_are_right_and_nothing_stays(
    tmp_path: Path, count: int
) -> None:
    """Pools of 24 blocks; every prompt is asked for twice, in another order, and each fifth client leaves. In between
    memory is forgotten: what was in it at the end is found in the tier alone."""

    async def ask(node: TierNode, seed: int) -> list[int]:
        return (await node.generate(tokens(seed, 60 + seed % 9), 6))[0]

    async def leave(node: TierNode, seed: int) -> None:
        task = asyncio.create_task(ask(node, seed))
        await asyncio.sleep(0.02 + seed % 7 * 0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def main() -> None:
        async with TierNode() as reference:
            expected = [await ask(reference, seed) for seed in range(count)]
        async with small_node(tmp_path, kv_tier_min_return=0.0) as node:
            for turn in range(2):
                order = random.Random(turn).sample(range(count), count)
                asked = [seed for seed in order if seed % 5 != turn]
                left = [leave(node, seed) for seed in order if seed % 5 == turn]
                answers = await asyncio.gather(*(ask(node, seed) for seed in asked), *left)
                assert answers[: len(asked)] == [expected[seed] for seed in asked]
                await node.flush()
                await node.forget_memory()
            await node.check()
            assert node.metric("tier_hit_tokens_total") > 0
            assert node.metric("tier_read_errors_total") == 0
            await node.until(lambda: num_bytes_in(tmp_path / "tier") == node.metric("tier_used_bytes"))

    run(main())


WRITER = """
import asyncio, itertools, os, sys
from pathlib import Path
from tests.engine.test_tiers import *
async def write(life):
    async with small_node(Path(sys.argv[1])) as node:
        await node.until(lambda: node.tiers.is_scanned)
        print(os.getpid(), flush=True)
        for seed in itertools.count(life * 7):
            await node.generate(tokens(seed % 40, 60 + seed % 9), 6)
for line in sys.stdin:
    child = os.fork()
    if not child:
        asyncio.run(write(int(line)))
    os.waitpid(child, 0)
    print("dead", flush=True)
"""
"""A process that has everything imported, and a node in a fork of it for each number that it reads."""


@pytest.mark.full
@pytest.mark.parametrize("count", [50])
def test_node_when_it_is_killed_while_it_writes_then_its_folder_is_sound(tmp_path: Path, count: int) -> None:
    rng, num_torn = random.Random(3), 0
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=child_environment(), text=True,
    ) as forks:  # fmt: skip
        assert forks.stdin is not None
        assert forks.stdout is not None
        for life in range(count):
            forks.stdin.write(f"{life}\n")
            forks.stdin.flush()
            pid = int(forks.stdout.readline())
            deadline = time.monotonic() + rng.uniform(0.1, 1.0)
            # In the middle of a write, where one is seen in time.
            while time.monotonic() < deadline or not any((tmp_path / "tier").rglob("*.tmp")):
                if time.monotonic() > deadline + 1:
                    break
            os.kill(pid, signal.SIGKILL)
            assert forks.stdout.readline() == "dead\n"
            num_torn += any((tmp_path / "tier").rglob("*.tmp"))
        forks.stdin.close()
    assert num_torn > count // 4

    async def main() -> None:
        async with TierNode() as reference:
            expected = {seed: (await reference.generate(tokens(seed, 60 + seed % 9), 6))[0] for seed in range(40)}
        async with small_node(tmp_path) as node:
            await node.until(lambda: node.tiers is not None and node.tiers.is_scanned)
            await node.until(lambda: num_bytes_in(tmp_path / "tier") == node.metric("tier_used_bytes"))
            assert node.metric("tier_objects") > 0
            for seed, answer in expected.items():
                assert (await node.generate(tokens(seed, 60 + seed % 9), 6))[0] == answer
            assert node.metric("tier_hit_tokens_total") > 0
            assert node.metric("tier_read_errors_total") == 0
            await node.check()

    run(main())


def test_use_when_others_are_there_then_only_the_first_is_alone(tmp_path: Path) -> None:
    first = FolderUse(tmp_path)
    assert first.alone_until > 0
    second = FolderUse(tmp_path)
    assert second.alone_until == 0
    first.close()
    second.close()
    assert FolderUse(tmp_path).alone_until >= first.alone_until


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"mamba_cache_mode": "none"}, "--mamba-cache-mode none keeps no states"),
        ({"block_size": 1000}, "--block-size 1000 is above the maximum of 969 that --kv-tier can keep"),
    ],
)
def test_tier_when_the_node_cannot_have_one_then_it_is_refused_by_flag(
    tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TierNode(disk(tmp_path), **{"max_model_len": 4096, "kv_cache_memory": 64 << 20, **flags})
    (tmp_path / "tier").mkdir(mode=0o755, exist_ok=True)
    (tmp_path / "tier").chmod(0o755)
    with pytest.raises(ConfigError, match=r"has mode 0755"):
        TierNode(disk(tmp_path), **SMALL)
