"""Prefixes that come back from a tier, through the node's own threads: equal answers, nothing held, damage found."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import json
import os
import random
import shutil
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.engine.model_runner import Forward
from common.engine.outputs import RequestOutput
from common.engine.plan import StepPlan
from common.kv_cache.tiers.break_even import ASSUMED_READS
from common.metrics.labels import label_values
from common.node.routes.event_route import changes_of, snapshot_changes, tier_changes
from common.node.tiers.scanner import POLL_S
from common.tiers.folder import ObjectFolder
from common.tiers.object_header import HEADER_BYTES, ObjectHeader, ObjectKind, decode_header
from common.tiers.secrets import SECRET_FILE, derived_secret, folder_secret
from common.tiers.store import ObjectWriteError
from common.wire.cache_events import CacheChange
from proxy.prefix_index.node_cache import NodeCache
from proxy.prefix_index.prompt_keys import PromptKeys
from tests.support.models import SHORT_TIER, VOCAB_SIZE, tiered
from tests.support.tier_node import TierNode, objects_in

FAMILY = "granitemoehybrid"
FAMILIES = [FAMILY, *(pytest.param(each, marks=pytest.mark.full) for each in ("qwen3_5", "llama"))]
MIXERS = [FAMILY, *(pytest.param(each, marks=pytest.mark.full) for each in SHORT_TIER if each != FAMILY)]


def tokens(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def disk(folder: Path, size: str = "1GiB") -> str:
    return f"disk:{folder / 'tier'}?size={size}"


def run(coroutine: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await coroutine

    return asyncio.run(main())


PROMPT = tokens(1, 600)


async def answer_cold(family: str, prompt: Sequence[int], **fields: Any) -> list[int]:
    async with TierNode(family=family) as node:
        return (await node.generate(prompt, **fields))[0]


@pytest.mark.parametrize("family", MIXERS)
def test_conversation_when_its_node_starts_again_then_it_goes_on_from_the_tier(tmp_path: Path, family: str) -> None:
    async def main() -> None:
        async with TierNode(disk(tmp_path), family=family) as node:
            answer, _ = await node.generate(PROMPT)
            await node.flush()
            await node.check()
        turn = [*PROMPT, *answer, *tokens(2, 30)]
        expected = await answer_cold(family, turn)
        async with TierNode(disk(tmp_path), family=family) as node:
            await node.flush()
            keys = node.manager.prefix_keys(turn)
            num_known = await node.engine.call(lambda: node.core.num_local_tokens(keys))
            assert tier_coverage(node, turn) == num_known
            second, num_cached = await node.generate(turn)
            assert second == expected
            assert num_cached == num_known  # so no peer is asked for what the tier has
            assert num_cached >= len(PROMPT) + len(answer) - 1
            assert node.metric("tier_hit_tokens_total") == num_cached
            assert node.metric("tier_read_errors_total") == 0
            # The first prompt once more: its last row was kept, so nothing is computed.
            assert await node.generate(PROMPT) == (answer, len(PROMPT))
            await node.check()

    run(main())


def test_conversations_when_they_begin_alike_and_come_together_then_the_beginning_is_read_once(tmp_path: Path) -> None:
    prompts = [tokens(1, 512) + tokens(10 + number, 90) for number in range(4)]

    async def read(*, together: bool) -> int:
        async with TierNode(disk(tmp_path)) as node:
            await node.flush()
            coming = [node.generate(prompt) for prompt in prompts]
            if together:
                await asyncio.gather(*coming)
            else:
                for each in coming:
                    await each
            return sum(result.num_bytes for result in node.pulls)

    async def main() -> None:
        async with TierNode(disk(tmp_path)) as node:
            for prompt in prompts:
                await node.generate(prompt)
            await node.flush()
        in_turn = await read(together=False)
        assert 0 < await read(together=True) <= in_turn

    run(main())


def tier_coverage(node: TierNode, prompt: Sequence[int]) -> int:
    """What a proxy knows of it: from a snapshot, and from the events since the start."""
    manager, config = node.manager, node.model.cache_config
    assert node.tiers is not None
    assert manager.events is not None
    groups = [group.label for group in config.geometry.attention_groups]
    events = manager.events.since(0)
    assert events is not None
    snapshot = [*snapshot_changes(manager.snapshot()), *tier_changes(node.tiers.stored())]
    found = []
    for changes in (snapshot, list(changes_of(events))):
        cache = NodeCache(config.block_size, groups, config.has_state)
        for change in changes:
            cache.apply(CacheChange.from_json(json.loads(json.dumps(change.to_json()))))
        found.append(cache.coverage(PromptKeys.of_prompt(config.root_key, config.block_size, prompt)))
    assert found[0] == found[1]
    assert found[0].state_tokens == 0
    return found[0].tier_tokens


@pytest.mark.parametrize("has_row", [False, True], ids=["its own state", "another's end"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stream_when_it_was_preempted_and_left_to_the_tier_then_computes_one_token_again_at_most(
    family: str, has_row: bool
) -> None:
    """``has_row``: another prompt was all that the stream has, so that the tier knows what comes next."""
    num_known, end = len(PROMPT) + 5, len(PROMPT) + 20

    async def main() -> None:
        expected = await answer_cold(family, PROMPT, num_tokens=20)
        async with TierNode("host:64MiB", family=family) as node:
            if has_row:
                await node.generate([*PROMPT, *expected[:5]], 1)
            scheduler, step, launch = node.core._scheduler, node.core.step, node.model.runner.launch
            room, preempted = scheduler._config, threading.Event()
            positions: list[int] = []

            def step_or_preempt() -> list[RequestOutput]:
                if not preempted.is_set() and scheduler.running and scheduler.running[0].num_tokens == num_known:
                    scheduler.preempt(scheduler.running[0])
                    scheduler._config = replace(room, max_num_seqs=0)
                    preempted.set()
                return step()

            def note(plan: StepPlan) -> Forward:
                for each in plan.segments:
                    positions.extend(range(each.start, each.start + each.num_tokens))
                return launch(plan)

            node.core.step = step_or_preempt  # type: ignore[method-assign]
            answering = asyncio.create_task(node.generate(PROMPT, 20))
            await node.until(preempted.is_set)
            await node.settle()
            await node.forget_memory()
            node.model.runner.launch = note  # type: ignore[method-assign]
            await node.engine.call(lambda: setattr(scheduler, "_config", room))
            answer, _ = await answering
            assert answer == expected
            assert [pull.ok for pull in node.pulls] == [True]
            assert positions == list(range(num_known if has_row else num_known - 1, end - 1))
            await node.check()

    run(main())


def test_errors_when_there_was_none_then_are_0_for_every_reason_so_that_the_first_one_is_an_increase(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with TierNode(disk(tmp_path), "host:64MiB") as node:
            text = node.metrics.render()[0].decode()
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            for name in ("tier_read_errors_total", "tier_write_errors_total"):
                found = {
                    (each.labels["tier"], each.labels["reason"]): each.value
                    for each in samples
                    if each.name == f"tandem_{name}"
                }
                assert found == dict.fromkeys(itertools.product(("disk", "host"), label_values(name, "reason")), 0.0)

    run(main())


# --- damage


def flip(place: int) -> Callable[[Path], None]:
    """A byte, from the end when it is negative."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 4
        path.write_bytes(data)

    return damage


def cut(num_bytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size - num_bytes)


def zero(path: Path) -> None:
    """Its header and its length, as a disk may leave it that lost the rest."""
    data = path.read_bytes()
    path.write_bytes(data[:HEADER_BYTES] + bytes(len(data) - HEADER_BYTES))


def forge(path: Path) -> None:
    """The same object, of somebody who has not the key."""
    data, secret = path.read_bytes(), folder_secret(path.parents[1])
    header, _ = decode_header(data[:HEADER_BYTES], secret)
    scratch = path.parents[2] / "forger"
    scratch.mkdir()
    ObjectFolder(scratch, derived_secret("another")).put(header, [memoryview(bytes(header.payload_bytes))])
    shutil.copy(objects_in(scratch)[0], path)


def swap(path: Path) -> None:
    """A valid object of the same kind, of another prefix, under this one's name."""
    secret = folder_secret(path.parents[1])
    header = header_of(path, secret)
    others = [each for each in objects_in(path.parents[1]) if each != path]
    other = next(each for each in others if header_of(each, secret).kind is header.kind)
    shutil.copy(other, path)


def unreadable(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def header_of(path: Path, secret: bytes) -> ObjectHeader:
    return decode_header(path.read_bytes()[:HEADER_BYTES], secret)[0]


def identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "header": (flip(20), "header"),
    "payload": (flip(HEADER_BYTES + 50), "digest"),
    "end": (flip(-1), "digest"),
    "cut": (cut(1), "short"),
    "empty": (lambda path: os.truncate(path, 0), "short"),
    "zeros": (zero, "digest"),
    "swapped": (swap, "other"),
    "forged": (forge, "header"),
    "deleted": (lambda path: path.unlink(), "missing"),
    "unreadable": (unreadable, "unreadable"),
}
FAST = ("payload",)


@pytest.mark.parametrize(
    "kind", tiered((ObjectKind.EXTENT, ObjectKind.TAIL, ObjectKind.STATE), (ObjectKind.TAIL, ObjectKind.STATE))
)
@pytest.mark.parametrize(
    "name", [each if each in FAST else pytest.param(each, marks=pytest.mark.full) for each in DAMAGES]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_object_when_it_is_damaged_then_the_prompt_is_computed_and_that_is_counted(
    tmp_path: Path, kind: ObjectKind, name: str, family: str
) -> None:
    damage, reason = DAMAGES[name]

    async def main() -> None:
        async with TierNode(disk(tmp_path), family=family) as node:
            expected, _ = await node.generate(PROMPT)
            await node.generate(tokens(9, 299))
            await node.flush()
            secret = folder_secret(tmp_path / "tier")
            paths = {path: header_of(path, secret) for path in objects_in(tmp_path / "tier")}
            assert node.tiers is not None
            tree = [prefix for tier in node.tiers._tiers.values() for prefix in tier.tier.index]
            whole = next(prefix for prefix in tree if prefix.position == len(PROMPT))
            wanted = {"EXTENT": whole.extents[0].key, "TAIL": whole.key, "STATE": whole.key}[kind.name]
            [path] = [path for path, header in paths.items() if (header.kind, header.key) == (kind, wanted)]
            damage(path)
            damaged = identity(path)
            await node.forget_memory()
            answer, num_cached = await node.generate(PROMPT)
            assert answer == expected
            assert num_cached < len(PROMPT)
            assert node.metric("tier_read_errors_total", reason=reason) == 1
            # It is gone; maybe it was written again by now.
            await node.until(lambda: identity(path) is None or identity(path) != damaged)
            await node.check()
            # It is written again, and found then. What a scan saw while it was gone may be told behind that: the next
            # scan puts it right.
            for _ in range(5):
                await node.flush()
                await node.forget_memory()
                answer, num_cached = await node.generate(PROMPT)
                assert answer == expected
                if num_cached == len(PROMPT):
                    break
                await asyncio.sleep(POLL_S)
            assert num_cached == len(PROMPT)
            assert node.metric("tier_read_errors_total") == 1
            await node.check()

    run(main())


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({"family": "qwen3_5"}, {}),
    "dtype": ({"dtype": "bfloat16"}, {}),
    "block size": ({"block_size": 32}, {}),
    "salt": ({}, {"cache_salt": "theirs"}),
    "older": ({}, {}),
}
"""What the other node has, and its request."""


@pytest.mark.parametrize(
    "name", ["salt", *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS if each != "salt")]
)
def test_objects_when_all_are_replaced_by_those_of_another_then_none_is_believed(tmp_path: Path, name: str) -> None:
    """Valid objects under the same secret, each under the name of one of the same kind and place."""
    flags, fields = OTHERS[name]
    theirs = tmp_path / "theirs"

    async def write(folder: Path, prompt: Sequence[int], flags: dict[str, Any], **fields: Any) -> list[int]:
        async with TierNode(disk(folder), **flags) as node:
            answer, _ = await node.generate(prompt, **fields)
            await node.flush()
            return answer

    async def main() -> None:
        expected = await write(tmp_path, PROMPT, {})
        (theirs / "tier").mkdir(parents=True)
        (theirs / "tier").chmod(0o700)
        shutil.copy(tmp_path / "tier" / SECRET_FILE, theirs / "tier" / SECRET_FILE)
        await write(theirs, PROMPT if fields or flags else tokens(9, len(PROMPT)), flags, **fields)
        secret = folder_secret(tmp_path / "tier")
        async with TierNode(disk(tmp_path)) as node:
            await node.until(lambda: node.tiers is not None and node.tiers.is_scanned)
            others = [(header_of(path, secret), path) for path in objects_in(theirs / "tier")]
            mine = objects_in(tmp_path / "tier")
            for path in mine:
                header = header_of(path, secret)
                like = [other for other in others if other[0].kind is header.kind]
                like.sort(key=lambda other: abs(other[0].position - header.position))
                shutil.copy(like[0][1], path) if like else path.unlink()
            assert await node.generate(PROMPT) == (expected, 0)
            assert node.metric("tier_read_errors_total") >= 1
            assert node.metric("tier_read_errors_total", reason="other") >= 1
            await node.check()
            await node.flush()
            await node.forget_memory()
            assert await node.generate(PROMPT) == (expected, len(PROMPT))
        # At a start what is not what its name says is deleted.
        for path in objects_in(tmp_path / "tier"):
            shutil.copy(others[0][1], path)
        async with TierNode(disk(tmp_path)) as node:
            await node.until(lambda: node.tiers is not None and node.tiers.is_scanned)
            assert node.metric("tier_objects") == 0
            assert await node.generate(PROMPT) == (expected, 0)
            assert node.metric("tier_read_errors_total", reason="other") >= 1
            await node.check()

    run(main())


def test_damage_when_the_check_of_objects_is_left_out_then_the_answer_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what the table damages is what the answer depends on."""

    async def main() -> None:
        async with TierNode(disk(tmp_path)) as node:
            expected, _ = await node.generate(PROMPT)
            await node.flush()
            get = ObjectFolder.get

            def get_other(self: ObjectFolder, wanted: ObjectHeader, buffers: Sequence[memoryview]) -> ObjectHeader:
                found = get(self, wanted, buffers)
                for buffer in buffers:
                    buffer[:] = bytes(len(buffer))
                return found

            monkeypatch.setattr(ObjectFolder, "get", get_other)
            await node.forget_memory()
            answer, num_cached = await node.generate([*PROMPT, *expected, 5])
            assert num_cached >= len(PROMPT)
            monkeypatch.undo()
            assert answer != await answer_cold("granitemoehybrid", [*PROMPT, *expected, 5])

    run(main())


# --- disks that hang, are slow, full


def test_read_when_it_hangs_then_the_prompt_is_computed_and_the_next_reads_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        other = tokens(8, 50)
        expected_other = await answer_cold("granitemoehybrid", other)
        async with TierNode(disk(tmp_path), kv_transfer_timeout_seconds=5.0) as node:
            expected, _ = await node.generate(PROMPT)
            await node.flush()
            await node.forget_memory()
            get, released = ObjectFolder.get, threading.Event()

            def hang(self: ObjectFolder, wanted: ObjectHeader, buffers: Sequence[memoryview]) -> ObjectHeader:
                if wanted.kind is ObjectKind.STATE:
                    released.wait()
                return get(self, wanted, buffers)

            monkeypatch.setattr(ObjectFolder, "get", hang)
            held = asyncio.create_task(node.generate(PROMPT))
            # Who wants nothing of the tier does not wait for it.
            assert await node.generate(other) == (expected_other, 0)
            assert not held.done()
            assert await held == (expected, 0)
            assert node.metric("tier_read_errors_total", reason="deadline") == 1
            await node.check()  # what hangs holds nothing
            await node.forget_memory()
            assert await node.generate(PROMPT) == (expected, 0)
            assert len(node.pulls) == 1  # the tier rests
            released.set()
            await node.check()

    run(main())


def test_read_when_the_system_refuses_it_once_then_nothing_is_deleted_and_the_next_one_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with TierNode(disk(tmp_path)) as node:
            expected, _ = await node.generate(PROMPT)
            await node.flush()
            await node.forget_memory()
            files, num_objects = objects_in(tmp_path / "tier"), node.metric("tier_objects")
            open_file, deleted = os.open, list[ObjectHeader]()
            unrefused = threading.Lock()  # files are opened by several threads

            def refuse_first(path: Any, flags: int, *args: Any, **fields: Any) -> int:
                if flags & os.O_NONBLOCK and Path(path) in files and unrefused.acquire(blocking=False):
                    raise OSError(errno.EMFILE, "injected")
                return open_file(path, flags, *args, **fields)

            monkeypatch.setattr(os, "open", refuse_first)
            monkeypatch.setattr(ObjectFolder, "delete", lambda self, header: deleted.append(header))
            monkeypatch.setattr("common.node.tiers.node_tier.READ_REST_S", 0.0)
            await node.generate(PROMPT)
            assert node.metric("tier_read_errors_total") == node.metric("tier_read_errors_total", reason="io") == 1
            await node.flush()  # what was decided before is done by then
            assert deleted == []
            assert set(files) <= set(objects_in(tmp_path / "tier"))
            assert node.metric("tier_objects") >= num_objects
            await node.forget_memory()
            assert await node.generate(PROMPT) == (expected, len(PROMPT))
            await node.check()

    run(main())


@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_read_when_a_file_fails_then_the_tier_is_read_on_and_the_prefix_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async def main() -> None:
        word = f"{kind}:{tmp_path / 'tier'}?size=1GiB"
        async with TierNode(word, cluster_key="a cluster key" if kind == "shared" else None) as node:
            expected, _ = await node.generate(PROMPT)
            await node.flush()
            await node.forget_memory()
            files, held = objects_in(tmp_path / "tier"), tmp_path / "held"
            open_file, delete, deleted = os.open, ObjectFolder.delete, list[ObjectHeader]()
            unheld = threading.Lock()  # files are opened by several threads

            def fail(path: Any, flags: int, *args: Any, **fields: Any) -> int:
                if flags & os.O_NONBLOCK and Path(path) in files and unheld.acquire(blocking=False):
                    os.link(path, held)  # the bad sector stays taken
                if held.exists() and Path(path).exists() and held.samefile(path):
                    raise OSError(errno.EIO, "injected")
                return open_file(path, flags, *args, **fields)

            def note(self: ObjectFolder, header: ObjectHeader) -> None:
                deleted.append(header)
                delete(self, header)

            monkeypatch.setattr(os, "open", fail)
            monkeypatch.setattr(ObjectFolder, "delete", note)
            assert (await node.generate(PROMPT))[0] == expected
            # Once by the read, and once more if a look at the folder finds it before it is written again.
            assert node.metric("tier_read_errors_total", reason="failing") in (1, 2)
            await node.flush()
            assert bool(deleted) == (kind == "disk")  # what is shared others may read
            await node.forget_memory()
            assert await node.generate(PROMPT) == (expected, len(PROMPT))  # no rest, and all is there
            num_errors = node.metric("tier_read_errors_total")
            assert num_errors == node.metric("tier_read_errors_total", reason="failing") <= 2
            assert set(files) <= set(objects_in(tmp_path / "tier"))
            assert not any(each.samefile(held) for each in files)
            await node.check()

    run(main())


def test_tier_when_reading_takes_longer_than_computing_then_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with TierNode(disk(tmp_path), always_reads=False) as node:
            expected, _ = await node.generate(PROMPT)
            await node.flush()
            assert node.tiers is not None
            [tier] = node.tiers._tiers.values()
            tier.read_times.observe(1000, 1000.0)  # a second a byte
            await node.forget_memory()
            assert await node.generate(PROMPT) == (expected, 0)
            assert node.pulls == []
            monkeypatch.setattr("common.node.tiers.node_tier.MEASURED_FOR_S", 0.0)  # long ago
            monkeypatch.setitem(ASSUMED_READS, "disk", (0.0, 0.0))
            await node.forget_memory()
            assert await node.generate(PROMPT) == (expected, len(PROMPT))
            await node.check()

    run(main())


def test_node_when_its_folder_hangs_in_a_lock_then_it_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, hung, released = fcntl.flock, threading.Event(), threading.Event()

    def hang(descriptor: int, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            hung.set()
            released.wait()
        flock(descriptor, operation)

    async def main() -> None:
        async with TierNode(disk(tmp_path)) as node:
            await node.until(lambda: node.tiers is not None and node.tiers.is_scanned)
            monkeypatch.setattr(fcntl, "flock", hang)
            await node.until(hung.is_set)

    monkeypatch.setattr("common.node.tiers.node_tiers.CLOSE_S", 0.2)
    emergency = threading.Timer(10.0, released.set)
    emergency.start()
    run(main())  # with all that asyncio waits for at its end
    assert not released.is_set()
    emergency.cancel()
    released.set()


@pytest.mark.parametrize("reason", ["full", pytest.param("io", marks=pytest.mark.full)])
def test_disk_when_it_takes_nothing_then_requests_go_on_and_it_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    async def main() -> None:
        async with TierNode(disk(tmp_path)) as node:
            put = ObjectFolder.put

            def refuse(self: ObjectFolder, header: ObjectHeader, *args: Any) -> int:
                if header.kind is ObjectKind.STATE:
                    raise ObjectWriteError(reason)
                return put(self, header, *args)

            monkeypatch.setattr(ObjectFolder, "put", refuse)
            expected, _ = await node.generate(PROMPT)
            await node.flush()
            assert node.metric("tier_write_errors_total", reason=reason) >= 1
            assert node.metric("tier_objects") == 0
            await node.until(lambda: objects_in(tmp_path / "tier") == [])  # what was written of it is gone
            await node.forget_memory()
            assert await node.generate(PROMPT) == (expected, 0)
            monkeypatch.undo()
            monkeypatch.setattr("common.node.tiers.node_tier.WRITE_REST_S", 0.0)
            assert node.tiers is not None
            for tier in node.tiers._tiers.values():
                tier.rest_from_writes()
            await node.flush()
            await node.forget_memory()
            assert await node.generate(PROMPT) == (expected, len(PROMPT))
            await node.check()

    run(main())


def test_memory_when_it_changes_while_it_is_written_then_the_object_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that outlives its lease: what it reads may be another prefix by then."""

    async def main() -> None:
        monkeypatch.setattr("common.node.tiers.node_tiers.WRITE_LEASE_S", 0.0)
        async with TierNode(disk(tmp_path)) as node:
            put, released, began = ObjectFolder.put, threading.Event(), threading.Event()

            def wait(self: ObjectFolder, header: ObjectHeader, *args: Any) -> int:
                began.set()
                released.wait()
                return put(self, header, *args)

            monkeypatch.setattr(ObjectFolder, "put", wait)
            await node.generate(PROMPT)
            await node.until(began.is_set)
            await node.until(lambda: not len(node.manager.leases))
            await node.forget_memory()
            for seed in range(3, 9):  # other prompts get that memory
                await node.generate(tokens(seed, 900))
            released.set()
            await node.until(lambda: node.metric("tier_write_errors_total", reason="stale") >= 1)
            await node.check()

    run(main())


def test_write_when_a_caller_names_its_lease_like_one_of_a_tier_then_both_hold_their_own(tmp_path: Path) -> None:
    async def main() -> None:
        async with TierNode(disk(tmp_path)) as node:
            tiers = node.tiers
            assert tiers is not None
            assert tiers._looking is not None
            tiers._looking.cancel()
            await node.until(lambda: tiers.is_scanned)
            await node.generate(PROMPT)
            keys, name = node.manager.prefix_keys(PROMPT), "tier-write-1"

            def lease_and_look() -> int:
                lease = node.manager.lease_prefix(keys, len(PROMPT), name, float("inf"), deeper_than=0)
                assert lease is not None
                tiers._look(is_whole=True)
                return tiers._num_writes

            assert await node.engine.call(lease_and_look) >= 1
            await node.until(lambda: node.metric("tier_bytes_total", op="write") > 0)
            await node.engine.call(lambda: node.manager.release_lease(name))
            await node.check()

    run(main())


# --- small pools

NUM_CONVERSATIONS = 40
SMALL = {
    "block_size": 16,
    "kv_cache_memory": 400 << 10,
    "state_memory_share": 0.5,
    "max_num_seqs": 2,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
}


def small_node(folder: Path, size: str = "1GiB", **flags: Any) -> TierNode:
    """With 24 blocks."""
    node = TierNode(disk(folder, size), **{**SMALL, **flags})
    assert node.model.cache_config.num_blocks[0] == 25, node.model.cache_config.num_blocks
    return node


@pytest.mark.full
@pytest.mark.parametrize("count", [6, pytest.param(NUM_CONVERSATIONS, marks=pytest.mark.full)])
def test_conversations_when_the_pools_hold_few_then_each_turn_hits_its_history_from_the_tier(
    tmp_path: Path, count: int
) -> None:
    async def main() -> None:
        async with TierNode() as reference, small_node(tmp_path) as node:
            lines = [(tokens(100 + line, 40 + line % 7), 0) for line in range(count)]
            for turn in range(3):
                for line, (prompt, history) in enumerate(lines):
                    answer, num_cached = await node.generate(prompt, 9)
                    assert answer == (await reference.generate(prompt, 9))[0]
                    assert num_cached >= history, (line, turn)
                    following = [*prompt, *answer, *tokens(1000 * line + turn, 11)]
                    lines[line] = (following, len(prompt) + len(answer) - 1)
                    await node.flush()
            await node.check()
            assert node.metric("tier_hit_tokens_total") > 0
            assert node.metric("tier_read_errors_total") == 0
            # Ends of prompts are asked for by nobody, for every turn goes on behind the answer: that is learnt.
            assert node.metric("tier_skipped_total") == node.metric("tier_skipped_total", reason="value")

    run(main())
