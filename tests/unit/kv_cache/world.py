"""A cache with pretend bytes: what each block row and slot holds is modelled as tokens, so that a test can ask whether
a sequence would have read the right thing. Steps run as the engine runs them: copies, then reads and writes, then
``complete_step``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.results import PromptEnd, PullPlan
from common.kv_cache.spec import (
    AttentionLayerSpec,
    KVCacheConfig,
    ModelGeometry,
    StateLayerSpec,
    StateTensorSpec,
)

GARBAGE = -1


def make_geometry(*, attention: bool = True, state: bool = True) -> ModelGeometry:
    tensors = (StateTensorSpec("conv", (4, 3), "float32"), StateTensorSpec("recurrent", (2, 2, 2), "float32"))
    return ModelGeometry(
        model_type="test",
        num_layers=2,
        hidden_size=8,
        vocab_size=100,
        max_position=0,
        attention_layers=(AttentionLayerSpec(1, 1, 4, 4, "float32"),) if attention else (),
        state_layers=(StateLayerSpec(0, "mamba2", tensors),) if state else (),
    )


def make_config(
    *,
    num_blocks: int = 64,
    num_slots: int = 16,
    block_size: int = 4,
    attention: bool = True,
    state: bool = True,
    caching: bool = True,
    mode: str = "auto",
    max_checkpoints: int = 65536,
) -> KVCacheConfig:
    """Pool sizes without the null entry."""
    return KVCacheConfig(
        geometry=make_geometry(attention=attention, state=state),
        block_size=block_size,
        num_blocks=num_blocks + 1 if attention else 1,
        num_slots=num_slots + 1 if state else 1,
        root_key=b"test model",
        enable_prefix_caching=caching,
        mamba_cache_mode=mode,
        max_checkpoints=max_checkpoints,
    )


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class World:
    """The manager with a shadow of every byte that matters."""

    config: KVCacheConfig
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.manager = KVCacheManager(self.config, clock=self.clock)
        size = self.config.block_size
        # row r of a block holds the token prefix that produced its K/V; a slot holds the token prefix it summarises
        self.rows: list[list[object]] = [[GARBAGE] * size for _ in range(self.config.num_blocks)]
        self.slots: list[object] = [GARBAGE] * self.config.num_slots
        self.slots[0] = ()
        self.tokens: dict[str, list[int]] = {}

    def check(self) -> None:
        assert self.manager.check() == []

    def keys(self, token_ids: Sequence[int], salt: str | None = None) -> PrefixKeys:
        return self.manager.prefix_keys(token_ids, salt)

    # -- running ------------------------------------------------------------------------------------------------------

    def admit(self, seq_id: str, token_ids: Sequence[int]) -> bool:
        keys = self.keys(token_ids)
        hit = self.manager.lookup(keys, len(token_ids))
        if not self.manager.admit(seq_id, keys, hit, len(token_ids)):
            return False
        self.tokens[seq_id] = list(token_ids)
        is_exact = self.manager.sequence(seq_id).num_computed_tokens == len(token_ids)
        assert is_exact == (hit.output_row is not None)
        assert hit.output_row in (None, self.row(token_ids))
        return True

    def run_copies(self) -> None:
        copies = self.manager.take_block_copies()
        assert not {source for source, _ in copies} & {destination for _, destination in copies}
        for source, destination in copies:
            self.rows[destination] = list(self.rows[source])

    def step(self, seq_id: str, end: int, wanted: Collection[int] = ()) -> None:
        """Compute positions up to ``end``: read the past, write the new, complete."""
        view = self.manager.sequence(seq_id)
        start, tokens = view.num_computed_tokens, self.tokens[seq_id]
        saves = self.manager.plan_saves(seq_id, start, end, wanted)
        self.run_copies()
        self.assert_readable(seq_id)
        size = self.config.block_size
        if self.config.has_attention:
            for position in range(max(start, view.write_from), end):
                block_id = view.block_ids[position // size]
                assert block_id != 0
                self.rows[block_id][position % size] = tuple(tokens[: position + 1])
        if self.config.has_state:
            for position, slot_id in saves:
                self.slots[slot_id] = tuple(tokens[:position])
            assert view.dst_slot != 0
            self.slots[view.dst_slot] = tuple(tokens[:end])
        self.manager.complete_step(seq_id, end)

    def assert_readable(self, seq_id: str) -> None:
        """The sequence would read its own past: every row below, and the state at exactly its position."""
        view, tokens = self.manager.sequence(seq_id), self.tokens[seq_id]
        start, size = view.num_computed_tokens, self.config.block_size
        if self.config.has_attention:
            for position in range(max(start, view.write_from)):
                row = self.rows[view.block_ids[position // size]][position % size]
                assert row == tuple(tokens[: position + 1]), (seq_id, position, row)
        if self.config.has_state:
            assert self.slots[view.src_slot] == tuple(tokens[:start]), (seq_id, start)

    def prefill(
        self, seq_id: str, token_ids: Sequence[int], *, chunk: int = 10_000, seal: bool = False, plan_end: bool = True
    ) -> PromptEnd:
        keys = self.keys(token_ids)
        hit = self.manager.lookup(keys, len(token_ids))
        assert self.manager.admit(seq_id, keys, hit, len(token_ids))
        self.tokens[seq_id] = list(token_ids)
        wanted = set(self.manager.save_positions(len(token_ids), hit))
        if seal or not plan_end:
            wanted.discard(len(token_ids))
        while (done := self.manager.sequence(seq_id).num_computed_tokens) < len(token_ids):
            self.step(seq_id, min(done + chunk, len(token_ids)), wanted)
        return self.manager.finish_prompt(seq_id, self.row(token_ids), seal=seal)

    def decode(self, seq_id: str, new_tokens: Sequence[int]) -> None:
        """One step per token: the sampled token is appended, then computed."""
        view = self.manager.sequence(seq_id)
        for token in new_tokens:
            self.tokens[seq_id].append(token)
            view.keys.extend([token])
            assert self.manager.extend(seq_id, len(self.tokens[seq_id]))
            self.step(seq_id, len(self.tokens[seq_id]))

    def row(self, token_ids: Sequence[int]) -> object:
        return ("row", tuple(token_ids))

    # -- moving -------------------------------------------------------------------------------------------------------

    def receive(self, plan: PullPlan, token_ids: Sequence[int]) -> None:
        """Pretend that the peer's bytes arrived."""
        size = self.config.block_size
        for index, block_id in plan.block_pairs:
            for row in range(size):
                position = index * size + row
                self.rows[block_id][row] = tuple(token_ids[: position + 1]) if position < len(token_ids) else GARBAGE
        if plan.slot_id:
            self.slots[plan.slot_id] = tuple(token_ids)

    def pull(self, seq_id: str, token_ids: Sequence[int]) -> PullPlan | None:
        plan = self.manager.accept_remote(seq_id, self.keys(token_ids), len(token_ids))
        if plan is not None:
            self.tokens[seq_id] = list(token_ids)
            self.receive(plan, token_ids)
            self.manager.commit_remote(seq_id, self.row(token_ids))
        return plan

    def fork(self, seq_id: str, child_id: str) -> bool:
        if not self.manager.fork(seq_id, child_id):
            return False
        self.tokens[child_id] = list(self.tokens[seq_id])
        return True
