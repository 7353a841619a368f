"""Querying other nodes for a prefix by its content: which answers are used, and that no other answer ever matters."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from common.engine.rates import Line
from common.errors import DeadlineExceededError, FingerprintMismatchError, InvalidRequestError, TransferError
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.pools.generations import content_tag
from common.node.lend.manifest_builder import ManifestBuilder
from common.node.lend.prefix_holder import PrefixHolder
from common.node.pull.sources import PrefixSources
from common.wire.manifest import Manifest
from common.wire.pull import ContentQuery, miss_answer, parse_query
from common.wire.pull_sources import PullSource
from tests.unit.kv_cache.turns import run_turn
from tests.unit.kv_cache.world import make_config

PROMPT = list(range(40))
FIRST, SECOND = PullSource("http://127.0.0.1:8201", 11), PullSource("http://127.0.0.1:8202", 22)
FINGERPRINT = "ab" * 16

Answerer = Callable[[str, ContentQuery], Coroutine[Any, Any, dict[str, Any]]]


@dataclass
class FakeNode:
    """A cache manager and nothing else that is real; peers answer as the test says."""

    answer: Answerer | None = None
    manager: KVCacheManager = field(default_factory=lambda: KVCacheManager(make_config()))
    asked: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    called_off: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    refused: Sequence[str] = ()
    step_model: Any = field(default_factory=lambda: SimpleNamespace(prompt_line=None))
    steps_block: bool = False

    def __post_init__(self) -> None:
        self.liveness = SimpleNamespace(check=self.check_allowed)
        self.leases = SimpleNamespace(
            hold=lambda lease_id, url, seconds: self.held.append(lease_id),
            release=lambda lease_id: lease_id in self.held and self.held.remove(lease_id),
            call_off=lambda lease_id, url: self.given_up.append(url),
        )

    def sources(self) -> PrefixSources:
        node: Any = self
        return PrefixSources(
            manager=self.manager,
            core=node,
            engine=node,
            peers=node,
            leases=node.leases,
            loaded=cast(Any, None),
            metrics=node,
            fingerprint=FINGERPRINT,
        )

    def manifests(self, verify: str = "off") -> ManifestBuilder:
        return ManifestBuilder(
            engine_id="engine",
            epoch=self.manager.generations.epoch,
            host="127.0.0.1",
            port=8200,
            fingerprint=FINGERPRINT,
            lease_seconds=30.0,
            verify=verify,
            storage=cast(Any, SimpleNamespace(config=self.manager.config)),
        )

    def holder(self, verify: str) -> PrefixHolder:
        node: Any = self
        return PrefixHolder(
            manager=self.manager,
            core=node,
            engine=node,
            rendezvous=cast(Any, SimpleNamespace(is_called_off=self.called_off.__contains__)),
            manifests=self.manifests(verify),
            max_model_len=64,
        )

    # --- engine

    async def call(self, function: Callable[[], Any]) -> Any:
        assert not self.steps_block
        return function()

    def hand_over(self, stream_id: str, lease_id: str) -> Any:
        """Of a stream that is ``PROMPT``."""
        return self.lease_prefix(self.manager.prefix_keys(PROMPT), lease_id, deeper_than=0)

    def post(self, function: Callable[[], Any]) -> None:
        function()

    def num_local_tokens(self, keys: Any) -> int:
        return self.manager.lookup(keys, keys.num_tokens).num_tokens

    def lease_prefix(self, keys: Any, lease_id: str, *, deeper_than: int) -> Any:
        return self.manager.lease_prefix(keys, keys.num_tokens, lease_id, 1e9, deeper_than=deeper_than)

    # --- peers, metrics

    def check_allowed(self, url: str, *, is_from_peer: bool = True) -> None:
        if url in self.refused:
            raise InvalidRequestError(f"{url} is not a peer")

    async def query(self, url: str, path: str, body: bytes, timeout_s: float) -> dict[str, Any]:
        self.asked.append(url)
        assert self.answer is not None
        query = parse_query(orjson.loads(body), vocab_size=100)
        assert isinstance(query, ContentQuery)
        return await self.answer(url, query)

    def inc(self, name: str, *, result: str) -> None:
        assert name == "source_queries_total"
        self.results.append(result)


def manifest(query: ContentQuery, num_tokens: int = 30, **changes: Any) -> dict[str, Any]:
    """A good answer, but for ``changes``."""
    keys = KVCacheManager(make_config()).prefix_keys(query.prompt_token_ids, query.cache_salt)
    num_blocks = -(-num_tokens // 4)
    fields = {
        "engine_id": "peer",
        "request_id": query.id,
        "host": "127.0.0.1",
        "port": 8201,
        "num_tokens": num_tokens,
        "block_size": 4,
        "block_ids": (tuple(range(1, num_blocks + 1)),),
        "generations": ((7,) * num_blocks,),
        "epoch": FIRST.epoch,
        "fingerprint": FINGERPRINT,
        "lease_id": query.id,
        "lease_seconds": 30.0,
        "prefix_key": keys.key_at(min(num_tokens, keys.num_tokens)),
        "slot_id": 3,
        "slot_generation": 9,
    }
    return Manifest(**{**fields, **changes}).to_params()


def find(node: FakeNode, sources: Sequence[PullSource] = (FIRST,), prompt: Sequence[int] = PROMPT) -> Any:
    """What the block inside ``prefix`` gets; None or (tokens, url)."""

    async def run() -> Any:
        async with node.sources().prefix(prompt, None, sources) as found:
            if found is None:
                return None
            prefix = await found.manifests.beyond(0)
            assert (prefix.num_tokens, prefix.is_final, prefix.epoch) == (found.num_tokens, True, FIRST.epoch)
            assert node.held == [found.lease_id]
            return found.num_tokens, found.url

    return asyncio.run(run())


def test_answer_when_good_then_leased_inside_and_released_after() -> None:
    async def answer(url: str, query: ContentQuery) -> dict[str, Any]:
        assert (query.have, query.fingerprint, list(query.prompt_token_ids)) == (0, FINGERPRINT, PROMPT)
        return manifest(query)

    node = FakeNode(answer)
    assert find(node) == (30, FIRST.url)
    assert (node.results, node.held, node.given_up) == (["hit"], [], [])


def test_second_source_when_the_first_has_nothing_then_asked() -> None:
    async def answer(url: str, query: ContentQuery) -> dict[str, Any]:
        return miss_answer() if url == SECOND.url else manifest(query)

    node = FakeNode(answer)
    assert find(node, (SECOND, FIRST)) == (30, FIRST.url)
    assert (node.asked, node.results, node.given_up) == ([SECOND.url, FIRST.url], ["miss", "hit"], [])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 40, "prefix_key": bytes(32)},
        {"prefix_key": bytes(32)},
        {"epoch": 12},
        {"block_size": 5, "block_ids": ((1,) * 6,), "generations": ((1,) * 6,)},
        {"fingerprint": "cd" * 16},
        {"lease_id": "another"},
        {"slot_id": 0},
        {"block_ids": (), "generations": ()},
        {"num_tokens": 44},
        {"num_tokens": 16},
    ],
    ids=str,
)
def test_answer_when_it_is_not_what_was_asked_for_then_given_back_and_not_used(changes: dict[str, Any]) -> None:
    async def answer(url: str, query: ContentQuery) -> dict[str, Any]:
        return manifest(query, **changes)

    node = FakeNode(answer)
    run_turn(node.manager, PROMPT[:16], donate=True)  # 16 tokens are here
    assert find(node) is None
    assert (node.results, node.held, node.given_up) == (["mismatch"], [], [FIRST.url])


def test_source_when_slow_or_broken_then_passed_over_in_time() -> None:
    async def answer(url: str, query: ContentQuery) -> dict[str, Any]:
        if url == FIRST.url:
            await asyncio.sleep(30)
        raise TransferError("gone")

    node = FakeNode(answer)
    assert find(node, (FIRST, SECOND)) is None
    assert node.results == ["timeout", "failed"]
    assert node.given_up == [FIRST.url, SECOND.url]


def test_source_when_it_is_of_another_model_and_says_so_then_counted_as_that() -> None:
    async def answer(url: str, query: ContentQuery) -> dict[str, Any]:
        raise TransferError(f"{url} answers 409", code=FingerprintMismatchError.code)

    node = FakeNode(answer)
    assert find(node) is None
    assert (node.results, node.given_up) == (["mismatch"], [FIRST.url])


def test_source_when_not_a_peer_then_never_called() -> None:
    node = FakeNode(refused=(FIRST.url,))
    assert find(node) is None
    assert (node.asked, node.results, node.given_up) == ([], ["refused"], [])


@pytest.mark.parametrize(("token_s", "limit_s"), [(None, 0.2), (0.001, 0.2), (0.05, 1.0), (10.0, 2.0)])
def test_source_when_computing_takes_longer_then_has_longer_to_answer(token_s: float | None, limit_s: float) -> None:
    limits: list[float] = []

    class Asking(FakeNode):
        async def query(self, url: str, path: str, body: bytes, timeout_s: float) -> dict[str, Any]:
            limits.append(timeout_s)
            return miss_answer()

    line = None if token_s is None else Line(0.01, token_s, 1.0)
    find(Asking(step_model=SimpleNamespace(prompt_line=line)), (FIRST, replace(SECOND, lease_id="stream-1")))
    assert limits == [pytest.approx(limit_s), 2.0]


def test_query_when_two_sources_get_it_then_is_made_once_and_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a million tokens it took a quarter of a second, in which the node sends no token and no beat."""
    threads: list[threading.Thread] = []
    queries: list[ContentQuery] = []
    token_ids = PrefixKeys.token_ids

    def recorded(keys: PrefixKeys, start: int, end: int) -> list[int]:
        if end - start == len(PROMPT):
            threads.append(threading.current_thread())
        return token_ids(keys, start, end)

    async def answer(url: str, query: ContentQuery) -> dict[str, Any]:
        queries.append(query)
        return miss_answer()

    monkeypatch.setattr(PrefixKeys, "token_ids", recorded)
    find(FakeNode(answer), (LEASED, SECOND))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
    assert queries[0] == replace(query_of(FakeNode()), id="stream-1")
    assert queries[1] == replace(queries[0], id=queries[1].id)
    assert queries[1].id.startswith("content-")


LEASED = replace(FIRST, lease_id="stream-1")


def test_source_when_it_holds_the_prefix_already_then_is_asked_for_that() -> None:
    async def answer(url: str, query: ContentQuery) -> dict[str, Any]:
        assert query.id == "stream-1"
        return manifest(query)

    node = FakeNode(answer)
    assert find(node, (LEASED, SECOND)) == (30, FIRST.url)
    assert (node.held, node.given_up) == ([], [])


@pytest.mark.parametrize("known", [0, 40], ids=["miss", "here"])
def test_source_when_what_it_holds_is_not_used_then_that_ends_once(known: int) -> None:
    async def answer(url: str, query: ContentQuery) -> dict[str, Any]:
        if url == FIRST.url:
            raise TransferError("gone")
        return miss_answer()

    node = FakeNode(answer)
    if known:
        run_turn(node.manager, PROMPT[:known], donate=True)
    assert find(node, (LEASED, SECOND)) is None
    assert node.given_up == [FIRST.url]


@pytest.mark.parametrize("known", [34, 40])
def test_sources_when_less_than_two_blocks_are_missing_then_nobody_is_asked(known: int) -> None:
    node = FakeNode()
    run_turn(node.manager, PROMPT[:known], donate=True)
    assert find(node) is None
    assert find(node, prompt=PROMPT[:8]) is None
    assert find(node, sources=()) is None
    assert node.results == []


@pytest.mark.parametrize("options", [{"caching": False}, {"mode": "none"}])
def test_sources_when_states_are_not_cached_here_then_nobody_is_asked(options: dict[str, Any]) -> None:
    node = FakeNode(manager=KVCacheManager(make_config(**options)))
    assert find(node) is None


def test_sources_when_the_engine_is_in_a_long_step_then_nobody_is_asked() -> None:
    class BusyNode(FakeNode):
        async def call(self, function: Callable[[], Any]) -> Any:
            raise DeadlineExceededError("in a step")

    node = BusyNode()
    assert find(node) is None
    assert node.asked == []


# --- the holder's side


def query_of(node: FakeNode, prompt: Sequence[int] = PROMPT, **changes: Any) -> ContentQuery:
    keys = node.manager.prefix_keys(prompt)
    fields = {
        "id": "content-1",
        "prompt_token_ids": tuple(prompt),
        "cache_salt": None,
        "fingerprint": FINGERPRINT,
        "prefix_key": keys.key_at(len(prompt)),
        "have": 0,
    }
    return ContentQuery(**{**fields, **changes})


def answer(node: FakeNode, query: ContentQuery, verify: str = "off") -> dict[str, Any]:
    return asyncio.run(node.holder(verify).answer(query))


def test_holder_when_it_has_a_prefix_then_a_manifest_under_the_readers_id() -> None:
    node = FakeNode()
    run_turn(node.manager, PROMPT[:22], donate=True)
    found = Manifest.from_params(answer(node, query_of(node)), is_carried=False)
    keys = node.manager.prefix_keys(PROMPT)
    assert (found.num_tokens, found.lease_id, found.prefix_key) == (22, "content-1", keys.key_at(22))
    assert found.epoch == node.manager.generations.epoch
    assert node.manager.generations.tag("slots", found.slot_id) == content_tag(found.prefix_key)
    assert node.manager.release_lease("content-1")
    assert answer(node, query_of(node, have=22)) == {"final": True, "remote_num_tokens": 0}
    assert node.manager.stats().leases_active == 0


def test_holder_when_a_stream_was_handed_over_then_its_lease_is_there_without_a_step() -> None:
    node = FakeNode()
    run_turn(node.manager, PROMPT[:30], donate=True)
    holder = node.holder("off")

    async def run() -> dict[str, Any]:
        assert await holder.hand_over("stream", "content-1") == 30
        node.steps_block = True
        return await holder.answer(query_of(node))

    found = Manifest.from_params(asyncio.run(run()), is_carried=False)
    assert (found.num_tokens, found.lease_id) == (30, "content-1")
    assert node.manager.release_lease("content-1")


@pytest.mark.parametrize("change", ["other prompt", "nothing new", "expired"])
def test_holder_when_what_was_handed_over_is_not_what_is_asked_for_then_it_ends(change: str) -> None:
    node = FakeNode()
    run_turn(node.manager, PROMPT[:30], donate=True)
    holder = node.holder("off")
    query = query_of(node, [1] * 40) if change == "other prompt" else query_of(node)

    async def run() -> dict[str, Any]:
        await holder.hand_over("stream", "content-1")
        if change == "expired":
            node.manager.release_lease("content-1")
        return await holder.answer(replace(query, have=30 if change == "nothing new" else 0))

    found = asyncio.run(run())
    if change == "expired":  # as if it had never been
        assert Manifest.from_params(found, is_carried=False).num_tokens == 30
        assert node.manager.release_lease("content-1")
    else:
        assert found == miss_answer()
    assert node.manager.stats().leases_active == 0


def test_holder_when_the_reader_gave_up_before_then_nothing_is_leased() -> None:
    node = FakeNode(called_off=["content-1"])
    run_turn(node.manager, PROMPT[:22], donate=True)
    assert answer(node, query_of(node)) == miss_answer()
    assert node.manager.stats().leases_active == 0


def test_holder_when_the_question_does_not_fit_then_refused_by_name() -> None:
    node = FakeNode()
    with pytest.raises(FingerprintMismatchError, match=f"fingerprint cdcd is of another .* {FINGERPRINT}") as caught:
        answer(node, query_of(node, fingerprint="cdcd"))
    assert (caught.value.status, caught.value.code) == (409, "fingerprint_mismatch")
    for query, param in (
        (query_of(node, cache_salt="another"), "prefix_key"),
        (query_of(node, prompt=[1] * 65), "prompt_token_ids"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            answer(node, query)
        assert refused.value.param == param


def test_holder_when_the_answer_cannot_be_made_then_its_lease_ends() -> None:
    node = FakeNode()
    run_turn(node.manager, PROMPT[:22], donate=True)
    with pytest.raises(AttributeError):
        answer(node, query_of(node), verify="all")  # and there are no bytes to digest
    assert node.manager.stats().leases_active == 0
