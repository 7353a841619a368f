"""The other ranks of a node, as rank 0 has them.

Life of one: 1 started, as a child of this process with one connection to it, 2 it says that it is there (its imports
take seconds), 3 all ranks meet and load the model together, 4 it gets the cache's sizes and says that its pools are
ready, 5 it gets plan after plan, and says of each that it has written all of it. Leaves by: the end of its connection,
which is also what a death of rank 0 looks like, so that no rank outlives its node; or a death of its own, which is the
node's (``death``).

Pools of all ranks are in memory that this process has as well: it alone lends them out and reads into them, for each
rank with an agent of its own (``common.node.pull.rank_agents``). So there is one set of generations, the cache
manager's, and no message has to come before another for a reader to see a rank's unit as what it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from common.config.node import NodeConfig
from common.engine.plan import StepPlan
from common.errors import EngineDeadError
from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.spec import KVCacheConfig
from common.models.parallel.group import RankGroup

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Seconds for each of 2, 3 and 4, and for anything that ranks wait for in a step: one that is gone is noticed at once,
one that hangs by ``--engine-hang-seconds`` of rank 0."""
STOP_TIMEOUT_S = 5.0
"""Seconds from the end of the connection to SIGKILL."""
DEATH_WAIT_S = 1.0
"""Seconds that a rank may take from the end of its connections to its own."""
FOLLOWER = "common.node.ranks.follower"


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a rank is told first. ``load``: arguments of ``common.models.loading.loader.load_model``."""

    rank: int
    num_ranks: int
    store_path: str
    load: Mapping[str, Any]
    num_threads: int
    log_level: str
    log_format: str
    name: str


class Ranks:
    """Ranks 1 .. ``size`` - 1. ``close`` ends them; so does the end of this process, whatever ends it, and that of the
    thread which made this."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._memory_fds: list[int] = []
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-ranks-"))
        self._failure: str | None = None
        try:
            for _ in range(1, size):
                self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        own, other = Pipe()
        self._connections.append(own)
        self._memory_fds.append(os.memfd_create("tandem-rank"))
        with contextlib.closing(other):
            fds = other.fileno(), self._memory_fds[-1]
            command = [sys.executable, "-m", FOLLOWER, *map(str, fds)]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds))

    def meet(self, load: Mapping[str, Any], config: NodeConfig) -> RankGroup:
        """Steps 2 and 3 without the model: the group of all ranks, this one's as rank 0. The others load next.

        Raises:
            EngineDeadError: a rank ended, or did not come in time.
        """
        store_path = str(self._folder / "ranks")
        for rank, connection in enumerate(self._connections, 1):
            name = f"{config.node_name} rank {rank}"
            log = (config.log_level, config.log_format)
            self._give(connection, RankStart(rank, self.size, store_path, load, config.num_threads, *log, name))
        self._wait_for_word("to start")
        try:
            return RankGroup(store_path, 0, self.size, START_TIMEOUT_S)
        except RuntimeError as exc:
            raise EngineDeadError(self.death_soon() or f"the ranks did not meet: {exc}") from exc

    def allocate(self, config: KVCacheConfig) -> list[KVStorage]:
        """Step 4: the pools of these ranks, in order, as this process has them. Raises as ``meet``."""
        self.send(config)
        storages = [KVStorage(config, torch.device("cpu"), fd) for fd in self._memory_fds]
        self._wait_for_word("to allocate its pools")
        # All have met. A node that is killed leaves nothing behind.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._close_memory()
        return storages

    def wait_for_step(self) -> None:
        """Returns when every rank has written all that the last plan lets it write: that this process is through it
        does not say so, since each writes on after the last sum of all. Raises as ``meet``."""
        self._wait_for_word("for a step")

    def send(self, message: KVCacheConfig | StepPlan) -> None:
        """To every rank, in the order of the calls.

        Raises:
            EngineDeadError: a rank is gone.
        """
        for connection in self._connections:
            self._give(connection, message)

    @property
    def death(self) -> str | None:
        """Why the ranks compute nothing any more; None: they are well."""
        if self._failure is None:
            for rank, process in enumerate(self._processes, 1):
                if (status := process.poll()) is not None:
                    what = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
                    self._failure = f"rank {rank} of {self.size} {what}"
                    break
        return self._failure

    def fail(self, reason: str) -> None:
        """A step did not run on all ranks: their pools differ, and nothing can be computed from them."""
        self._failure = self.death_soon() or reason

    def close(self) -> None:
        self._close_memory()
        for connection in self._connections:
            connection.close()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for rank, process in enumerate(self._processes, 1):
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.error("rank %d did not end in %.1f s: killed", rank, STOP_TIMEOUT_S)
                process.kill()
                process.wait(STOP_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close_memory(self) -> None:
        while self._memory_fds:
            os.close(self._memory_fds.pop())

    def _wait_for_word(self, what: str) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for rank, connection in enumerate(self._connections, 1):
            try:
                if not connection.poll(max(0.0, deadline_s - time.monotonic())):
                    raise EngineDeadError(f"rank {rank} of {self.size} took longer than {START_TIMEOUT_S:g} s {what}")
                connection.recv()
            except (EOFError, OSError) as exc:
                raise EngineDeadError(self.death_soon() or f"rank {rank} of {self.size} is gone") from exc

    def _give(self, connection: Connection, message: object) -> None:
        try:
            connection.send(message)
        except OSError as exc:
            raise EngineDeadError(self.death_soon() or f"a rank is gone: {exc}") from exc

    def death_soon(self) -> str | None:
        """``death``, of a rank whose connections have ended: it can be waited for a moment later."""
        deadline_s = time.monotonic() + DEATH_WAIT_S
        while (death := self.death) is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return death
