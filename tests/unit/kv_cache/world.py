"""A cache with pretend bytes: what each block row and slot holds is modelled as tokens, so that a test can ask whether
a sequence would have read the right thing. Steps run as the engine runs them: copies, then reads and writes, then
``complete_step``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.prefix.hits import PrefixHit, RemoteHit
from common.kv_cache.sequences.prompt_ends import PromptEnd
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.kv_cache.spec import (
    AttentionLayerSpec,
    GroupKind,
    KVCacheConfig,
    ModelGeometry,
    StateLayerSpec,
    StateTensorSpec,
)

GARBAGE = -1


def make_geometry(
    *, attention: bool = True, state: bool = True, windows: Sequence[int] = (), mla: bool = False
) -> ModelGeometry:
    tensors = (StateTensorSpec("conv", (4, 3), "float32"), StateTensorSpec("recurrent", (2, 2, 2), "float32"))
    layers = [AttentionLayerSpec(1, 1, 4, 4, "float32")] if attention else []
    if mla:
        layers.append(AttentionLayerSpec(2, 1, 6, 0, "float32", GroupKind.MLA))
    for number, window in enumerate(windows):
        layers.append(AttentionLayerSpec(3 + number, 1, 4, 4, "float32", GroupKind.SLIDING_WINDOW, window))
    return ModelGeometry(
        model_type="test",
        num_layers=3 + len(windows),
        hidden_size=8,
        vocab_size=100,
        max_position=0,
        attention_layers=tuple(layers),
        state_layers=(StateLayerSpec(0, "mamba2", tensors),) if state else (),
    )


def make_config(
    *,
    num_blocks: int = 64,
    num_slots: int = 16,
    block_size: int = 4,
    attention: bool = True,
    state: bool = True,
    windows: Sequence[int] = (),
    mla: bool = False,
    caching: bool = True,
    mode: str = "auto",
    interval: int | None = None,
    policy: str = "lru",
    events: bool = False,
    max_checkpoints: int = 65536,
) -> KVCacheConfig:
    """Pool sizes without the null entry; every attention group has ``num_blocks``."""
    geometry = make_geometry(attention=attention, state=state, windows=windows, mla=mla)
    return KVCacheConfig(
        geometry=geometry,
        block_size=block_size,
        num_blocks=(num_blocks + 1,) * len(geometry.attention_groups),
        num_slots=num_slots + 1 if state else 1,
        root_key=b"test model",
        enable_prefix_caching=caching,
        mamba_cache_mode=mode,
        eviction_policy=policy,
        retention_interval=interval,
        enable_events=events,
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
        self.groups = self.config.geometry.attention_groups
        self.group_rows: list[list[list[object]]] = [
            [[GARBAGE] * size for _ in range(num_blocks)] for num_blocks in self.config.num_blocks
        ]
        self.slots: list[object] = [GARBAGE] * self.config.num_slots
        self.slots[0] = ()
        self.chunk_ends: list[int] = []
        self.named: dict[bytes, tuple[int, ...]] = {}
        self.tokens: dict[str, list[int]] = {}

    @property
    def rows(self) -> list[list[object]]:
        """The first attention group's."""
        return self.group_rows[0]

    def check(self) -> None:
        assert self.manager.check() == []

    def check_published(self) -> None:
        """No published key without the content it names: blocks, tails and states hold exactly their prefix."""
        coordinator = self.manager._coordinator
        size = self.config.block_size
        for group, rows in zip(coordinator.groups, self.group_rows, strict=True):
            for key, block_id in group.items():
                tokens = rows[block_id][size - 1]
                assert isinstance(tokens, tuple), f"{group.pool.name} {block_id} is published unwritten"
                self.assert_named(key, tokens)
                start = len(tokens) - size
                assert rows[block_id] == [tokens[: start + row + 1] for row in range(size)]
        for checkpoint in coordinator.state:
            start = checkpoint.position - len(checkpoint.tail_tokens)
            if self.config.has_state:
                tokens = self.slots[checkpoint.slot_id]
                assert isinstance(tokens, tuple)
                assert len(tokens) == checkpoint.position
                self.assert_named(checkpoint.key, tokens)
                assert tokens[start:] == checkpoint.tail_tokens
            for rows, block_id in zip(self.group_rows, checkpoint.tail_block_ids, strict=False):
                for row, token in enumerate(checkpoint.tail_tokens):
                    tokens = rows[block_id][row]
                    assert isinstance(tokens, tuple)
                    assert len(tokens) == start + row + 1
                    assert tokens[-1] == token

    def keys(self, token_ids: Sequence[int], salt: str | None = None) -> PrefixKeys:
        return self.manager.prefix_keys(token_ids, salt)

    def assert_named(self, key: bytes, tokens: tuple[int, ...]) -> None:
        if key not in self.named:
            self.named[key] = tokens
            assert self.keys(tokens).key_at(len(tokens)) == key
        assert self.named[key] == tokens

    # -- running ------------------------------------------------------------------------------------------------------

    def admit(self, seq_id: str, token_ids: Sequence[int]) -> bool:
        keys = self.keys(token_ids)
        hit = self.manager.lookup(keys, len(token_ids))
        if not self.manager.admit(seq_id, keys, hit, len(token_ids)):
            return False
        self.tokens[seq_id] = list(token_ids)
        view = self.manager.sequence(seq_id)
        is_exact = view.num_computed_tokens == len(token_ids)
        assert is_exact == (hit.output_row is not None)
        assert hit.output_row in (None, self.row(token_ids))
        self.assert_hit_is_real(seq_id, hit)
        return True

    def assert_hit_is_real(self, seq_id: str, hit: PrefixHit) -> None:
        """No resume without a real state, and what was found in every group is still what it was after allocation."""
        view, tokens, size = self.manager.sequence(seq_id), self.tokens[seq_id], self.config.block_size
        if self.config.has_state:
            assert self.slots[view.src_slot] == tuple(tokens[: hit.num_tokens])
            assert (view.src_slot == 0) == (hit.num_tokens == 0)
            assert view.dst_slot not in (0, view.src_slot)
        for table, found, rows in zip(view.tables, hit.tables, self.group_rows, strict=False):
            assert tuple(table.block_ids[: len(found)]) == found
            for index, block_id in enumerate(found):
                end = (index + 1) * size
                assert not block_id or rows[block_id][size - 1] == tuple(tokens[:end])

    def run_copies(self) -> None:
        for group_id, copies in self.manager.take_block_copies().items():
            rows = self.group_rows[group_id]
            assert not {source for source, _ in copies} & {destination for _, destination in copies}
            for source, destination in copies:
                rows[destination] = list(rows[source])

    def state_row(self, seq_id: str) -> list[int]:
        """The slots of a sequence's states by block: the slot that keeps the state at the block's end, null where none
        does; the running slot last, while it is inside a block."""
        view, state = self.manager.sequence(seq_id), self.manager._coordinator.state
        num_full, num_tail = divmod(view.num_computed_tokens, self.config.block_size)
        kept = (state.get(view.keys.boundary_key(index + 1)) for index in range(num_full))
        row = [checkpoint.slot_id if checkpoint is not None else 0 for checkpoint in kept]
        return [*row, view.dst_slot] if num_tail else row

    def lookup_remote(self, keys: PrefixKeys, num_tokens: int) -> RemoteHit:
        return self.manager._coordinator.lookup.remote(keys, num_tokens)

    def step(self, seq_id: str, end: int, wanted: Mapping[int, str] | Collection[int] = ()) -> None:
        """Compute positions up to ``end``: read the past, write the new, complete."""
        view = self.manager.sequence(seq_id)
        start, tokens = view.num_computed_tokens, self.tokens[seq_id]
        saves = self.manager.plan_saves(seq_id, start, end, wanted)
        assert [position for position, _ in saves] == sorted(position for position, _ in saves)
        self.run_copies()
        self.assert_readable(seq_id)
        size = self.config.block_size
        for table, rows in zip(view.tables, self.group_rows, strict=True):
            for position in range(max(start, table.write_from), end):
                block_id = table.block_ids[position // size]
                assert block_id != 0
                rows[block_id][position % size] = tuple(tokens[: position + 1])
        if self.config.has_state:
            for position, slot_id in saves:
                self.slots[slot_id] = tuple(tokens[:position])
            assert view.dst_slot != 0
            self.slots[view.dst_slot] = tuple(tokens[:end])
        self.manager.complete_step(seq_id, end)

    def assert_readable(self, seq_id: str) -> None:
        """The sequence would read its own past: every row its groups see, and the state at exactly its position."""
        view, tokens = self.manager.sequence(seq_id), self.tokens[seq_id]
        start, size = view.num_computed_tokens, self.config.block_size
        for group, table, rows in zip(self.groups, view.tables, self.group_rows, strict=True):
            first = max(0, start - group.window + 1) if group.window else 0
            for position in range(first, max(start, table.write_from)):
                row = rows[table.block_ids[position // size]][position % size]
                assert row == tuple(tokens[: position + 1]), (seq_id, group.label, position, row)
        if self.config.has_state:
            assert self.slots[view.src_slot] == tuple(tokens[:start]), (seq_id, start)

    def prefill(
        self,
        seq_id: str,
        token_ids: Sequence[int],
        *,
        chunk: int = 1_000_000,
        seal: bool = False,
        plan_end: bool = True,
        boundaries: Sequence[int] = (),
    ) -> PromptEnd:
        """A whole prompt in steps of at most ``chunk`` tokens; ``chunk_ends`` says where they ended."""
        keys = self.keys(token_ids)
        hit = self.manager.lookup(keys, len(token_ids))
        assert self.manager.admit(seq_id, keys, hit, len(token_ids))
        self.tokens[seq_id] = list(token_ids)
        wanted = self.manager.save_positions(len(token_ids), hit, boundaries)
        if seal or not plan_end:
            wanted.pop(len(token_ids), None)
        self.chunk_ends = []
        while (done := self.manager.sequence(seq_id).num_computed_tokens) < len(token_ids):
            end = done + self.manager.chunk_size(done, min(chunk, len(token_ids) - done), len(token_ids))
            self.step(seq_id, end, wanted)
            self.chunk_ends.append(end)
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
        for rows, pairs in zip(self.group_rows, plan.pairs, strict=True):
            for index, block_id in pairs:
                for row in range(size):
                    position = index * size + row
                    rows[block_id][row] = tuple(token_ids[: position + 1]) if position < len(token_ids) else GARBAGE
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
