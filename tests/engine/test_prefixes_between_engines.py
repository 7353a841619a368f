"""Prefixes that one engine computed and another goes on from: early blocks, parts of a prompt, lost ones. No transport:
bytes are copied from pool to pool, and checked against generations and tags as a reader would."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from common.config.node import NodeConfig
from common.engine import remote_prefixes
from common.engine.core import EngineCore
from common.engine.outputs import RequestOutput
from common.errors import InvalidRequestError, TransferError
from common.kv_cache.pools.generations import content_tag
from common.kv_cache.sharing.leases import LeasedPrefix, PrefixProgress
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.node.runtime import NodeModel, create_core
from common.request import Request, SamplingParams
from tests.support.models import VOCAB_SIZE, checkpoint, tiered
from tests.support.shared_models import load_node_model

FAMILIES = tiered(("granitemoehybrid", "qwen3_5", "llama"), ("granitemoehybrid",))
BLOCK = 16


@dataclass
class Outcome:
    """``common.engine.remote_prefixes.PullResult``."""

    ok: bool
    terminal: bool = True
    reason: str = ""
    num_bytes: int = 0
    num_blocks: int = 0
    num_states: int = 0
    output_row: torch.Tensor | None = None
    final_s: float | None = None


LOST = Outcome(ok=False, reason="stale_generation")


@dataclass
class Remote:
    """A leased prefix of another engine."""

    holder: Engine
    lease: LeasedPrefix

    @property
    def num_tokens(self) -> int:
        return self.lease.num_tokens

    @property
    def prefix_key(self) -> bytes:
        return self.lease.key


class Engine:
    def __init__(self, family: str = "granitemoehybrid", **flags: Any) -> None:
        defaults = {"kv_cache_memory": 4 << 20, "max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 48}
        config = NodeConfig(
            model=str(checkpoint(family)), dtype="float32", device="cpu", **{**defaults, "num_threads": 1, **flags}
        )
        self.model: NodeModel = load_node_model(config)
        self.core: EngineCore = create_core(config, self.model)
        self.core.pull_with(self)
        self.pulls: dict[str, tuple[Remote, PullPlan]] = {}

    def start(self, seq_id: str, remote: Remote, plan: PullPlan) -> None:
        self.pulls[seq_id] = (remote, plan)

    def cancel(self, seq_id: str) -> None:
        raise AssertionError("no test here cancels")

    def give_up(self, remote: Remote) -> None:
        assert remote.holder.model.manager.release_lease("lease")

    def finish_pull(self, seq_id: str) -> Outcome:
        """Copies what the plan asks for, as the transfer layer would."""
        remote, plan = self.pulls.pop(seq_id)
        here, there, lease = self.model.storage, remote.holder.model.storage, remote.lease
        remote.holder.assert_promised(lease, self.model.manager.prefix_keys(self.prompts[seq_id]))
        for group_id, pairs in enumerate(plan.pairs):
            for index, block_id in pairs:
                here.block_arenas[group_id][block_id] = there.block_arenas[group_id][lease.tables[group_id][index]]
        if plan.slot_id:
            here.slot_arena[plan.slot_id] = there.slot_arena[lease.slot_id]
        num_blocks = sum(map(len, plan.pairs))
        num_bytes = num_blocks * sum(here.layout.group_block_bytes) + bool(plan.slot_id) * here.layout.slot_bytes
        outcome = Outcome(True, True, "", num_bytes, num_blocks, int(bool(plan.slot_id)), lease.output_row)
        self.core.finish_pull(seq_id, outcome)
        return outcome

    def assert_promised(self, prefix: LeasedPrefix | PrefixProgress, keys: Any) -> None:
        """Every unit has its generation and the tag that a reader computes from its own tokens."""
        tables = self.model.manager.generations
        for group, table, generations in zip(
            self.model.cache_config.geometry.attention_groups, prefix.tables, prefix.generations, strict=True
        ):
            for index, (block_id, generation) in enumerate(zip(table, generations, strict=True)):
                key = keys.key_at(min((index + 1) * BLOCK, prefix.num_tokens))
                assert tables.generation(group.pool_name, block_id) == generation
                assert tables.tag(group.pool_name, block_id) == content_tag(key)
        if isinstance(prefix, LeasedPrefix) and prefix.slot_id:
            assert tables.tag("slots", prefix.slot_id) == content_tag(keys.key_at(prefix.num_tokens))

    @property
    def prompts(self) -> dict[str, list[int]]:
        return {
            seq_id: sequence.request.prompt_token_ids for seq_id, sequence in self.core._scheduler.transferring.items()
        }

    def lease(self, prompt: list[int], deeper_than: int = 0) -> LeasedPrefix | None:
        return self.core.lease_prefix(self.model.manager.prefix_keys(prompt), "lease", deeper_than=deeper_than)

    def run(self, request: Request) -> list[RequestOutput]:
        """All outputs of one request; pulls succeed."""
        self.core.add_request(request)
        return list(self.outputs())

    def outputs(self) -> Iterator[RequestOutput]:
        while True:
            yield from self.core.step()
            for seq_id in list(self.pulls):
                self.finish_pull(seq_id)
            if not self.core.has_work():
                return

    def generate(self, prompt: list[int], num_tokens: int = 12, **fields: Any) -> tuple[list[int], RequestOutput]:
        """The answer's tokens and the first output, which says where the prompt came from."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        outputs = self.run(Request("r", prompt, sampling, **fields))
        assert [output.error for output in outputs] == [None] * len(outputs)
        return [token for output in outputs for token in output.token_ids], outputs[0]

    def assert_nothing_held(self) -> None:
        assert self.model.manager.check() == []
        stats = self.model.manager.stats()
        for counts in (stats.blocks, stats.slots):
            assert counts["held"] == counts["leased"] == counts["quarantined"] == 0


def tokens(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, VOCAB_SIZE) for _ in range(num_tokens)]


@pytest.mark.parametrize("family", FAMILIES)
def test_second_turn_when_pulled_from_the_first_ones_engine_then_only_new_tokens_are_computed(family: str) -> None:
    alone, holder, reader = Engine(family, enable_prefix_caching=False), Engine(family), Engine(family)
    first = tokens(1, 70)
    answer, _ = holder.generate(first)
    second = [*first, *answer, *tokens(2, 37)]
    expected, _ = alone.generate(second)
    # The answer's last token was sampled, never computed.
    num_known = len(first) + len(answer) - 1
    lease = holder.lease(second)
    assert lease is not None
    assert (lease.num_tokens, lease.output_row) == (num_known, None)
    outputs = reader.run(Request("leg", second, None, remote=Remote(holder, lease)))
    handoff = outputs[-1].handoff
    assert outputs[-1].num_local_computed_tokens == len(second) - num_known
    assert outputs[-1].num_cached_tokens == 0
    assert outputs[-1].transferred_blocks == -(-num_known // BLOCK)
    assert outputs[-1].transferred_states == int(family != "llama")
    decoder = Engine(family)
    assert decoder.generate(second, remote=Remote(reader, handoff))[0] == expected
    # Back where the first turn was: what is missing there, and one state.
    again, output = holder.generate(second, remote=Remote(reader, handoff))
    assert again == expected
    assert output.transferred_blocks == -(-len(second) // BLOCK) - num_known // BLOCK
    assert output.transferred_states == int(family != "llama")
    for engine, lease_id in ((holder, "lease"), (reader, "leg")):
        assert engine.model.manager.release_lease(lease_id)
        engine.assert_nothing_held()


def test_prefix_when_the_reader_has_most_of_it_then_the_missing_blocks_and_the_state_move() -> None:
    holder, reader = Engine(), Engine()
    first = tokens(1, 80)
    reader.run(Request("leg", first, None))
    answer, _ = holder.generate(first, 20)
    lease = holder.lease([*first, *answer, 7], deeper_than=80)
    assert lease is not None
    _, output = reader.generate([*first, *answer, 7], remote=Remote(holder, lease))
    assert (output.transferred_blocks, output.transferred_states) == (2, 1)  # of 99 tokens in 7 blocks, 80 are here
    assert output.num_local_computed_tokens == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_prompt_when_pulled_by_a_prefill_leg_then_handed_on_without_computing(family: str) -> None:
    holder, reader = Engine(family), Engine(family)
    prompt = tokens(1, 75)
    answer, _ = holder.generate(prompt)
    lease = holder.lease(prompt)
    assert lease is not None
    assert (lease.num_tokens, lease.output_row is None) == (75, False)
    outputs = reader.run(Request("leg", prompt, None, remote=Remote(holder, lease)))
    assert outputs[-1].num_local_computed_tokens == 0
    assert Engine(family).generate(prompt, remote=Remote(reader, outputs[-1].handoff))[0] == answer


def test_whole_prompt_when_pulled_without_its_row_then_the_last_token_is_computed() -> None:
    holder, reader, alone = Engine("llama"), Engine("llama"), Engine("llama", enable_prefix_caching=False)
    prompt = tokens(1, 64)
    holder.generate([*prompt, *tokens(2, 20)], 1)
    lease = holder.lease(prompt)
    assert lease is not None
    assert (lease.num_tokens, lease.output_row) == (64, None)
    answer, output = reader.generate(prompt, remote=Remote(holder, lease))
    assert answer == alone.generate(prompt)[0]
    assert (output.num_local_computed_tokens, output.transferred_blocks) == (1, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_lease_when_nothing_is_deeper_than_what_the_reader_has_then_none(family: str) -> None:
    holder = Engine(family)
    prompt = tokens(1, 64)
    assert holder.lease(prompt) is None
    holder.generate(prompt, 1)
    lease = holder.lease([*prompt, 5])
    assert lease is not None
    assert lease.num_tokens == 64
    assert holder.model.manager.release_lease("lease")
    assert holder.lease([*prompt, 5], deeper_than=64) is None
    assert holder.lease([9, *prompt], deeper_than=0) is None
    holder.assert_nothing_held()


def test_lease_when_the_tail_is_in_a_block_that_was_completed_then_a_copy_of_it_is_leased() -> None:
    holder, reader, alone = Engine(), Engine(), Engine(enable_prefix_caching=False)
    prompt = tokens(1, 90)
    # One step passes both boundaries: the block of the first is complete by then, that of the second is the open one.
    holder.run(Request("leg", prompt[:46], None, semantic_boundaries=(21, 40)))
    assert holder.model.manager.release_lease("leg")
    for position in (21, 40):
        other = [*prompt[:position], *tokens(position, 30)]
        lease = holder.lease(other)
        assert lease is not None
        assert lease.num_tokens == position
        answer, output = reader.generate(other, remote=Remote(holder, lease))
        assert output.num_local_computed_tokens == 30
        assert answer == alone.generate(other)[0]
        assert holder.model.manager.check() == []
        assert holder.model.manager.release_lease("lease")
    holder.assert_nothing_held()


def test_handoff_when_a_boundary_is_in_the_prompts_last_block_then_every_tag_is_the_readers() -> None:
    holder, reader, alone = Engine(), Engine(), Engine(enable_prefix_caching=False)
    prompt = tokens(1, 46)
    for name in ("first", "again"):  # computed, then found whole
        outputs = holder.run(Request(name, prompt, None, semantic_boundaries=(35, 42)))
        answer, _ = reader.generate(prompt, remote=Remote(holder, outputs[-1].handoff))
        assert answer == alone.generate(prompt)[0]
    # A prompt that ends where another one's boundary was, with a boundary of its own just before.
    outputs = holder.run(Request("shorter", prompt[:35], None, semantic_boundaries=(33,)))
    assert reader.generate(prompt[:35], remote=Remote(holder, outputs[-1].handoff))[0] == alone.generate(prompt[:35])[0]
    for name in ("first", "again", "shorter"):
        assert holder.model.manager.release_lease(name)
    holder.assert_nothing_held()


def test_progress_when_asked_for_then_finished_blocks_are_shown_as_they_come() -> None:
    holder = Engine()
    prompt = tokens(1, 150)
    keys = holder.model.manager.prefix_keys(prompt)
    holder.core.add_request(Request("leg", prompt, None, wants_progress=True))
    shown = []
    for output in holder.outputs():
        if output.progress is not None:
            shown.append(output.progress.num_tokens)
            holder.assert_promised(output.progress, keys)
            assert output.finish_reason is None
        else:
            assert output.handoff.num_tokens == 150
    assert shown == [0, 48, 96, 144]
    assert len(holder.run(Request("quiet", tokens(2, 150), None))) == 1


def test_progress_when_the_prompt_is_sampled_here_then_none() -> None:
    holder = Engine()
    sampling = SamplingParams(temperature=0.0, max_tokens=2)
    outputs = holder.run(Request("r", tokens(1, 150), sampling, wants_progress=True))
    assert [output.progress for output in outputs] == [None, None]


@pytest.mark.parametrize("known", [0, 100])
@pytest.mark.parametrize("before_admission", [True, False])
def test_lost_prefix_when_more_than_the_limit_is_left_to_compute_then_typed_error(
    known: int, before_admission: bool
) -> None:
    holder, reader = Engine(), Engine(local_prefill_limit=50)
    prompt = tokens(1, 140)
    if known:
        reader.generate(prompt[:known], 1)
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    if before_admission:
        outputs = reader.run(Request("r", prompt, sampling, lost_remote=True))
    else:
        lease = holder.run(Request("leg", prompt, None))[-1].handoff
        reader.core.add_request(Request("r", prompt, sampling, remote=Remote(holder, lease)))
        outputs = reader.core.step()
        reader.pulls.clear()
        reader.core.finish_pull("r#0", LOST)
        outputs += list(reader.outputs())
    if known:
        assert [len(output.token_ids) for output in outputs] == [1, 1, 1]
        assert outputs[0].num_local_computed_tokens == 40
    else:
        (output,) = outputs
        assert isinstance(output.error, TransferError)
        assert output.error.code == "transfer_failed"
        assert "140 tokens would have to be computed here, --local-prefill-limit is 50" in output.error.message
    reader.assert_nothing_held()


def test_lost_prefix_when_it_was_optional_then_computed_whatever_the_policy() -> None:
    for flags in ({"kv_load_failure_policy": "fail"}, {"local_prefill_limit": 0}):
        holder, reader = Engine(), Engine(**flags)
        prompt = tokens(1, 60)
        holder.generate(prompt, 2)
        lease = holder.lease([*prompt, 5, 6])
        assert lease is not None
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        remote = Remote(holder, lease)
        reader.core.add_request(Request("r", [*prompt, 5, 6], sampling, remote=remote, is_remote_optional=True))
        outputs = reader.core.step()
        reader.pulls.clear()
        reader.core.finish_pull("r#0", LOST)
        outputs += list(reader.outputs())
        assert [len(output.token_ids) for output in outputs] == [1, 1, 1]
        assert outputs[0].num_local_computed_tokens == 62


@pytest.mark.parametrize("family", FAMILIES)
def test_two_queues_when_each_waits_for_memory_that_the_other_has_leased_then_one_lets_go_and_both_go_on(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_prefixes, "OPTIONAL_PREFIX_PATIENCE_S", 0.05)
    alone = Engine(family, enable_prefix_caching=False)
    least = {"granitemoehybrid": 166_000, "qwen3_5": 110_000, "llama": 164_000}[family]
    engines = [Engine(family, kv_cache_memory=least, max_model_len=128, max_num_seqs=2) for _ in range(2)]
    prefixes = [tokens(1, 90), tokens(2, 90)]
    for holder, prefix in zip(engines, prefixes, strict=True):
        holder.generate(prefix, 1)
    prompts = [[*prefixes[1], *tokens(3, 20)], [*prefixes[0], *tokens(4, 20)]]
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    leases = [holder.lease(prompt) for holder, prompt in zip(reversed(engines), prompts, strict=True)]
    for reader, holder, prompt, lease in zip(engines, reversed(engines), prompts, leases, strict=True):
        assert lease is not None
        remote = Remote(holder, lease)
        reader.core.add_request(Request("r", prompt, sampling, remote=remote, is_remote_optional=True))
    answers: list[list[int]] = [[], []]
    deadline_s = time.monotonic() + 20.0
    is_first = True
    while min(map(len, answers)) < 4:
        assert time.monotonic() < deadline_s, "they wait for each other"
        for reader, holder, answer in zip(engines, reversed(engines), answers, strict=True):
            outputs = reader.core.step()
            assert not is_first or reader.core.num_waiting == 1
            answer += [token for output in outputs for token in output.token_ids]
            for seq_id in list(reader.pulls):  # of the other one, when the first has let go
                reader.finish_pull(seq_id)
                assert holder.model.manager.release_lease("lease")
        is_first = False
    assert answers == [alone.generate(prompt, 4)[0] for prompt in prompts]
    for engine in engines:
        engine.assert_nothing_held()


def test_lease_id_when_it_is_in_use_then_refused_and_everybody_else_goes_on() -> None:
    holder = Engine()
    prompt = tokens(1, 60)
    holder.generate(prompt, 2)
    assert holder.lease([*prompt, 5]) is not None
    with pytest.raises(InvalidRequestError, match="id lease is in use"):
        holder.lease([*prompt, 5])
    (output,) = holder.run(Request("lease", prompt, None))
    assert isinstance(output.error, InvalidRequestError)
    holder.core.add_request(Request("leg", tokens(2, 60), None))
    with pytest.raises(InvalidRequestError, match="id leg is in use"):
        holder.core.lease_prefix(holder.model.manager.prefix_keys(prompt), "leg", deeper_than=0)
    assert list(holder.outputs())[-1].handoff is not None
    for name in ("lease", "leg"):
        assert holder.model.manager.release_lease(name)
    holder.assert_nothing_held()
