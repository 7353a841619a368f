"""Every family through two engines and the in-process transfer: computed here, generated there, equal to stock.

Cold in a crowd, resumed inside a block, from a shared prefix, repeated, on the second turn; with a manifest that was
changed on its way; and the controls: with a state, a block, the output row or an early part of the prompt changed, the
same comparison fails, so it would notice.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from common.errors import RequestAbortedError
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.wire.handoff import Rendezvous
from common.wire.manifest import PrefillReport
from tests.support.models import FAMILIES, tiered
from tests.support.pair import HOST, PORT, Answer, Pair
from tests.support.reference import Mismatch, Reference, random_tokens, reference

NUM_TOKENS = 10
CHUNK = 48
"""Tokens a step: longer prompts are cut, and several of them are cut in one step."""


@dataclass(frozen=True)
class Site:
    pair: Pair
    reference: Reference

    def mismatch(self, prompt: Sequence[int], answer: Answer) -> Mismatch | None:
        greedy = self.reference.greedy(prompt, NUM_TOKENS)
        return greedy.mismatch(answer.token_ids, answer.logprobs, self.reference.tolerance)

    def assert_right(self, prompts: Mapping[str, Sequence[int]]) -> dict[str, Answer]:
        """Both legs of all prompts at once; every answer is stock's."""
        answers = self.pair.ask(prompts, NUM_TOKENS)
        for name, prompt in prompts.items():
            assert self.mismatch(prompt, answers[name]) is None, name
        assert self.pair.prefill.held() == self.pair.decode.held() == (0, 0, 0)
        return answers

    @property
    def has_state(self) -> bool:
        return self.pair.decode.model.cache_config.has_state

    @property
    def has_attention(self) -> bool:
        return self.pair.decode.model.cache_config.has_attention

    @property
    def has_windows_only(self) -> bool:
        groups = self.pair.decode.model.cache_config.geometry.attention_groups
        return bool(groups) and all(group.window for group in groups)

    def moved(self, num_tokens: int, num_known: int = 0) -> tuple[int, int]:
        """Blocks (of all attention groups) and states that a prompt takes along when the decode side has the full
        blocks of its first ``num_known`` tokens and no state: of a sliding window only what a new token sees."""
        num_blocks = 0
        for group in self.pair.decode.model.cache_config.geometry.attention_groups:
            first = max(0, num_tokens - group.window + 1) // 16 if group.window else 0
            num_blocks += max(0, -(-num_tokens // 16) - max(first, num_known // 16))
        return num_blocks, int(self.has_state)


@pytest.fixture(scope="module", params=tiered(FAMILIES, ("granitemoehybrid", "mamba2", "kimi_linear", "gemma3")))
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    family = str(request.param)
    pair = Pair(family, max_num_batched_tokens=CHUNK)
    yield Site(pair, reference(family))
    pair.close()


def test_answers_when_prompts_come_together_cold_then_equal_stock_and_nothing_moves_twice(site: Site) -> None:
    prompts = {f"{length}-tokens": random_tokens(length, seed=length) for length in (1, 16, 37, 150)}
    for name, answer in site.assert_right(prompts).items():
        assert answer.transferred[1:] == site.moved(len(prompts[name]))
        assert answer.num_cached_tokens == 0
    counted = site.pair.decode.model.manager.stats().hit_tokens["joint"]
    for name, answer in site.assert_right(prompts).items():
        assert answer.transferred == (0, 0, 0)
        assert answer.num_cached_tokens == len(prompts[name])
    assert site.pair.decode.model.manager.stats().hit_tokens["joint"] - counted == sum(map(len, prompts.values()))


def test_answers_when_prefixes_are_shared_or_resumed_inside_a_block_then_equal_stock(site: Site) -> None:
    origin, rest = random_tokens(150, seed=201), random_tokens(60, seed=202)
    site.assert_right({"origin": origin, "inside": origin[:85]})
    second = site.assert_right({"goes-on": origin + rest, "goes-on-inside-a-block": origin[:85] + rest})
    assert [answer.prefill_cached_tokens for answer in second.values()] == [150, 85]
    site.assert_right({"stops": origin[:96], "parts": origin[:96] + rest, "parts-in-a-block": origin[:103] + rest[:20]})


def test_answer_when_it_is_the_second_turn_then_only_what_is_new_moves(site: Site) -> None:
    first = random_tokens(90, seed=211)
    answer = site.assert_right({"first": first})["first"]
    second = [*first, *answer.token_ids, *random_tokens(20, seed=212)]
    moved = site.assert_right({"second": second})["second"].transferred
    # The decode side has all full blocks of what it pulled and generated; the prompt's end is a state it lacks.
    assert moved[1:] == site.moved(len(second), 90 + NUM_TOKENS - 1)


def test_control_when_the_moved_state_is_zeroed_then_the_answer_changes_after_the_first_token(site: Site) -> None:
    if not site.has_state:
        pytest.skip("a dense model moves no state")
    prompt = random_tokens(150, seed=221)

    def damage(plan: PullPlan) -> None:
        site.pair.decode.model.storage.zero_slot(plan.slot_id)

    answer = site.pair.take_in(site.pair.hand_out({"damaged": prompt}), NUM_TOKENS, damage)["damaged"]
    mismatch = site.mismatch(prompt, answer)
    assert mismatch is not None
    assert mismatch.index >= 1


def test_control_when_a_moved_block_is_zeroed_then_the_answer_changes_after_the_first_token(site: Site) -> None:
    if not site.has_attention:
        pytest.skip("no attention layers, no blocks")
    prompt = random_tokens(90, seed=222)

    def damage(plan: PullPlan) -> None:
        site.pair.decode.model.storage.zero_block(plan.pairs[0][min(2, len(plan.pairs[0]) - 1)][1])

    answer = site.pair.take_in(site.pair.hand_out({"damaged": prompt}), NUM_TOKENS, damage)["damaged"]
    mismatch = site.mismatch(prompt, answer)
    assert mismatch is not None
    assert mismatch.index >= 1


def row_of_another_prompt(site: Site, num_tokens: int) -> dict[str, Any]:
    """Field of a manifest: the row of a prompt whose answer begins with another token than ``num_tokens`` tokens'."""
    first = site.reference.greedy(random_tokens(num_tokens, seed=num_tokens), 1).token_ids
    other = next(
        prompt
        for seed in range(261, 300)
        if site.reference.greedy(prompt := random_tokens(40, seed=seed), 1).token_ids != first
    )
    manifests = site.pair.hand_out({"other-row": other})
    site.pair.end_lease("other-row")
    return {"output_row": manifests["other-row"].output_row}


@pytest.mark.parametrize("changed", ["row", "generation", "report", "proof"])
@pytest.mark.parametrize("site", tiered(FAMILIES, ("granitemoehybrid",)), indirect=True)
def test_manifest_when_it_is_changed_on_its_way_then_nothing_of_it_is_used_or_kept(site: Site, changed: str) -> None:
    name, prompt = f"forged-{changed}", random_tokens(90, seed=90)
    prompt[0] = len(changed)  # another prompt for each: nothing of it is here
    manifest = site.pair.hand_out({name: prompt})[name]
    if changed == "row":
        forged = replace(manifest, **row_of_another_prompt(site, 90))
        assert forged.output_row != manifest.output_row
    elif changed == "generation":
        forged = replace(manifest, generations=tuple(tuple(x + 1 for x in group) for group in manifest.generations))
        forged = replace(forged, slot_generation=manifest.slot_generation + 1)
    elif changed == "report":
        forged = replace(manifest, prefill=PrefillReport("p", 80, 10))
    else:
        forged = replace(manifest, proof="0" * 64)
    reason = "stale_generation" if changed == "generation" else "unproven_manifest"
    answer = site.pair.take_in({name: forged}, NUM_TOKENS, refused=reason)[name]
    assert site.mismatch(prompt, answer) is None
    assert answer.transferred == (0, 0, 0)
    again = Answer(manifest, site.pair.ask_decode_side(f"{name}-again", prompt, NUM_TOKENS), answer.pull)
    assert site.mismatch(prompt, again) is None
    assert again.num_cached_tokens == len(prompt)
    site.pair.end_lease(name)
    assert site.pair.prefill.held() == site.pair.decode.held() == (0, 0, 0)


@pytest.mark.parametrize("site", tiered(FAMILIES, ("granitemoehybrid",)), indirect=True)
def test_control_when_the_holder_itself_sends_the_row_of_another_prompt_then_the_first_token_is_another(
    site: Site,
) -> None:
    prompt = random_tokens(90, seed=90)
    manifest = site.pair.hand_out({"wrong-row": prompt})["wrong-row"]
    wrong = site.pair.prefill.manifests.proven(replace(manifest, **row_of_another_prompt(site, 90)))
    mismatch = site.mismatch(prompt, site.pair.take_in({"wrong-row": wrong}, NUM_TOKENS)["wrong-row"])
    assert mismatch is not None
    assert mismatch.index == 0


@pytest.mark.parametrize("site", tiered(FAMILIES, ("granitemoehybrid", "gemma3")), indirect=True)
def test_control_when_the_first_tenth_of_the_prompt_is_replaced_then_the_answer_changes(site: Site) -> None:
    if not site.has_state and site.has_windows_only:
        pytest.skip("nothing but windows: four of them do not reach back that far")
    prompt = random_tokens(600, seed=231)
    other = random_tokens(60, seed=232) + prompt[60:]
    answer = site.assert_right({"other": other})["other"]
    mismatch = site.mismatch(prompt, answer)
    assert mismatch is not None


def test_row_when_the_model_is_in_half_precision_with_a_float32_residual_then_is_taken_in() -> None:
    pair = Pair("mamba2", dtype="bfloat16")
    answer = pair.ask({"half": random_tokens(40, seed=241)}, NUM_TOKENS)["half"]
    assert answer.manifest.output_row_dtype == "bfloat16"
    assert len(answer.token_ids) == NUM_TOKENS
    pair.close()


class WatchedKeys(PrefixKeys):
    """Hashing takes long, but on an event loop, where it must not happen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.hashed_by: list[threading.Thread] = []
        self.released = threading.Event()

    def _hash_to(self, num_blocks: int) -> None:
        self.hashed_by.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            self.released.wait(30)
        super()._hash_to(num_blocks)


def test_handoff_when_its_caller_leaves_while_the_prompt_is_hashed_then_on_a_thread_and_the_leg_is_called_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, prompt = Pair("mamba2"), random_tokens(90, seed=251)
    config = pair.decode.model.cache_config
    keys = WatchedKeys(config.root_key, config.block_size, prompt)
    monkeypatch.setattr(pair.decode.model.manager, "prefix_keys", lambda *args, **fields: keys)

    async def read() -> None:
        async with pair._handoffs.read(Rendezvous(HOST, PORT, "left"), prompt, None):
            raise AssertionError("no leg has come")

    async def leave() -> None:
        reading = asyncio.create_task(read())
        async with asyncio.timeout(30):
            while not keys.hashed_by:
                await asyncio.sleep(0.001)
        reading.cancel()
        await asyncio.wait({reading}, timeout=30)
        assert reading.cancelled()

    pair._runner.run(leave())
    keys.released.set()
    assert threading.main_thread() not in keys.hashed_by
    with pytest.raises(RequestAbortedError):
        pair.hand_out_late("left", prompt)
    pair.close()
