"""What one choice costs the proxy: 8 + 8 nodes that all report, a 4,000-token prompt that some of them have."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any, cast

from common.config.proxy import ProxyConfig
from common.wire.cache_events import CHECKPOINT, CacheChange, truncate_key
from proxy.nodes.load import LoadReport, Measured
from proxy.nodes.node import NodeInfo
from proxy.nodes.pool import NodePool
from proxy.placement.placer import Placer
from proxy.placement.request import Avoided, PlacementRequest
from proxy.prefix_index.index import PrefixIndex
from proxy.prefix_index.node_cache import NodeCache
from proxy.prefix_index.prompt_keys import PromptKeys

BLOCK_SIZE = 16


def measure_choice(
    num_prefill: int = 8, num_decode: int = 8, num_tokens: int = 4000, rounds: int = 500
) -> tuple[float, float]:
    """Median CPU seconds of looking the prompt up in the index, and of the whole placement, the lookup included."""
    pool = create_pool(num_prefill, num_decode)
    index = PrefixIndex(1_000_000)
    draw = random.Random(5)
    token_ids = [draw.randrange(30_000) for _ in range(num_tokens)]
    keys = PromptKeys.of_prompt(b"root", BLOCK_SIZE, token_ids)
    for number, node in enumerate(pool.nodes):
        cache = NodeCache(BLOCK_SIZE, ("full",), True)
        num_blocks = 0 if number % 2 else keys.num_blocks * number // len(pool.nodes)
        if num_blocks:
            store(cache, keys, num_blocks)
        index.start(node.url, cache)
    placer = Placer(ProxyConfig(decode=("http://unused",)), pool, index)
    request = PlacementRequest(body={}, prompts=[token_ids], is_local=False, is_stream=True, prompt_keys=(keys,))
    lookups, places = [], []
    for _ in range(rounds):
        started_s = time.thread_time()
        index.lookup(keys)
        looked_up_s = time.thread_time()
        placer.place(request, Avoided())
        places.append(time.thread_time() - looked_up_s)
        lookups.append(looked_up_s - started_s)
        placer.finished(request)
    return statistics.median(lookups), statistics.median(places)


def store(cache: NodeCache, keys: PromptKeys, num_blocks: int) -> None:
    """The first ``num_blocks`` of the prompt and a checkpoint at their end."""
    truncated = tuple(map(truncate_key, keys.boundary_keys))
    cache.apply(CacheChange(True, "full", truncated[1 : num_blocks + 1]))
    end = truncated[num_blocks]
    cache.apply(CacheChange(True, CHECKPOINT, (end,), boundary=end, position=num_blocks * keys.block_size))


def create_pool(num_prefill: int, num_decode: int) -> NodePool:
    """Nodes that are up and have reported, without processes."""
    pool = NodePool(
        [f"http://prefill-{number}" for number in range(num_prefill)],
        [f"http://decode-{number}" for number in range(num_decode)],
        create_client=lambda url: cast("Any", None),  # nobody is called
        poll_interval_s=1.0,
        headers={},
    )
    report = LoadReport(
        prefill=Measured(0.01, 0.0001),
        decode=Measured(0.01, 0.0),
        pull=Measured(0.002, 1e-9),
        kv_bytes_per_token=20_480,
        state_bytes=5e6,
    )
    for node in pool.nodes:
        node.mark_ready(NodeInfo(pull=True, host="127.0.0.1", port=1, epoch="1", load=report))
    return pool
