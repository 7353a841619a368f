"""What was computed once is not computed again after a restart, nor by another pair on the same folder: real processes,
a folder on a real disk."""

from __future__ import annotations

import contextlib
import fcntl
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from common.tiers.folder_use import USAGE_FILE
from common.tiers.object_header import HEADER_BYTES, ObjectHeader, ObjectKind, decode_header
from common.tiers.secrets import derived_secret
from common.wire.headers import CLUSTER_KEY_HEADER
from common.wire.routes import CACHE_CHECK_ROUTE
from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import Answer, complete, metric, together, wait_settled
from tests.support.models import checkpoint
from tests.support.reference import random_tokens, reference
from tests.support.service import Node, Service

pytestmark = pytest.mark.full  # as in tests/engine/test_tiers.py

OTHERS = ("qwen3_5", "lfm2", "jamba", "kimi_linear", "llama")
CASES = [
    (FAMILY, signal.SIGTERM),
    (FAMILY, signal.SIGKILL),
    *((family, signal.SIGTERM) for family in OTHERS),
]
"""A family of each kind of mixer; which files are there after a kill does not depend on that."""
NUM_TOKENS = 12
PATIENCE_S = 60.0
QUIET_S = 2.5
"""Seconds without a write after which a node has written what it will: it looks at all it has after one."""


def tier_flags(folder: Path, *more: str) -> tuple[str, ...]:
    return (*NODE_FLAGS, "--kv-tier", f"disk:{folder}?size=1GiB", *more)


def service(family: str, flags: Sequence[str]) -> Service:
    return Service(checkpoint(family), prefill_flags=flags, decode_flags=flags)


def wait_written(*nodes: Node) -> None:
    deadline, since, last = time.monotonic() + PATIENCE_S, time.monotonic(), -1.0
    while time.monotonic() - since < QUIET_S or not last:
        written = sum(metric(node, "tier_bytes_total", op="write") for node in nodes)
        if written != last:
            since, last = time.monotonic(), written
        assert time.monotonic() < deadline
        time.sleep(0.1)


def assert_right(family: str, prompt: Sequence[int], answer: Answer) -> None:
    expected = reference(family).greedy(prompt, NUM_TOKENS)
    assert expected.mismatch(answer.token_ids(), answer.logprobs(), reference(family).tolerance) is None


@pytest.mark.parametrize(("family", "number"), CASES)
def test_conversation_when_all_processes_start_again_then_nothing_of_it_is_computed_again(
    tmp_path: Path, family: str, number: signal.Signals
) -> None:
    flags = tier_flags(tmp_path / "tier")
    prompt = random_tokens(3000, 71)
    with service(family, flags) as running:
        first = complete(running.url, prompt, NUM_TOKENS)
        if number is signal.SIGKILL:
            wait_written(*running.prefill, *running.decode)
        for node in running.nodes:
            node.process.popen.send_signal(number)
        for node in running.nodes:
            node.process.popen.wait(PATIENCE_S)
    turn = [*prompt, *first.token_ids(), *random_tokens(40, 72)]
    with service(family, flags) as running:
        for node in (*running.prefill, *running.decode):
            wait_known(node)
        second = complete(running.url, turn, NUM_TOKENS)
        # The last token of an answer was sampled and never computed.
        assert second.cached_tokens == len(prompt) + NUM_TOKENS - 1
        assert_right(family, turn, second)
        # The same once more: an exact repeat of the first prompt computes nothing.
        again = complete(running.url, prompt, NUM_TOKENS)
        assert again.cached_tokens == len(prompt)
        assert again.token_ids() == first.token_ids()
        for node in (*running.prefill, *running.decode):
            assert metric(node, "tier_read_errors_total") == 0
        wait_settled(*running.prefill, *running.decode)


def wait_known(node: Node) -> None:
    """Until the node has found what its folder holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not metric(node, "tier_objects"):
        assert time.monotonic() < deadline, node.process.tail()
        time.sleep(0.05)


# --- two pairs of processes on one shared folder

KEY = "the key of both pairs"


@dataclass
class Pairs:
    """Two pairs with their proxies, which know nothing of each other but a folder."""

    folder: Path
    first: Service
    second: Service

    @property
    def nodes(self) -> list[Node]:
        return [node for pair in (self.first, self.second) for node in (*pair.prefill, *pair.decode)]

    def objects(self) -> dict[Path, ObjectHeader]:
        secret, found = derived_secret(KEY), {}
        for path in sorted(self.folder.rglob("*.kv")):
            with contextlib.suppress(FileNotFoundError):
                found[path] = decode_header(path.read_bytes()[:HEADER_BYTES], secret)[0]
        return found

    def wait_same(self) -> None:
        """Until every node knows what is in the folder, and nothing more is written."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            num_files = len(self.objects())
            known = {metric(node, "tier_used_bytes") for node in self.nodes}
            time.sleep(1.5)  # longer than a node waits between two looks
            if num_files and num_files == len(self.objects()) and len(known) == 1:
                return
            assert time.monotonic() < deadline, (num_files, known)

    def wait_settled(self, *services: Service) -> None:
        deadline = time.monotonic() + PATIENCE_S
        for node in (each for service in services for each in (*service.prefill, *service.decode)):
            key = {CLUSTER_KEY_HEADER: KEY}
            while True:
                state = httpx.get(node.url + CACHE_CHECK_ROUTE, headers=key, timeout=30).raise_for_status().json()
                assert state["ok"], state
                if not (state["leases"] or state["sequences"]):
                    break
                assert time.monotonic() < deadline, state
                time.sleep(0.05)

    def errors(self, name: str = "tier_read_errors_total", **labels: str) -> float:
        return sum(metric(node, name, **labels) for node in self.nodes)


@contextlib.contextmanager
def two_pairs(tmp_path: Path, size: str = "1GiB", *flags: str) -> Iterator[Pairs]:
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    folder, key_flags = tmp_path / "shared", ("--cluster-key-file", str(key_file))
    node_flags = (*NODE_FLAGS, *key_flags, "--kv-tier", f"shared:{folder}?size={size}", *flags)

    def pair() -> Service:
        return Service(checkpoint(FAMILY), prefill_flags=node_flags, decode_flags=node_flags, proxy_flags=key_flags)

    with pair() as first, pair() as second:
        yield Pairs(folder, first, second)


def test_pairs_when_one_has_computed_a_prefix_then_the_other_promotes_it_and_lives_on_alone(tmp_path: Path) -> None:
    with two_pairs(tmp_path) as pairs:
        prompt = random_tokens(3000, 81)
        first = complete(pairs.first.url, prompt, NUM_TOKENS)
        pairs.wait_same()
        again = complete(pairs.second.url, prompt, NUM_TOKENS)
        assert (again.token_ids(), again.cached_tokens) == (first.token_ids(), len(prompt))
        assert sum(metric(node, "tier_hit_tokens_total") for node in pairs.second.prefill) == len(prompt)
        turn = [*prompt, *first.token_ids(), *random_tokens(40, 82)]
        second = complete(pairs.second.url, turn, NUM_TOKENS)
        assert second.cached_tokens == len(prompt) + NUM_TOKENS - 1
        assert_right(FAMILY, turn, second)
        # Both compute and write the same one at once.
        for seed in (83, 84):
            both = random_tokens(900, seed)
            urls = (pairs.first.url, pairs.second.url)
            answers = together([partial(complete, url, both, NUM_TOKENS) for url in urls])
            for answer in answers:
                assert_right(FAMILY, both, answer)
        pairs.wait_same()
        assert pairs.errors() == pairs.errors("tier_write_errors_total") == 0
        # One pair's death changes nothing for the other.
        late = random_tokens(700, 85)
        expected = complete(pairs.first.url, late, NUM_TOKENS)
        pairs.wait_same()
        for node in pairs.first.nodes:
            node.process.popen.send_signal(signal.SIGKILL)
        answer = complete(pairs.second.url, late, NUM_TOKENS)
        assert (answer.token_ids(), answer.cached_tokens) == (expected.token_ids(), len(late))
        fresh = random_tokens(500, 86)
        assert_right(FAMILY, fresh, complete(pairs.second.url, fresh, NUM_TOKENS))
        for node in (*pairs.second.prefill, *pairs.second.decode):
            assert metric(node, "tier_read_errors_total") == metric(node, "tier_write_errors_total") == 0
        pairs.wait_settled(pairs.second)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("kind", [ObjectKind.EXTENT, ObjectKind.STATE])
def test_pairs_when_a_part_of_a_prefix_is_gone_then_the_other_computes_what_it_lacks(
    tmp_path: Path, kind: ObjectKind, is_known: bool
) -> None:
    """A state without one of its extents, and extents without their states; found out by a look, or by reading."""
    with two_pairs(tmp_path) as pairs:
        prompt = random_tokens(900, 87)
        complete(pairs.first.url, prompt, NUM_TOKENS)
        pairs.wait_same()
        found = pairs.objects()
        gone = [path for path, header in found.items() if header.kind is kind]
        for path in gone[:1] if kind is ObjectKind.EXTENT else gone:
            path.unlink()
        if is_known:
            deadline = time.monotonic() + PATIENCE_S
            while any(metric(node, "tier_objects") == len(found) for node in pairs.nodes):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        answer = complete(pairs.second.url, prompt, NUM_TOKENS)
        assert_right(FAMILY, prompt, answer)
        assert answer.cached_tokens < len(prompt)
        assert pairs.errors() == pairs.errors(reason="missing")
        pairs.wait_settled(pairs.first, pairs.second)


def test_pairs_when_one_evicts_what_the_other_reads_then_answers_are_right_and_the_folder_keeps_its_size(
    tmp_path: Path,
) -> None:
    size, count = 2 << 20, 24
    with two_pairs(tmp_path, str(size), "--kv-cache-memory", "4MiB", "--max-model-len", "1024") as pairs:
        prompts = [random_tokens(300 + number, 900 + number) for number in range(count)]
        most = 0

        def ask(pair: Service, seed: int) -> None:
            nonlocal most
            for number in random.Random(seed).choices(range(count), k=40):
                assert_right(FAMILY, prompts[number], complete(pair.url, prompts[number], NUM_TOKENS))
                sizes = []
                with (pairs.folder / USAGE_FILE).open("rb") as usage:
                    # Nobody begins to write meanwhile: else what is deleted once it was counted, and what came into
                    # its place, are counted both.
                    fcntl.flock(usage, fcntl.LOCK_EX)
                    for path in pairs.folder.rglob("*.kv"):
                        with contextlib.suppress(FileNotFoundError):
                            sizes.append(path.stat().st_size)
                most = max(most, sum(sizes))

        def has_hits() -> bool:
            return sum(metric(node, "tier_hit_tokens_total") for node in pairs.nodes) > 0

        for seed in range(0, 8, 2):  # memory may have all that is asked for at first
            together([partial(ask, pairs.first, seed), partial(ask, pairs.second, seed + 1)])
            if has_hits():
                break
        assert size // 2 < most <= size
        assert has_hits()
        assert pairs.errors() == pairs.errors(reason="missing")
        pairs.wait_settled(pairs.first, pairs.second)
