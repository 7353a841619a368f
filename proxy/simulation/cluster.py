"""Requests and nodes of a cluster in simulated time: who is placed where is decided by the proxy's own placement.

Life of a request: 1 ``submit``: placed, 2 remote: its prompt is computed by a prefill node and handed out; local: by
whoever generates; either may pull a beginning from the sources that placement names, 3 its first token, 4 a prefill
node that generates it may hand it over: then what is left is placed, 5 its last token.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from common.config.proxy import ProxyConfig
from common.kv_cache.keys import PrefixKeys, chain_root
from common.kv_cache.sharing.leases import LeasedPrefix
from common.kv_cache.spec import KVCacheConfig
from common.request import Request, SamplingParams
from proxy.nodes.contention import Contention
from proxy.nodes.node import Node, NodeInfo, NodeRole
from proxy.nodes.pool import NodePool
from proxy.placement.estimate import HANDOFF_S, MIN_GAIN_TOKENS, NO_TARGETS, OVERLAP, Targets
from proxy.placement.guests import LOOK_S
from proxy.placement.placer import Placer
from proxy.placement.request import Avoided, Placement, PlacementHeader, PlacementRequest
from proxy.prefix_index.index import PrefixIndex
from proxy.prefix_index.node_cache import NodeCache
from proxy.prefix_index.prompt_keys import PromptKeys
from proxy.simulation.node import HeldPrefix, SimulatedNode
from proxy.simulation.speeds import Speeds

MAX_INDEX_ENTRIES = 10_000_000
"""The index forgets nothing that nodes have: how much it keeps is another question."""


@dataclass(slots=True)
class Served:
    """One request, with the times of its first and last token; one that ``is_refused`` has none."""

    num_prompt_tokens: int
    num_answer_tokens: int
    targets: Targets
    came_s: float
    way: str = ""
    is_refused: bool = False
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.came_s

    @property
    def itl_s(self) -> float:
        """Mean time between two tokens."""
        return (self.last_s - self.first_s) / max(1, self.num_answer_tokens - 1)

    @property
    def is_in_time(self) -> bool:
        if self.is_refused:
            return False
        targets = self.targets
        is_late = targets.ttft_s is not None and self.ttft_s > targets.ttft_s
        return not is_late and (targets.itl_s is None or self.itl_s <= targets.itl_s)


@dataclass(slots=True)
class _Job:
    request: PlacementRequest
    placement: Placement
    served: Served
    keys: PrefixKeys
    prompt: list[int]
    answer: Sequence[int]
    boundaries: tuple[int, ...]
    name: str
    on_end: Callable[[], None]
    was_handed_over: bool = False


class Cluster:
    """
    Attributes:
        served: the requests that have ended.
        num_handed_over: streams that a decode node took over from a prefill node.
        now: simulated seconds.
    """

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        *,
        cache: KVCacheConfig,
        speeds: Mapping[NodeRole, Speeds],
        **config: Any,
    ) -> None:
        """``cache``: of each node, with events. ``speeds``: with ``beside_s`` all nodes share one machine, as the
        proxy has learned before. ``config``: fields of ``ProxyConfig``."""
        self.now = 0.0
        self.served: list[Served] = []
        self.num_handed_over = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._num_open = 0
        self._num_requests = 0
        self._root = chain_root(cache.root_key)
        # As caches are planned for a context: beside the null block one is spare, without which a request that fits
        # waits for ever for the end of its own prompt, which it goes on from.
        held = ((num_blocks - 2) * cache.block_size for num_blocks in cache.num_blocks)
        self._max_tokens = min(cache.geometry.max_position or math.inf, *held)
        self._config = ProxyConfig(decode=("http://unused",), **config)
        self._pool = NodePool(
            [f"http://prefill-{number}" for number in range(num_prefill)],
            [f"http://decode-{number}" for number in range(num_decode)],
            create_client=lambda url: cast("Any", None),  # nobody is called
            poll_interval_s=1.0,
            headers={},
        )
        self._index = PrefixIndex(MAX_INDEX_ENTRIES, clock=self._clock)
        self._placer = Placer(self._config, self._pool, self._index, clock=self._clock)
        self.nodes: dict[str, SimulatedNode] = {}
        self._by_port: dict[int, SimulatedNode] = {}
        labels = tuple(group.label for group in cache.geometry.attention_groups)
        for port, node in enumerate(self._pool.nodes, start=1):
            simulated = SimulatedNode(node, cache, speeds[node.role], self)
            self.nodes[node.url] = self._by_port[port] = simulated
            node.mark_ready(
                NodeInfo(pull=True, host="127.0.0.1", port=port, epoch="1", resume=True, load=simulated.report())
            )
            self._index.start(node.url, NodeCache(cache.block_size, labels, cache.has_state))
        if any(each.beside_s > 0.0 for each in speeds.values()):
            for simulated in self.nodes.values():
                simulated.neighbours = [other for other in self.nodes.values() if other is not simulated]
                decode, beside_s = simulated.speeds.decode, simulated.speeds.beside_s
                simulated.node.contention = Contention((decode.fixed_s, decode.unit_s), beside_s)
        self._report()

    def _clock(self) -> float:
        return self.now

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), action))

    def run(self) -> None:
        """Until nothing is left."""
        self.at(self.now, self._report_again)
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    # --- a request

    def submit(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        targets: Targets = NO_TARGETS,
        boundaries: tuple[int, ...] = (),
        on_end: Callable[[], None] = lambda: None,
    ) -> Served:
        """Now. ``boundaries``: positions in the prompt that are worth a state. ``on_end``: at its last token; a request
        that is turned away, late or longer than an empty node or the model can hold, has none."""
        served = Served(len(prompt), len(answer), targets, self.now)
        if len(prompt) + len(answer) > self._max_tokens:
            return self._refuse(served, "too_long")
        job = self._place(prompt, answer, served, boundaries, on_end)
        placement = job.placement
        served.way = "crossing" if placement.crosses else "local" if placement.is_local else "remote"
        if placement.late_s and self._config.shed_late:
            self._placer.turned_away(job.request)
            self._placer.finished(job.request)
            return self._refuse(served, "shed")
        self._num_open += 1
        self._start(job)
        return served

    def _refuse(self, served: Served, way: str) -> Served:
        served.way, served.is_refused = way, True
        self.served.append(served)
        return served

    def _place(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        served: Served,
        boundaries: tuple[int, ...],
        on_end: Callable[[], None],
        left: Node | None = None,
    ) -> _Job:
        self._num_requests += 1
        self._tell_index()
        keys = PrefixKeys(self._root, self._pool_block_size, prompt)
        prompt_keys = PromptKeys(
            len(prompt),
            keys.block_size,
            tuple(keys.boundary_keys(len(prompt) // keys.block_size)),
            array("I", prompt),
        )
        prompt = list(prompt)
        request = PlacementRequest(
            body={},
            prompts=[prompt],
            is_local=False,
            is_stream=True,
            prompt_keys=(prompt_keys,),
            targets=served.targets,
            max_answer_tokens=len(answer),
            placement_header=PlacementHeader.AUTO if left is None else PlacementHeader.LOCAL,
        )
        placement = self._placer.place(request, Avoided(decode=[] if left is None else [left]))
        name = f"request {self._num_requests}"
        return _Job(request, placement, served, keys, prompt, answer, boundaries, name, on_end)

    def _start(self, job: _Job) -> None:
        if job.placement.is_local:
            self._generate(job, self._source(job, self.nodes[job.placement.decode.url]))
        else:
            self._compute(job)

    @property
    def _pool_block_size(self) -> int:
        return next(iter(self.nodes.values())).manager.config.block_size

    def _compute(self, job: _Job) -> None:
        node = self.nodes[job.placement.prefill[0].url]
        num_tokens = len(job.prompt)
        held = HeldPrefix(node, job.name, num_tokens, job.keys.key_at(num_tokens), has_row=True, is_ready=False)

        def hand_out(_: LeasedPrefix, took_s: float) -> None:
            held.hidden_s = OVERLAP * took_s
            self.at(self.now + HANDOFF_S, held.become_ready)

        request = self._request(job, None, self._source(job, node))
        node.compute(request, job.keys.fork(), lambda: self._generate(job, held), hand_out)

    def _generate(self, job: _Job, held: HeldPrefix | None) -> None:
        node = self.nodes[job.placement.decode.url]
        sampling = SamplingParams(max_tokens=len(job.answer), ignore_eos=True)
        request = self._request(job, sampling, held)
        node.generate(request, job.keys.fork(), job.answer, lambda: self._first(job), lambda: self._last(job))

    def _request(self, job: _Job, sampling: SamplingParams | None, held: HeldPrefix | None) -> Request:
        targets, waited_s = job.served.targets, self.now - job.served.came_s
        return Request(
            job.name,
            job.prompt,
            sampling,
            remote=held,
            is_remote_optional=True,
            arrival_s=self.now,
            ttft_target_s=None if targets.ttft_s is None else targets.ttft_s - waited_s,
            itl_target_s=targets.itl_s,
            semantic_boundaries=job.boundaries,
        )

    def _source(self, job: _Job, reader: SimulatedNode) -> HeldPrefix | None:
        """A lease on what the first source has that has more than the reader."""
        least = reader.num_local_tokens(job.keys) + MIN_GAIN_TOKENS
        for source in job.placement.sources:
            holder = self._by_port[int(source["url"].rpartition(":")[2])]
            if holder is not reader and (held := holder.lease(job.keys.fork(), least)) is not None:
                return held
        return None

    def _first(self, job: _Job) -> None:
        job.served.first_s = job.served.first_s or self.now
        self._placer.started(job.request, is_answer=True)
        if job.placement.decode.role is NodeRole.PREFILL and not job.was_handed_over:
            self.at(self.now + LOOK_S, lambda: self._look(job))

    def _look(self, job: _Job) -> None:
        """Whether a prefill node hands its stream over now."""
        node = self.nodes[job.placement.decode.url]
        num_output = node.num_output_tokens(job.name)
        if not num_output:
            return

        def go_on(num_output: int) -> None:
            self._placer.finished(job.request)
            prompt, answer = [*job.prompt, *job.answer[:num_output]], job.answer[num_output:]
            rest = self._place(prompt, answer, job.served, job.boundaries, job.on_end, left=job.placement.decode)
            rest.was_handed_over = True
            self.num_handed_over += 1
            self._start(rest)

        if self._placer.leaves(job.request, lambda other: True, num_output):
            node.leave(job.name, go_on)
        else:
            self.at(self.now + LOOK_S, lambda: self._look(job))

    def _last(self, job: _Job) -> None:
        job.served.last_s = self.now
        self._placer.finished(job.request)
        self.served.append(job.served)
        self._num_open -= 1
        job.on_end()

    # --- what the proxy learns

    def _tell_index(self) -> None:
        for url, node in self.nodes.items():
            for change in node.take_changes():
                self._index.apply(url, change)

    def _report(self) -> None:
        for node in self.nodes.values():
            neighbours = [other.node for other in node.neighbours]
            node.node.take_load(node.report(), self.now, neighbours)

    def _report_again(self) -> None:
        self._tell_index()
        self._report()
        if self._num_open or self._events:
            self.at(self.now + self._config.health_interval_seconds, self._report_again)
