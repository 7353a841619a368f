"""A pair of engines of which either is seen, and reads, as a node of several ranks would.

The engines themselves are not divided. What a divided prefill side holds is cut by hand into an arena a rank whenever
its peer connects; what the ranks of a divided decode side have read is joined by hand into the engine's own pools
before the engine sees it. In between are real announcements, plans and pulls.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import TandemError
from common.kv_cache.layout_document import NodeLayout
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.node.pull.rank_puller import RankPuller
from common.node.regions import SLOTS, block_region
from common.transfer.announcement import join_ranks
from common.transfer.backend import TransferBackend
from common.transfer.joint_puller import JointPuller, PullRunner
from common.transfer.nixl.backend import NixlBackend
from common.transfer.nixl.bindings import load_bindings
from common.transfer.puller import Puller
from common.transfer.regions import Peer
from common.transfer.testing.inprocess import InProcessBackend
from tests.support.pair import PATIENCE_S, OnlyPeer, Pair, Side
from tests.support.ranks import RankMemory
from tests.support.shards_by_hand import unit_by_hand
from tests.support.transfer_sites import NIXL_PACKAGES

Bytes = NDArray[np.uint8]


class SideRanks:
    """The ranks of one side; one rank: the side itself. ``order``: in which they are announced."""

    def __init__(self, side: Side, tp: int, new_backend: Callable[..., TransferBackend]) -> None:
        self._side = side
        self.tp = tp
        self.order = list(range(tp))
        self.memories: list[RankMemory] = []
        self.backends = [side.backend]
        self._announced = [side.backend.metadata()]
        if tp == 1:
            return
        cache, generations = side.model.cache_config, side.model.manager.generations
        layout = NodeLayout(cache.geometry, cache.block_size, tp)
        self.memories = [
            RankMemory(cache.geometry, cache.block_size, rank, tp, epoch=generations.epoch, num_units=cache.pool_sizes)
            for rank in range(tp)
        ]
        self.backends = []
        for memory in self.memories:
            backend = new_backend(
                engine_id=side.name, epoch=memory.epoch, fingerprint=side.backend.fingerprint, layout=layout
            )
            backend.register(list(memory.regions.values()))
            self.backends.append(backend)
        self._announced = [backend.metadata() for backend in self.backends]

    @property
    def announcement(self) -> bytes:
        """The same as long as the side lives, whatever has become of a rank."""
        return join_ranks([self._announced[rank] for rank in self.order])

    def cut(self) -> None:
        """Every rank gets its share of all that the engine has, and the engine's generations."""
        for memory in self.memories:
            for name, arena in self._arenas().items():
                mine, whole = self._places(memory, name)
                memory.pools[name][:, mine] = arena[:, whole]
                table = memory.generations[name]
                address = self._side.model.manager.generations.address(name)
                ctypes.memmove(table, address, ctypes.sizeof(table))

    def join(self, plan: PullPlan) -> None:
        """The engine gets what the ranks have of the units that were pulled."""
        units = {block_region(group): [local for _, local in pairs] for group, pairs in enumerate(plan.pairs)}
        units[SLOTS] = [plan.slot_id] if plan.slot_id else []
        for memory in self.memories:
            for name, arena in self._arenas().items():
                mine, whole = self._places(memory, name)
                for unit in units[name]:
                    arena[unit, whole] = memory.pools[name][unit, mine]

    def close(self) -> None:
        for backend in self.backends:
            if backend is not self._side.backend:
                backend.close()

    def _arenas(self) -> dict[str, Bytes]:
        storage = self._side.model.storage
        named = {block_region(group): arena for group, arena in enumerate(storage.block_arenas)}
        return {name: arena.numpy() for name, arena in {**named, SLOTS: storage.slot_arena}.items() if arena.numel()}

    @staticmethod
    def _places(memory: RankMemory, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bytes of the rank's unit, and where the same ones are in the engine's."""
        share = memory.share[name]
        places = np.flatnonzero(unit_by_hand(memory.units[name], 0, 1) >= 0)
        mine = np.flatnonzero(share >= 0)
        return mine, places[share[mine]]


class RankedPeer(OnlyPeer):
    """The prefill side's ranks, as all ranks of the decode side know them: from one handshake, until it is
    forgotten."""

    def __init__(self, pair: DividedPair) -> None:
        super().__init__(pair.prefill, pair.decode.backend)
        self._pair = pair
        self._known: Peer | None = None

    async def meet(self, url: str) -> Peer:
        pair = self._pair
        pair.holder.cut()
        if self._known is None:
            peers = [backend.add_peer(pair.holder.announcement) for backend in pair.local.backends]
            self._known = peers[0]
        if pair.on_connect is not None:
            pair.on_connect()
        return self._known

    def forget(self, url: str) -> None:
        self._known = None


class DividedPair(Pair):
    """``holder_tp``, ``local_tp``: how many ranks the prefill and the decode side have. ``on_connect``: called when the
    decode side has connected, before it reads. ``planned``: whose shares the local ranks read."""

    def __init__(
        self,
        family: str,
        holder_tp: int,
        local_tp: int,
        *,
        over_nixl: bool = False,
        timeout_s: float = PATIENCE_S,
        planned: Sequence[int] | None = None,
        **flags: Any,
    ) -> None:
        self._tp = holder_tp, local_tp
        self._over_nixl = over_nixl
        self.pull_timeout_s = timeout_s
        self.on_connect: Callable[[], None] | None = None
        self._planned = range(local_tp) if planned is None else planned
        self.num_terminal = 0
        self._rank_pullers: list[Puller] = []
        super().__init__(family, **flags)

    def new_backend(self, *, backends: Any = (), enter_thread: Any = None, **identity: Any) -> TransferBackend:
        if self._over_nixl:
            return NixlBackend(**identity, bindings=load_bindings(NIXL_PACKAGES))
        return super().new_backend(**identity)

    def _new_peers(self) -> OnlyPeer:
        holder_tp, local_tp = self._tp
        self.holder = SideRanks(self.prefill, holder_tp, self.new_backend)
        self.local = SideRanks(self.decode, local_tp, self.new_backend)
        return RankedPeer(self)

    def _new_pulls(self) -> PullRunner:
        if self.local.tp == 1:
            return super()._new_pulls()
        cache = self.decode.model.cache_config
        self._rank_pullers = [Puller(backend, name=f"puller-{n}") for n, backend in enumerate(self.local.backends)]
        return JointPuller(
            [
                RankPuller(puller, cache.geometry, cache.block_size, rank=rank, tensor_parallel_size=self.local.tp)
                for puller, rank in zip(self._rank_pullers, self._planned, strict=True)
            ]
        )

    def _arrived(self, damage: Callable[[PullPlan], None] | None, plan: PullPlan) -> None:
        self.local.join(plan)
        super()._arrived(damage, plan)

    def agent_name(self, rank: int) -> str:
        """Of a rank of the prefill side; in process only."""
        backend = self.holder.backends[rank]
        assert isinstance(backend, InProcessBackend)
        return backend.name

    def failure(self, name: str, prompt: Sequence[int], reason: str) -> TandemError | None:
        """What a request ends with whose pull fails for ``reason`` and that may not be computed."""
        manifest = self.hand_out({name: prompt})[name]
        handoff = self._handoffs.parse(manifest.to_params(), is_from_peer=False)
        self._runner.run(self._pull(name, handoff, prompt, 1, refused=reason))
        (output,) = self.decode.core.step()
        return output.error

    def on_terminal(self, seq_id: str) -> None:
        self.decode.core.end_quarantine(seq_id)
        self.num_terminal += 1

    def until_terminal(self, num_pulls: int) -> None:
        """Returns when so many reads that outlived their pulls have ended."""

        async def wait() -> None:
            async with asyncio.timeout(PATIENCE_S):
                while self.num_terminal < num_pulls:
                    await asyncio.sleep(0.001)

        self._runner.run(wait())

    def close(self) -> None:
        self._runner.run(self.bridge.close())
        for puller in self._rank_pullers:
            assert puller.close()
        super().close()
        self.holder.close()
        self.local.close()
