"""Who serves a request: one decode node, one prefill node per prompt or none, and pull sources for its prefix.

Pure choice among usable nodes: no waiting, no I/O. What a try has shown to be broken is avoided by the next one.

Life of a placement: 1 ``place``: what the nodes have of the prompts, then the policies; the work is charged to the
nodes at once, so that the next request sees it, 2 ``started``, with the first byte: the prompts are computed, the
estimate is compared with what it took. The first byte of an answer that is no stream is its last: there the prompts
count as computed when the estimate says so, and what is then left of them is in the nodes' reports, 3 ``finished``, on
every way out: nothing of the request is charged any more. A further ``place`` of the same request replaces what the one
before charged.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.config.proxy import ProxyConfig
from common.errors import NodeUnavailableError
from common.images.span import end_of_images
from proxy.nodes.load import Charge
from proxy.nodes.node import Node, NodeRole
from proxy.nodes.pool import NodePool
from proxy.nodes.rates import RateTable
from proxy.placement.cost import MAX_WEIGHED_PROMPTS, Choice, CostChooser, Options
from proxy.placement.estimate import MAX_SOURCES, Estimator, Prompt, Targets
from proxy.placement.guests import LOOK_S, MIN_LEFT_TOKENS, Guests
from proxy.placement.in_progress import Claim, PromptsInProgress
from proxy.placement.policies import Cost, PlacementPolicy, create_policy, pick
from proxy.placement.request import Avoided, Placement, PlacementHeader, PlacementRequest
from proxy.placement.sessions import SessionNodes
from proxy.placement.text_history import TextHistory, TextKeys
from proxy.prefix_index.index import PrefixIndex
from proxy.prefix_index.prompt_keys import PromptKeys

LATE_SHARE = 1.25
"""Times its target from which on an estimated first token is late: estimates miss by so much."""
OVERLOAD_S = 10.0
"""Seconds after one was turned away in which the target itself is the bound, of those with the same target or a shorter
one: else under a lasting load whoever is let in would be just late."""

OnStart = Callable[[str, float, float], None]


@dataclass(slots=True)
class _Open:
    """What a placed request has charged, and which keys the nodes have once it is computed: until then, because they
    are as long as the prompts."""

    request: PlacementRequest  # held, so that its id stays its own
    placement: Placement
    keys: Sequence[PromptKeys | TextKeys]  # of the prompts that were weighed
    charges: Sequence[tuple[Node, Charge]]
    claims: Sequence[Claim]
    placed_s: float
    num_prompt_tokens: int
    number: int
    is_settled: bool = False
    computed_s: float | None = None
    is_started: bool = False
    looked_s: float = 0.0


class Placer:
    """Places requests over one node pool. Called from the event loop only.

    ``index`` says who has what of a tokenised prompt. ``on_start`` gets "remote" or "local", the estimated and the
    actual seconds from placement to the first byte of a stream.
    """

    def __init__(
        self,
        config: ProxyConfig,
        pool: NodePool,
        index: PrefixIndex,
        *,
        on_start: OnStart | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._pool = pool
        self._index = index
        self._on_start = on_start
        self._clock = clock
        self._prefill_policy = create_policy(config.policy)
        self._decode_policy = create_policy(config.decode_policy or config.policy, "--decode-policy")
        # Whether all usable nodes of the role are compared, or the one that its policy picks.
        self._weighs_prefill = isinstance(self._prefill_policy, Cost)
        self._weighs_decode = isinstance(self._decode_policy, Cost)
        self._chooser = CostChooser()
        self._rates = RateTable()
        self._history = TextHistory(clock=clock)
        self._in_progress = PromptsInProgress(clock=clock)
        self._sessions = SessionNodes()
        self._guests = Guests()
        self._open: dict[int, _Open] = {}
        # Answers that are no streams: when their prompts are computed, number, and key in ``_open``.
        self._whole: list[tuple[float, int, int]] = []
        self._numbers = itertools.count()
        self._turned_away = (float("-inf"), 0.0)  # when, and the target

    @property
    def name(self) -> str:
        """Of the policy that decides between local and remote, for metrics."""
        return self._prefill_policy.name

    def node_up(self, node: Node) -> None:
        """A pool's listener (``proxy.nodes.pool.NodeListener``)."""

    def node_gone(self, node: Node) -> None:
        self._history.drop(node.url)

    def place(self, request: PlacementRequest, avoided: Avoided, *, began: Sequence[Node] = ()) -> Placement:
        """Nodes for the next try of ``request``. ``began``: prefill nodes that already compute its prompts; they are
        kept if they are usable.

        Raises NodeUnavailableError when nobody is left who may generate.
        """
        self.finished(request)
        self._settle_whole(self._clock())
        decode = [node for node in self._pool.usable(NodeRole.DECODE) if node not in avoided.decode]
        prefill = [node for node in self._pool.usable(NodeRole.PREFILL) if node not in avoided.prefill]
        if not any(node.is_usable for node in decode):
            others = [node for node in self.generators() if node not in avoided.decode]
            if others and others[0].role is NodeRole.PREFILL:
                # They do both, where they may: nothing is handed over between them.
                decode, prefill = others, []
        if not decode:
            raise self.no_decode_node()
        if not all(node in prefill for node in began):
            began = ()
        keys = self._keys(request)
        nodes = [*decode, *prefill]
        pullable = nodes if self._config.prefix_sources else ()
        prompts = [self._prompt(each, pullable) for each in keys]
        if request.is_local:
            # Computed without a lookup, whoever has it.
            prompts = [Prompt(each.num_tokens, {}) for each in prompts]
        options = self._options(request, prompts, decode, prefill, began, avoided)
        now = self._clock()
        targets = request.targets_left(now)
        session_url = self._sessions.get(request.session_id)
        bonus_s = {session_url: self._config.session_affinity_seconds} if session_url is not None else {}
        estimator = self._estimator(nodes, targets, request.max_answer_tokens, now)
        num_prompts = len(request.prompts)
        choice = self._chooser.choose(prompts, num_prompts, options, estimator, bonus_s=bonus_s)
        sources = self._sources(request, choice, prompts, decode)
        late_s = self._late_s(choice, request.targets.ttft_s, targets.ttft_s, now)
        crosses = choice.crosses or choice.decode.role is NodeRole.PREFILL
        placement = Placement(choice.decode, choice.prefill, sources, choice.ttft_s, crosses, late_s)
        for node, charge in choice.charges:
            node.load.charge(charge, now)
        claims = self._claims(placement, keys, choice)
        num_tokens = sum(prompt.num_tokens for prompt in prompts) * num_prompts // len(prompts)
        number = next(self._numbers)
        self._open[id(request)] = _Open(request, placement, keys, choice.charges, claims, now, num_tokens, number)
        if not request.is_stream:
            heapq.heappush(self._whole, (now + choice.ttft_s, number, id(request)))
        self._sessions.put(request.session_id, choice.decode.url)
        return placement

    def started(self, request: PlacementRequest, *, is_answer: bool) -> None:
        """The first byte is here; ``is_answer``: of what was asked for, not of an error. Requests that are not placed
        are ignored."""
        entry = self._open.get(id(request))
        if entry is None or entry.is_started:
            return
        now = self._clock()
        self._settle_whole(now)
        entry.is_started = True
        # The first byte of what is no stream says nothing of when its prompt was computed.
        self._settle(entry, now, now if is_answer and request.is_stream else None, is_computed=is_answer)
        self._end_claims(entry, is_computed=is_answer)
        if not is_answer:
            return
        placement = entry.placement
        for index, keys in enumerate(entry.keys):
            self._observe(placement.decode.url, keys)
            if not placement.is_local:
                self._observe(placement.prefill[index].url, keys)
        entry.keys = ()
        if self._on_start is not None and request.is_stream:
            way = "local" if placement.is_local else "remote"
            self._on_start(way, placement.ttft_s, now - entry.placed_s)

    def finished(self, request: PlacementRequest) -> None:
        """The request has ended, however. Requests that are not placed are ignored."""
        now = self._clock()
        self._settle_whole(now)
        entry = self._open.pop(id(request), None)
        if entry is None:
            return
        self._settle(entry, now, None, is_computed=False)
        self._end_claims(entry, is_computed=False)
        lasted_s = now - entry.computed_s if entry.is_started and entry.computed_s is not None else None
        for node, charge in entry.charges:
            node.load.end_stream(charge, lasted_s)

    def leaves(self, request: PlacementRequest, may_follow: Callable[[Node], bool], num_output_tokens: int) -> bool:
        """Whether a stream that a prefill node generates, ``num_output_tokens`` so far, is to go on at one of the
        decode nodes that ``may_follow``."""
        entry, now = self._open.get(id(request)), self._clock()
        if entry is None or not entry.is_started or now - entry.looked_s < LOOK_S or not self._guests.may_leave(now):
            return False
        entry.looked_s = now
        self._settle_whole(now)
        node = entry.placement.decode
        usable = [each for each in self._pool.usable(NodeRole.DECODE) if each.is_usable]
        decode = [each for each in usable if each.info.pull and may_follow(each)]
        num_left = None if request.max_answer_tokens is None else request.max_answer_tokens - num_output_tokens
        if node.role is not NodeRole.PREFILL or not decode or (num_left is not None and num_left < MIN_LEFT_TOKENS):
            return False
        estimator = self._estimator([node, *decode], request.targets, num_left, now, leaving=node)
        num_tokens = entry.num_prompt_tokens + num_output_tokens
        [own] = [charge for charged, charge in entry.charges if charged is node]
        return self._guests.leaves(node, (own, entry.placed_s), num_tokens, decode, estimator, now)

    def generators(self) -> list[Node]:
        """Who may be asked to generate now: decode nodes, then prefill nodes where roles are elastic. Decode nodes that
        are only late are asked when nobody else could answer."""
        nodes = list(self._pool.usable(NodeRole.DECODE))
        others = []
        if self._config.elastic and self._weighs_decode:
            others = [node for node in self._pool.usable(NodeRole.PREFILL) if node.may_generate]
        if others:
            nodes = [node for node in nodes if node.is_usable]
        return [*nodes, *others]

    def place_prefill(self, avoided: Avoided) -> Node | None:
        """A prefill node for one prompt; None when none is left."""
        return pick(self._prefill_policy, self._pool.usable(NodeRole.PREFILL), tried=avoided.prefill)

    def place_decode(self, avoided: Avoided) -> Node | None:
        """Somebody else to generate; a prefill node when no decode node is left."""
        nodes = [node for node in self._pool.usable(NodeRole.DECODE) if node.is_usable]
        if all(node in avoided.decode for node in nodes):
            nodes = self.generators()
        return pick(self._decode_policy, nodes, tried=avoided.decode)

    def no_decode_node(self) -> NodeUnavailableError:
        return NodeUnavailableError("; ".join(self._pool.reasons()) or "no decode node is ready")

    def _estimator(
        self,
        nodes: Sequence[Node],
        targets: Targets,
        max_answer_tokens: int | None,
        now: float,
        leaving: Node | None = None,
    ) -> Estimator:
        return Estimator(
            nodes,
            self._rates.rates(self._pool.nodes, now),
            now,
            self._config.stream_delay_weight,
            targets,
            max_answer_tokens,
            leaving,
        )

    # --- what may be chosen

    def _options(
        self,
        request: PlacementRequest,
        prompts: Sequence[Prompt],
        decode: Sequence[Node],
        prefill: Sequence[Node],
        began: Sequence[Node],
        avoided: Avoided,
    ) -> Options:
        """Every usable node for a role whose policy is ``cost``; else the one that its policy picks."""
        if not self._weighs_decode:
            decode = [_picked(self._decode_policy, decode, prompts[0], avoided.decode)]
        header = request.placement_header
        if request.is_local or not prefill or header is PlacementHeader.LOCAL:
            return Options(decode, ())
        if began:
            return Options(decode, [[node] for node in began], may_be_local=False)
        if not self._weighs_prefill:
            picked = [[_picked(self._prefill_policy, prefill, prompt, avoided.prefill)] for prompt in prompts]
            return Options(decode, picked, may_be_local=False)
        is_elastic = self._config.elastic and header is PlacementHeader.AUTO
        generators = [node for node in prefill if node.may_generate and node not in avoided.decode]
        return Options(
            decode,
            [prefill] * len(prompts),
            may_be_local=header is not PlacementHeader.REMOTE,
            is_elastic=is_elastic,
            generators=generators if is_elastic and self._weighs_decode else (),
        )

    # --- who has what

    def _keys(self, request: PlacementRequest) -> list[PromptKeys | TextKeys]:
        """Of the prompts that are weighed."""
        weighed = request.prompts[:MAX_WEIGHED_PROMPTS]
        known = request.prompt_keys[:MAX_WEIGHED_PROMPTS] or [None] * len(weighed)
        return [
            keys if keys is not None else TextKeys.of(request.body, prompt)
            for keys, prompt in zip(known, weighed, strict=True)
        ]

    def _prompt(self, keys: PromptKeys | TextKeys, pullable: Sequence[Node]) -> Prompt:
        if isinstance(keys, TextKeys):
            return Prompt.of(keys.num_tokens, self._history.lookup(keys), pullable)
        coverage = self._index.lookup(keys)
        expected = self._in_progress.lookup(keys, coverage)
        return Prompt.of(keys.num_tokens, coverage, pullable, expected, end_of_images(keys.images))

    def _claims(self, placement: Placement, keys: Sequence[PromptKeys | TextKeys], choice: Choice) -> list[Claim]:
        """Of the prompts that are computed, on whoever computes each."""
        return [
            self._in_progress.begin(placement.computing(index).url, each, known)
            for index, (each, known) in enumerate(zip(keys, choice.known_tokens, strict=False))
            if not isinstance(each, TextKeys)
        ]

    def _observe(self, url: str, keys: PromptKeys | TextKeys) -> None:
        if isinstance(keys, TextKeys):
            self._history.observe(url, keys)
        else:
            self._index.observe(url, keys)

    def _sources(
        self, request: PlacementRequest, choice: Choice, prompts: Sequence[Prompt], decode: Sequence[Node]
    ) -> list[dict[str, Any]]:
        """From whom those who compute the prompts may pull what they lack: whom the estimate names. A policy that knows
        nothing names the node that is to generate, then one more of its kind: a miss costs little."""
        if not self._config.prefix_sources:
            return []
        nodes = list(choice.sources)
        knows_nothing = not nodes and not self._weighs_prefill
        if knows_nothing and choice.decode.info.pull and not request.is_local:
            others = [node for node in decode if node is not choice.decode]
            nodes = [choice.decode, *others] if choice.prefill else others
            nodes = nodes[:MAX_SOURCES] if choice.prefill else nodes[:1]
        sources = [node.pull_source() for node in nodes]
        return [source for source in sources if source is not None]

    def turned_away(self, request: PlacementRequest) -> None:
        """It would have been late behind others (``Placement.late_s``)."""
        at_s, target_s = self._turned_away
        now, own_s = self._clock(), request.targets.ttft_s or 0.0
        if own_s >= target_s or now - at_s >= OVERLOAD_S:
            self._turned_away = (now, own_s)

    def _late_s(self, choice: Choice, target_s: float | None, left_s: float | None, now: float) -> float:
        if target_s is None or left_s is None:
            return 0.0
        at_s, longest_s = self._turned_away
        share = 1.0 if now - at_s < OVERLOAD_S and target_s <= longest_s else LATE_SHARE
        # It would not be sooner done later, on idle nodes or for want of others before it.
        if choice.ttft_s - choice.wait_s > target_s or not choice.wait_s:
            return 0.0
        return choice.ttft_s - left_s if choice.ttft_s > share * left_s else 0.0

    def _settle_whole(self, now: float) -> None:
        while self._whole and self._whole[0][0] <= now:
            due_s, number, key = heapq.heappop(self._whole)
            entry = self._open.get(key)
            if entry is not None and entry.number == number:
                self._settle(entry, now, due_s, is_computed=True)

    def _settle(self, entry: _Open, now: float, computed_s: float | None, *, is_computed: bool) -> None:
        """Nothing happens when that was done before."""
        if entry.is_settled:
            return
        entry.is_settled, entry.computed_s = True, computed_s
        for node, charge in entry.charges:
            if not is_computed:
                node.load.withdraw(charge, entry.placed_s, now)
            node.load.settle(charge, now)

    def _end_claims(self, entry: _Open, *, is_computed: bool) -> None:
        for claim in entry.claims:
            self._in_progress.end(claim, is_computed=is_computed)
        entry.claims = ()


def _picked(policy: PlacementPolicy, nodes: Sequence[Node], prompt: Prompt, tried: Sequence[Node]) -> Node:
    """``nodes`` (not empty) are those that were not tried."""
    prefix_tokens = {
        node.url: have.attention_tokens if node.role is NodeRole.DECODE else have.state_tokens
        for node in nodes
        if (have := prompt.coverage.get(node.url)) is not None
    }
    node = pick(policy, nodes, tried=tried, prefix_tokens=prefix_tokens)
    assert node is not None
    return node
