"""The program of ranks 1 and up: ``python -m common.node.ranks.follower FD MEMORY``, started by rank 0 with one end of
a connection as ``FD`` and the memory of its pools, empty, as ``MEMORY``.

It decides nothing: it loads its part of the model, makes pools of the sizes that it is told, and runs every plan that
comes. What is in the pools rank 0 moves from and to other nodes. What raises ends this program, and so does the end of
the connection, at once and from whatever it does; one that is stopped, or hangs in a driver, is killed by Linux when
rank 0 ends. Signals that ask a service to stop are rank 0's business, which still needs this process while it drains.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from common.engine.model_runner import ModelRunner
from common.engine.plan import StepPlan
from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.spec import KVCacheConfig
from common.models.loading.loader import load_model
from common.models.parallel.group import RankGroup
from common.node.ranks.ranks import START_TIMEOUT_S, RankStart
from common.server.garbage import keep_collections_short
from common.server.serve import end_process, run_main
from common.telemetry.logs import configure_logging

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def run(connection: Connection, memory_fd: int) -> NoReturn:
    """Until rank 0 is gone."""
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), name="rank-0", daemon=True).start()
    start = inbox.get()
    assert isinstance(start, RankStart)
    configure_logging(start.log_level, start.log_format, role="rank", node=start.name)
    torch.set_num_threads(start.num_threads)
    connection.send("here")
    group = RankGroup(start.store_path, start.rank, start.num_ranks, START_TIMEOUT_S)
    loaded = load_model(**start.load, group=group)
    config = inbox.get()
    assert isinstance(config, KVCacheConfig)
    runner = ModelRunner(loaded, KVStorage(config, loaded.device, memory_fd), config)
    os.close(memory_fd)
    connection.send("ready")
    keep_collections_short()
    while True:
        plan = inbox.get()
        assert isinstance(plan, StepPlan)
        runner.forward(plan)
        connection.send("done")


def _read(connection: Connection, inbox: queue.SimpleQueue[object]) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # rank 0 has ended, or wants this one to


def main() -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    status = 1
    try:
        status = run_main(lambda: run(Connection(int(sys.argv[1])), int(sys.argv[2])), program="rank")
    except Exception:  # whatever it is: rank 0 sees that this process is gone
        logger.critical("the rank cannot go on", exc_info=True)
    end_process(status)


if __name__ == "__main__":
    main()
