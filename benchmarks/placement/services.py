"""The services that are measured: nodes of one model, with as much cache memory as a scenario wants."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.placement.sessions import Traffic
from common.geometry.geometry import model_geometry
from common.kv_cache.layout import make_layout
from tests.support.service import Service

BLOCK_SIZE = 16
ROOM = 1.25
"""Times the memory that all sessions need once: they fit, running requests included, but not on every node."""
STATES_PER_SESSION = 2
"""Of a session between two turns: that of its end, and that of its last prompt's."""


@dataclass(frozen=True)
class ChosenModel:
    folder: Path
    vocab_size: int
    chunk: int
    block_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, folder: Path, chunk: int) -> ChosenModel:
        config = json.loads((folder / "config.json").read_text())
        layout = make_layout(model_geometry(config, "float32"), BLOCK_SIZE)
        return cls(folder, int(config["vocab_size"]), chunk, sum(layout.group_block_bytes), layout.slot_bytes)

    def session_flags(self, traffic: Traffic, num_sessions: float) -> list[str]:
        """Memory for ``num_sessions`` at their longest, blocks and states in the proportion they need."""
        blocks = num_sessions * -(-traffic.longest // BLOCK_SIZE) * self.block_bytes
        slots = num_sessions * STATES_PER_SESSION * self.slot_bytes
        share = min(0.99, max(0.01, slots / (blocks + slots)))
        return ["--kv-cache-memory", str(int(blocks + slots)), "--state-memory-share", f"{share:.3f}"]


def _node_flags(model: ChosenModel, max_model_len: int) -> list[str]:
    return [
        *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--max-model-len", str(max_model_len)),
        *("--max-num-batched-tokens", str(model.chunk), "--max-num-seqs", "16", "--log-level", "warning"),
    ]


def session_service(
    model: ChosenModel, traffic: Traffic, policy: str, number: int, share: float | None = None, *, sources: bool = True
) -> Service:
    """``number`` prefill and as many decode nodes with the same memory in all: for every session, or on the decode
    side for a ``share`` of them. ``sources``: nodes hear who has part of a prompt."""
    flags = _node_flags(model, 2 * traffic.longest)
    roomy = model.session_flags(traffic, ROOM * traffic.num_sessions / number)
    decode = roomy if share is None else model.session_flags(traffic, share * traffic.num_sessions / number)
    return Service(
        model.folder,
        prefill_flags=[*flags, *roomy],
        decode_flags=[*flags, *decode],
        proxy_flags=["--policy", policy, "--log-level", "warning", *([] if sources else ["--no-prefix-sources"])],
        num_prefill=number,
        num_decode=number,
    )


def way_service(model: ChosenModel) -> Service:
    flags = [*_node_flags(model, 8192), "--kv-cache-memory", "512MiB"]
    proxy_flags = ["--policy", "cost", "--log-level", "warning"]
    return Service(model.folder, prefill_flags=flags, decode_flags=flags, proxy_flags=proxy_flags)
