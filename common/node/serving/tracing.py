"""The ``tandem`` object of a traced response: where a request ran, what was cached, what was moved, where the time
went.

Phases may overlap: a prompt's blocks move while later ones are still computed, so ``transfer`` is what the client waits
for of it, from the moment the whole prompt is known to be computed until its last bytes are here and checked.
``prefill_cached_tokens`` of a prompt that is here as a whole are all of its tokens: its prefill leg is called off.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from common.engine.outputs import RequestOutput
from common.node.pull.handoff import HandoffResult
from common.openai.responses import trace_block
from common.wire.headers import PREFILL_NODE_HEADER, PROXY_SECONDS_HEADER

MAX_HEADER_SECONDS = 1e6
"""Times above this in a proxy's header are taken for nonsense and count as 0."""


class RequestTrace:
    """Collects what is known of each prompt of a request: counts are summed, phases are those of the slowest prompt."""

    def __init__(
        self,
        node_name: str,
        *,
        prefill_node: str | None,
        proxy_queue_s: float,
        elapsed_s: float,
        tokenize_s: float | None = None,
    ) -> None:
        self._node_name = node_name
        self._prefill_node = prefill_node
        self._proxy_queue_s = proxy_queue_s
        self._elapsed_s = elapsed_s
        self._start_s = time.monotonic()
        self._is_remote = False
        self._sums = dict.fromkeys(
            (
                "prefill_cached_tokens",
                "decode_cached_tokens",
                "transferred_bytes",
                "transferred_blocks",
                "transferred_states",
                "draft_tokens",
                "accepted_tokens",
            ),
            0,
        )
        self._seconds: dict[str, float] = {} if tokenize_s is None else {"tokenize": tokenize_s}
        self._num_prompt_tokens = 0

    @classmethod
    def from_headers(cls, headers: Mapping[str, str], node_name: str) -> RequestTrace:
        """``X-Tandem-Proxy-Seconds: QUEUE,ELAPSED,TOKENIZE`` says what passed in the proxy before this leg was sent."""
        queue_s, elapsed_s, tokenize_s, *_ = [*headers.get(PROXY_SECONDS_HEADER, "").split(","), "", ""]
        return cls(
            node_name,
            prefill_node=headers.get(PREFILL_NODE_HEADER),
            proxy_queue_s=_seconds(queue_s),
            elapsed_s=_seconds(elapsed_s),
            tokenize_s=_seconds(tokenize_s) if tokenize_s else None,
        )

    def add_prompt(self, num_tokens: int, result: HandoffResult, output: RequestOutput) -> None:
        self._num_prompt_tokens += num_tokens
        seconds, report = output.seconds, result.report
        if result.is_remote:
            self._is_remote = True
            if report is not None:
                self._sums["prefill_cached_tokens"] += report.cached_tokens
                self._prefill_node = self._prefill_node or report.node
                self._longest("prefill_queue", report.queue_seconds)
                self._longest("prefill", report.prefill_seconds)
        elif seconds is not None:
            self._longest("prefill", seconds.prefill)
        self._sums["decode_cached_tokens"] += output.num_cached_tokens
        self._sums["transferred_bytes"] += output.transferred_bytes
        self._sums["transferred_blocks"] += output.transferred_blocks
        self._sums["transferred_states"] += output.transferred_states
        if seconds is not None:
            self._longest("decode_queue", seconds.queue)
            self._longest("transfer", seconds.transfer)
            self._longest("first_token", seconds.first_token)

    def add_drafts(self, output: RequestOutput) -> None:
        """The last output of a choice."""
        self._sums["draft_tokens"] += output.num_draft_tokens
        self._sums["accepted_tokens"] += output.num_accepted_tokens

    def block(self) -> dict[str, Any]:
        total = self._elapsed_s + time.monotonic() - self._start_s
        return trace_block(
            placement="remote" if self._is_remote else "local",
            prefill_node=self._prefill_node if self._is_remote else None,
            decode_node=self._node_name,
            seconds={"proxy_queue": self._proxy_queue_s, **self._seconds, "total": total},
            **self._sums,
        )

    def report(self, **whole: Any) -> str:
        """What is known when the answer begins, for a header to the proxy: the block without the total time, and
        ``whole``, of an answer that does not come in events."""
        block = {**self.block(), "prompt_tokens": self._num_prompt_tokens, **whole}
        seconds = block["seconds"].items()
        block["seconds"] = {name: round(value, 6) for name, value in seconds if name != "total" and value is not None}
        return json.dumps(block, separators=(",", ":"))

    def _longest(self, phase: str, seconds: float | None) -> None:
        if seconds is not None:
            self._seconds[phase] = max(self._seconds.get(phase, 0.0), seconds)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value <= MAX_HEADER_SECONDS else 0.0
