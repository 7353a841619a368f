"""A discrete-event model of a service under a real ``Placer`` and a real ``PrefixIndex``: no processes, no sleeping.

A node computes prompts one after the other, keeps whole conversations (blocks and a state at their end) up to a number
of tokens, least recently used first out, and tells the index ``EVENT_DELAY_S`` later what changed; its load is reported
once a second. A remote prefill leaves the prompt on both nodes, an answer stays on the node that generated it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from common.config.proxy import ProxyConfig
from common.wire.cache_events import CHECKPOINT, CacheChange, truncate_key
from proxy.nodes.load import LoadReport, Measured
from proxy.nodes.node import Node, NodeInfo, NodeRole
from proxy.nodes.pool import NodePool
from proxy.placement.placer import Placer
from proxy.placement.request import Avoided, Placement, PlacementRequest
from proxy.prefix_index.index import PrefixIndex
from proxy.prefix_index.node_cache import NodeCache
from proxy.prefix_index.prompt_keys import PromptKeys

BLOCK_SIZE = 16
STEP_S = 0.005
TOKEN_S = 0.0002
DECODE_STEP_S = 0.01
PULL_S = 0.004
KV_BYTES = 20_000
STATE_BYTES = 5e6
BYTE_S = 1e-9
EVENT_DELAY_S = 0.03
REPORT_S = 1.0


def keys_of(token_ids: Sequence[int]) -> PromptKeys:
    return PromptKeys.of_prompt(b"root", BLOCK_SIZE, token_ids)


def make_request(token_ids: Sequence[int], **fields: Any) -> PlacementRequest:
    defaults: dict[str, Any] = {
        "body": {"prompt": list(token_ids)},
        "prompts": [list(token_ids)],
        "is_local": False,
        "is_stream": True,
        "prompt_keys": (keys_of(token_ids),),
    }
    return PlacementRequest(**{**defaults, **fields})


def make_pool(num_prefill: int, num_decode: int) -> NodePool:
    """Nodes that are up, can pull, and have reported nothing."""
    pool = NodePool(
        [f"http://prefill-{number}" for number in range(num_prefill)],
        [f"http://decode-{number}" for number in range(num_decode)],
        create_client=lambda url: cast("Any", None),  # nobody is called
        poll_interval_s=1.0,
        headers={},
    )
    for port, node in enumerate(pool.nodes, start=1):
        node.mark_ready(NodeInfo(pull=True, host="127.0.0.1", port=port, epoch="1", load=report()))
    return pool


def report(**fields: Any) -> LoadReport:
    measured: dict[str, Any] = {
        "prefill": Measured(STEP_S, TOKEN_S),
        "decode": Measured(DECODE_STEP_S, 0.0),
        "pull": Measured(PULL_S, BYTE_S),
        "kv_bytes_per_token": KV_BYTES,
        "state_bytes": STATE_BYTES,
    }
    return LoadReport(**{**measured, **fields})


def store(cache: NodeCache, keys: PromptKeys, position: int | None = None) -> None:
    """The first ``position`` tokens (default: all) with a state at their end."""
    position = keys.num_tokens if position is None else position
    truncated = tuple(map(truncate_key, keys.boundary_keys))
    num_blocks = position // keys.block_size
    if num_blocks:
        cache.apply(CacheChange(True, "full", truncated[1 : num_blocks + 1]))
    key = truncate_key(keys.key_at(position))
    cache.apply(CacheChange(True, CHECKPOINT, (key,), truncated[num_blocks], position, True))


@dataclass
class SimNode:
    """``conversations``: what is cached, by conversation: its tokens."""

    node: Node
    capacity_tokens: float
    free_at_s: float = 0.0
    num_computed: int = 0
    num_requests: int = 0
    num_streams: int = 0
    num_tokens: int = 0
    conversations: OrderedDict[int, tuple[int, ...]] = field(default_factory=OrderedDict)

    def depth(self, conversation: int, token_ids: Sequence[int]) -> int:
        """Deepest position of the prompt at which a state is cached here: of its own conversation."""
        known = self.conversations.get(conversation, ())
        depth = len(known) if tuple(token_ids[: len(known)]) == known else 0
        return min(depth, len(token_ids))

    def keep(self, conversation: int, token_ids: Sequence[int]) -> bool:
        """False when something else had to go."""
        self.num_tokens += len(token_ids) - len(self.conversations.get(conversation, ()))
        self.conversations[conversation] = tuple(token_ids)
        self.conversations.move_to_end(conversation)
        is_roomy = self.num_tokens <= self.capacity_tokens
        while self.num_tokens > self.capacity_tokens and len(self.conversations) > 1:
            self.num_tokens -= len(self.conversations.popitem(last=False)[1])
        return is_roomy


@dataclass
class Outcome:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    placements: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


class World:
    """``submit`` requests at times, ``run`` until nothing is left. Roles are kept unless ``config`` says otherwise."""

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        policy: str = "cost",
        *,
        prefill_tokens: float = float("inf"),
        decode_tokens: float = float("inf"),
        **config: Any,
    ) -> None:
        self.now = 0.0
        self.pool = make_pool(num_prefill, num_decode)
        self.index = PrefixIndex(1_000_000, clock=lambda: self.now)
        self.outcome = Outcome()
        self.placer = Placer(
            ProxyConfig(decode=("http://unused",), policy=policy, **{"elastic": False, **config}),
            self.pool,
            self.index,
            on_start=lambda way, expected, actual: self.outcome.ratios.append(actual / expected),
            clock=lambda: self.now,
        )
        self.nodes = {
            node.url: SimNode(node, prefill_tokens if node.role is NodeRole.PREFILL else decode_tokens)
            for node in self.pool.nodes
        }
        self._caches = {url: NodeCache(BLOCK_SIZE, ("full",), True) for url in self.nodes}
        for url, cache in self._caches.items():
            self.index.start(url, cache)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._num_open = 0
        self._known_keys: dict[tuple[int, int], PromptKeys] = {}

    @property
    def prefill(self) -> list[SimNode]:
        return [self.nodes[node.url] for node in self.pool.usable(NodeRole.PREFILL)]

    @property
    def decode(self) -> list[SimNode]:
        return [self.nodes[node.url] for node in self.pool.usable(NodeRole.DECODE)]

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), action))

    def run(self) -> Outcome:
        self.at(self.now + REPORT_S, self._report)
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        return self.outcome

    def _report(self) -> None:
        for sim in self.nodes.values():
            waiting = max(0.0, sim.free_at_s - self.now) / TOKEN_S
            sim.node.load.update(report(num_running=sim.num_streams, num_uncomputed_tokens=int(waiting)), self.now)
        if self._num_open or self._events:
            self.at(self.now + REPORT_S, self._report)

    # --- a request

    def submit(
        self,
        conversation: int,
        token_ids: Sequence[int],
        num_answer_tokens: int,
        then: Callable[[list[int]], None] | None = None,
        **fields: Any,
    ) -> Placement:
        """Now. ``then`` gets prompt and answer when it has ended."""
        token_ids = list(token_ids)
        job = make_request(token_ids, **fields)
        placement = self.placer.place(job, Avoided())
        self._num_open += 1
        decode = self.nodes[placement.decode.url]
        decode.num_requests += 1
        computing = decode if placement.is_local else self.nodes[placement.prefill[0].url]
        if computing is not decode:
            computing.num_requests += 1
        self.outcome.placements["local" if placement.is_local else "remote"] += 1
        begin_s = max(self.now, computing.free_at_s)
        depth = computing.depth(conversation, token_ids)
        pull_s = 0.0
        for name in [each["url"] for each in placement.sources]:
            held = self._named(name, placement).depth(conversation, token_ids)
            if held > depth + 2 * BLOCK_SIZE:
                pull_s = PULL_S + ((held - depth) * KV_BYTES + STATE_BYTES) * BYTE_S
                depth = held
                break
        num_computed = len(token_ids) - depth
        compute_s = STEP_S + num_computed * TOKEN_S
        computing.num_computed += num_computed
        computing.free_at_s = begin_s + pull_s + compute_s
        done_s = computing.free_at_s
        if computing is not decode:
            done_s += PULL_S + STATE_BYTES * BYTE_S + DECODE_STEP_S
        self.outcome.num_prompt_tokens += len(token_ids)
        self.outcome.num_cached_tokens += depth
        self.outcome.ttft_s.append(done_s - self.now)

        def first() -> None:
            self.placer.started(job, is_answer=True)
            self._keep(computing, conversation, token_ids)
            if computing is not decode:
                self._keep(decode, conversation, token_ids)
            decode.num_streams += 1
            self.at(self.now + num_answer_tokens * DECODE_STEP_S, last)

        def last() -> None:
            decode.num_streams -= 1
            self.placer.finished(job)
            self._num_open -= 1
            whole = [*token_ids, *draw.choices(range(1000), k=num_answer_tokens)]
            self._keep(decode, conversation, whole)
            if then is not None:
                then(whole)

        draw = random.Random(conversation * 1000 + len(token_ids))
        self.at(done_s, first)
        return placement

    def _named(self, url: str, placement: Placement) -> SimNode:
        port = int(url.rpartition(":")[2])
        return next(sim for sim in self.nodes.values() if sim.node.info.port == port)

    def _keep(self, sim: SimNode, conversation: int, token_ids: Sequence[int]) -> None:
        is_roomy = sim.keep(conversation, token_ids)
        kept = [] if is_roomy else list(sim.conversations.items())

        def tell() -> None:
            if is_roomy:
                store(self._caches[sim.node.url], self._keys(conversation, token_ids))
                return
            cache = self._caches[sim.node.url] = NodeCache(BLOCK_SIZE, ("full",), True)
            for number, each in kept:
                store(cache, self._keys(number, each))
            self.index.start(sim.node.url, cache)

        self.at(self.now + EVENT_DELAY_S, tell)

    def _keys(self, conversation: int, token_ids: Sequence[int]) -> PromptKeys:
        """Conversations only grow: the number and the length name the tokens."""
        name = (conversation, len(token_ids))
        if name not in self._known_keys:
            self._known_keys[name] = keys_of(token_ids)
        return self._known_keys[name]
