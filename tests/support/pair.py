"""A prefill engine and a decode engine in one process: the nodes' own prefill legs and handoffs over the in-process
transfer.

What is left out is HTTP, the engine's thread, liveness and the renewal of leases; manifests and queries go through
their wire forms. The pair owns the event loop, and both cores are stepped on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from common.config.node import NodeConfig
from common.engine.outputs import RequestOutput
from common.errors import TransferError
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.metrics.metrics import Metrics
from common.metrics.table import Role
from common.node import runtime
from common.node.lend.manifest_builder import ManifestBuilder
from common.node.lend.prefill_leg import PrefillLeg
from common.node.lend.rendezvous import RendezvousTable
from common.node.pull.engine_bridge import EngineBridge
from common.node.pull.handoff import Handoff, HandoffReader, HandoffResult
from common.node.pull.manifest_stream import ManifestStream, ReadablePrefix
from common.node.pull.peer_reader import PeerReader
from common.node.pull.prefix_reader import FinishedPull, PulledPrefix
from common.node.pull.pull_task import RemotePrefix
from common.node.pull.rank_puller import RankPuller
from common.request import Request, SamplingParams
from common.transfer.backend import TransferBackend
from common.transfer.joint_puller import PullRunner
from common.transfer.puller import Puller
from common.transfer.regions import Peer
from common.transfer.testing.inprocess import InProcessBackend, InProcessHub
from common.wire.handoff import Rendezvous
from common.wire.manifest import Manifest
from common.wire.pull import ManifestCheck, RendezvousQuery, check_answer, nothing_new_answer, parse_query
from common.wire.routes import MANIFEST_CHECK_ROUTE, PULL_ROUTE
from tests.support.models import checkpoint
from tests.support.shared_models import load_node_model

PATIENCE_S = 60.0
HOST, PORT = "127.0.0.1", 1


@dataclass(frozen=True)
class Answer:
    """What the decode side produced for one request, from what the prefill side handed out; how it was pulled."""

    manifest: Manifest
    outputs: list[RequestOutput]
    pull: FinishedPull

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [entry.logprob for output in self.outputs for entry in output.logprobs or ()]

    @property
    def prefill_cached_tokens(self) -> int:
        assert self.manifest.prefill is not None
        return self.manifest.prefill.cached_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the decode side neither computed nor pulled."""
        return self.outputs[-1].num_cached_tokens

    @property
    def transferred(self) -> tuple[int, int, int]:
        """Bytes, blocks, states."""
        last = self.outputs[-1]
        return last.transferred_bytes, last.transferred_blocks, last.transferred_states


class Side:
    """One node's engine, pools and transfer backend.

    Made on the event loop. ``new_backend``: of ``NixlBackend``'s arguments. ``pace(num_tokens)``: awaited before the
    step after one that finished blocks.
    """

    def __init__(self, name: str, new_backend: Callable[..., TransferBackend], config: NodeConfig) -> None:
        def call_off(request_id: str) -> None:
            raise AssertionError(f"{request_id}: no test here calls a leg off")

        self.name = name
        self.config = config
        self.model = load_node_model(config)
        self.core = runtime.create_core(config, self.model)
        with patch.object(runtime, "NixlBackend", new_backend):
            self.backend = runtime.create_backend(config, self.model, name)
        self.engine: Any = SimpleNamespace(generate=self._generate, call=self._call)
        self.rendezvous = RendezvousTable(is_in_use=lambda request_id: False, call_off=call_off)
        self.manifests = ManifestBuilder(
            engine_id=name,
            epoch=self.model.manager.generations.epoch,
            host=HOST,
            port=PORT,
            fingerprint=self.backend.fingerprint,
            lease_seconds=config.kv_lease_seconds,
            verify=config.kv_transfer_verify,
            storage=self.model.storage,
        )
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.pace: Callable[[int], Awaitable[None]] | None = None

    async def _generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """A prefill leg's outputs; legs that start together share the engine's steps."""
        self.core.add_request(request)
        await asyncio.sleep(0)
        while True:
            while not self.outputs.get(request.request_id):
                assert self.core.has_work(), f"{request.request_id} never ended"
                self.step()
            output = self.outputs[request.request_id].pop(0)
            yield output
            if output.handoff is not None:
                return
            if self.pace is not None and output.progress is not None:
                await self.pace(output.progress.num_tokens)

    async def _call(self, function: Callable[[], Any]) -> Any:
        return function()

    def step(self) -> None:
        for output in self.core.step():
            assert output.error is None, output.error
            self.outputs.setdefault(output.request_id, []).append(output)

    def held(self) -> tuple[int, int, int]:
        """Units that somebody holds in all pools, leases and sequences: all 0 when nothing runs."""
        assert self.model.manager.check() == []
        stats = self.model.manager.stats()
        pools = (stats.blocks, stats.slots)
        busy = sum(n for pool in pools for state, n in pool.items() if state not in ("free", "cached"))
        return busy, stats.leases_active, stats.num_sequences


class OnlyPeer:
    """``PeerDirectory`` and ``RemoteLeases`` of the decode side: the prefill side is its one peer, asked directly."""

    def __init__(self, peer: Side, backend: TransferBackend) -> None:
        self.liveness = SimpleNamespace(subscribe=lambda url, on_lost: lambda: None)
        self._peer = peer
        self._backend = backend
        self._held: set[str] = set()
        self.returning: list[asyncio.Task[None]] = []

    def check_allowed(self, url: str, *, is_from_peer: bool) -> None:
        assert url == f"http://{HOST}:{PORT}"

    async def meet(self, url: str) -> Peer:
        return self._backend.add_peer(self._peer.backend.metadata())

    async def connect(self, url: str, engine_id: str, epoch: int) -> Peer:
        peer = await self.meet(url)
        assert (peer.engine_id, peer.epoch) == (engine_id, epoch)
        return peer

    async def query(self, url: str, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if path == MANIFEST_CHECK_ROUTE:
            return check_answer(self._peer.manifests.is_mine(ManifestCheck.from_body(_over_the_wire(body))))
        assert path == PULL_ROUTE
        query = parse_query(_over_the_wire(body), vocab_size=self._peer.model.cache_config.geometry.vocab_size)
        assert isinstance(query, RendezvousQuery)
        found = await self._peer.rendezvous.wait(query.id, query.after, query.wait_seconds, query.have)
        return _over_the_wire(nothing_new_answer(query.after) if found is None else found.to_params())

    def forget(self, url: str) -> None:
        """Nothing is remembered of it."""

    def hold(self, lease_id: str, url: str, lease_seconds: float) -> None:
        self._held.add(lease_id)

    def call_off(self, lease_id: str, url: str) -> None:
        self._peer.rendezvous.release(lease_id, may_come=True)

    def release(self, lease_id: str) -> bool:
        if lease_id not in self._held:
            return False
        self._held.remove(lease_id)
        self._peer.rendezvous.release(lease_id)
        assert self._peer.model.manager.release_lease(lease_id)
        return True

    def give_back(self, lease_id: str, confirm: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            with contextlib.suppress(TransferError):  # it was not made like this
                await confirm()
                self._held.discard(lease_id)
                self._peer.model.manager.release_lease(lease_id)  # again, if the test has

        self.returning.append(asyncio.create_task(run()))


class WatchedStream(ManifestStream):
    """A manifest stream whose reader is watched: who asks for more than N tokens has read that many."""

    def __init__(self, manifests: ManifestStream) -> None:
        self._manifests = manifests
        self._num_read = 0
        self._asked = asyncio.Event()

    @property
    def final(self) -> ReadablePrefix | None:
        return self._manifests.final

    async def confirmed(self) -> None:
        await self._manifests.confirmed()

    async def beyond(self, num_tokens: int) -> ReadablePrefix:
        self._num_read = num_tokens
        self._asked.set()
        return await self._manifests.beyond(num_tokens)

    def close(self) -> None:
        self._manifests.close()

    async def read(self, num_tokens: int) -> None:
        """Returns when the first ``num_tokens`` tokens are read, as far as anybody wants them."""
        while self._num_read < num_tokens:
            self._asked.clear()
            await self._asked.wait()


class Pair:
    """Owns both sides, the puller of the decode side and the event loop; ``close`` it."""

    pull_timeout_s = PATIENCE_S

    def __init__(self, family: str, **flags: Any) -> None:
        self.hub = InProcessHub()
        common = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "kv_cache_memory": 16 << 20}
        self._config = NodeConfig(model=str(checkpoint(family)), host=HOST, port=PORT, **{**common, **flags})
        self._runner = asyncio.Runner()
        self._runner.run(self._start())

    async def _start(self) -> None:
        self.prefill, self.decode = (Side(name, self.new_backend, self._config) for name in ("prefill", "decode"))
        self._puller = Puller(self.decode.backend)
        self._peer = self._new_peers()
        peers: Any = self._peer
        model, config = self.decode.model, self._config
        self.metrics = Metrics(Role.DECODE)
        self._handoffs = HandoffReader(
            manager=model.manager,
            engine=self.decode.engine,
            peers=peers,
            leases=peers,
            loaded=model.loaded,
            metrics=self.metrics,
            fingerprint=self.decode.backend.fingerprint,
            fails_when_lost=config.kv_load_failure_policy == "fail",
        )
        prefill = self.prefill
        self._leg = PrefillLeg(
            prefill.name,
            manager=prefill.model.manager,
            engine=prefill.engine,
            rendezvous=prefill.rendezvous,
            manifests=prefill.manifests,
        )
        self.reader = PeerReader(
            self._new_pulls(),
            peers,
            self.pull_timeout_s,
            None,
            metrics=self.metrics,
            slot_bytes=model.storage.layout.slot_bytes,
        )
        self.bridge = EngineBridge(self, {RemotePrefix: self.reader})
        self.decode.core.pull_with(self.bridge)
        self.bridge.open()
        self._pulls: asyncio.Queue[tuple[str, FinishedPull]] = asyncio.Queue()

    # --- what nodes of ranks have otherwise

    def new_backend(self, *, backends: Any = (), enter_thread: Any = None, **identity: Any) -> TransferBackend:
        return InProcessBackend(self.hub, **identity)

    def _new_peers(self) -> OnlyPeer:
        return OnlyPeer(self.prefill, self.decode.backend)

    def _new_pulls(self) -> PullRunner:
        cache = self.decode.model.cache_config
        return RankPuller(self._puller, cache.geometry, cache.block_size)

    def _arrived(self, damage: Callable[[PullPlan], None] | None, plan: PullPlan) -> None:
        if damage is not None:
            damage(plan)

    def close(self) -> None:
        self._runner.run(self.bridge.close())
        self._puller.close()
        for side in (self.prefill, self.decode):
            side.backend.close()
        self._runner.close()

    # --- common.node.pull.engine_bridge.PullListener

    def on_outcome(self, seq_id: str, prefix: PulledPrefix, result: FinishedPull) -> None:
        self._pulls.put_nowait((seq_id, result))

    def on_terminal(self, seq_id: str) -> None:
        raise AssertionError(f"the pull of {seq_id} was not terminal")

    # --- requests

    def ask(self, prompts: Mapping[str, Sequence[int]], num_tokens: int) -> dict[str, Answer]:
        """Both legs, one after the other."""
        return self.take_in(self.hand_out(prompts), num_tokens)

    def hand_out(self, prompts: Mapping[str, Sequence[int]]) -> dict[str, Manifest]:
        """The prefill legs of all prompts at once: each is computed and leased out."""

        async def run() -> list[Manifest]:
            return await asyncio.gather(*(self._hand_out(name, prompt) for name, prompt in prompts.items()))

        return {manifest.request_id: manifest for manifest in self._runner.run(run())}

    async def _hand_out(self, name: str, prompt: Sequence[int], rendezvous_id: str | None = None) -> Manifest:
        request = Request(
            request_id=rendezvous_id or name,
            prompt_token_ids=list(prompt),
            sampling=None,
            is_remote_optional=True,
            arrival_s=time.monotonic(),
            wants_progress=rendezvous_id is not None,
        )
        manifest, _ = await self._leg.run(request)
        return manifest

    def take_in(
        self,
        manifests: Mapping[str, Manifest],
        num_tokens: int,
        damage: Callable[[PullPlan], None] | None = None,
        *,
        refused: str = "",
    ) -> dict[str, Answer]:
        """The decode legs of all manifests at once: pulled one after another, decoded together, greedily.

        ``damage`` is done to what arrived before the engine takes it. ``refused``: why all pulls have to fail.
        """
        self.reader.after_read = partial(self._arrived, damage)

        async def run() -> dict[str, FinishedPull]:
            pulls = {}
            for name, manifest in manifests.items():
                handoff = self._handoffs.parse(_over_the_wire(manifest.to_params()), is_from_peer=False)
                pulls[name] = await self._pull(name, handoff, manifest.prompt_token_ids, num_tokens, refused=refused)
            return pulls

        pulls = self._runner.run(run())
        return self._decode(manifests, pulls)

    def lose(self, name: str, prompt: Sequence[int], *, at_once: bool) -> HandoffResult:
        """A handoff of which nothing can be pulled: of a manifest, whose lease is given back; or of a leg that is yet
        to come, which is called off."""

        async def run() -> HandoffResult:
            handoff: Handoff = Rendezvous(HOST, PORT, name)
            if not at_once:
                params = _over_the_wire((await self._hand_out(name, prompt)).to_params())
                handoff = self._handoffs.parse(params, is_from_peer=False)
            try:
                async with self._handoffs.read(handoff, prompt, None) as found:
                    return found
            finally:
                await asyncio.gather(*self._peer.returning)

        return self._runner.run(run())

    def hand_out_late(self, name: str, prompt: Sequence[int]) -> None:
        """The prefill leg of a rendezvous that was called off before it came."""
        self._runner.run(self._hand_out(name, prompt, rendezvous_id=name))

    def ask_decode_side(self, name: str, prompt: Sequence[int], num_tokens: int) -> list[RequestOutput]:
        """The decode side alone, with what it has."""
        self.decode.core.add_request(Request(name, list(prompt), _greedy(num_tokens)))
        while self.decode.core.has_work():
            self.decode.step()
        return self.decode.outputs.pop(name)

    def end_lease(self, name: str) -> None:
        """A lease that no decode side has taken over."""
        assert self.prefill.model.manager.release_lease(name)

    def ask_at_once(self, name: str, prompt: Sequence[int], num_tokens: int) -> Answer:
        """Both legs together: blocks are pulled as they are finished, each part before the next step."""

        async def run() -> tuple[Manifest, FinishedPull]:
            reader: asyncio.Future[WatchedStream] = asyncio.get_running_loop().create_future()

            async def pace(num_tokens: int) -> None:
                async with asyncio.timeout(PATIENCE_S):
                    await (await reader).read(num_tokens)

            self.prefill.pace = pace
            leg = asyncio.create_task(self._hand_out(name, prompt, rendezvous_id=name))
            pull = await self._pull(name, Rendezvous(HOST, PORT, name), prompt, num_tokens, reader)
            return await leg, pull

        manifest, pull = self._runner.run(run())
        self.prefill.pace = None
        return self._decode({name: manifest}, {name: pull})[name]

    async def _pull(
        self,
        name: str,
        handoff: Handoff,
        prompt: Sequence[int],
        num_tokens: int,
        reader: asyncio.Future[WatchedStream] | None = None,
        refused: str = "",
    ) -> FinishedPull:
        async with self._handoffs.read(handoff, prompt, None) as found:
            assert found.prefix is not None
            manifests = WatchedStream(found.prefix.manifests)
            if reader is not None:
                reader.set_result(manifests)
            remote = replace(found.prefix, manifests=manifests)
            self.decode.core.add_request(Request(name, list(prompt), _greedy(num_tokens), remote=remote))
            while self.decode.core.num_waiting:
                self.decode.step()
            async with asyncio.timeout(PATIENCE_S):
                seq_id, result = await self._pulls.get()
            assert (result.ok, result.reason) == (not refused, refused)
            self.decode.core.finish_pull(seq_id, result)
            return result

    def _decode(self, manifests: Mapping[str, Manifest], pulls: Mapping[str, FinishedPull]) -> dict[str, Answer]:
        while self.decode.core.has_work():
            self.decode.step()
        return {name: Answer(manifests[name], self.decode.outputs.pop(name), pull) for name, pull in pulls.items()}


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)


def _over_the_wire(value: dict[str, Any]) -> dict[str, Any]:
    """What JSON leaves of it."""
    return dict(json.loads(json.dumps(value)))
