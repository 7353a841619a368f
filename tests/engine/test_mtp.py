"""Drafts of the model's own head: how many are right is known beforehand, because the head was made for the answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from common.config.node import NodeConfig
from common.engine.core import EngineCore
from common.errors import ConfigError
from common.models.adapter.mtp import MtpHead
from common.node.runtime import NodeModel, create_core, layout_fingerprint, load_node_model
from common.request import Request, SamplingParams
from tests.engine.cores import collect, engine, tokens, used
from tests.engine.test_speculation import DRAWN, answers_of, check_equal, requests
from tests.support.models import checkpoint, tiered
from tests.support.mtp import MTP_FAMILIES, checkpoint_with_mtp, num_accepted

ROOMY: dict[str, Any] = {
    "kv_cache_memory": 16 << 20,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 40,
}
MTP = '{"method": "mtp"}'
PROMPTS = (tokens(1, 37), tokens(2, 64))
NUM_TOKENS = 30
NUM_DRAFTS = 3


class Steps:
    """An engine that drafts by its head, and (drafted, right) of each step with drafts of a request."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        self.core, self.model = mtp_engine(folder, **flags)
        self._seen: list[tuple[str, int, int]] = []
        speculation = self.core.speculation
        assert speculation is not None
        observe = speculation.observe

        def seen(sequence: Any, num_drafts: int, num_right: int) -> None:
            self._seen.append((sequence.request.request_id, num_drafts, num_right))
            observe(sequence, num_drafts, num_right)

        speculation.observe = seen  # type: ignore[method-assign]

    def ask(self, *prompts: list[int], salt: str | None = None) -> list[list[int]]:
        self._seen.clear()
        answers = ask(self.core, *prompts, salt=salt)
        assert used(self.model) == (0, 0, 0, 0)
        return answers

    def of(self, index: int) -> list[tuple[int, int]]:
        return [(drafted, right) for name, drafted, right in self._seen if name == f"r{index}"]


def mtp_engine(folder: Path, **flags: Any) -> tuple[EngineCore, NodeModel]:
    given = {**ROOMY, "speculative_config": MTP, **flags}
    config = NodeConfig(model=str(folder), dtype="float32", device="cpu", **given)
    model = load_node_model(config)
    core = create_core(config, model)
    assert core.speculation is not None
    core.speculation.adapts = False
    return core, model


def ask(core: EngineCore, *prompts: list[int], salt: str | None = None) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        core.add_request(Request(f"r{index}", prompt, params, cache_salt=salt, arrival_s=0.0))
    found = collect(core)
    return [found[f"r{index}", 0] for index in range(len(prompts))]


def steps_of(prompt: list[int]) -> list[tuple[int, int]]:
    return num_accepted(len(prompt), len(prompt) + NUM_TOKENS, NUM_DRAFTS)


def texts(prompts: tuple[list[int], ...], answers: list[list[int]]) -> list[tuple[int, list[int]]]:
    return [(len(prompt), prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize("family", tiered(MTP_FAMILIES, ("qwen3_5",)))
def test_drafts_of_the_head_when_it_is_right_at_known_places_then_are_accepted_there(
    family: str, tmp_path: Path
) -> None:
    """Computed in chunks, and found again."""
    answers = ask(engine(family, **ROOMY)[0], *PROMPTS)
    steps = Steps(checkpoint_with_mtp(family, tmp_path / "model", texts(PROMPTS, answers)))
    for salt in ("cold", "again", "again"):
        assert steps.ask(*PROMPTS, salt=salt) == answers
        assert [steps.of(0), steps.of(1)] == [steps_of(prompt) for prompt in PROMPTS]
    assert sum(right for _, right in steps.of(0)) > NUM_TOKENS / 2


@pytest.mark.parametrize("family", tiered(MTP_FAMILIES, ("qwen3_5",)))
def test_turn_two_when_it_goes_on_from_a_state_then_the_head_goes_on_from_its_row(family: str, tmp_path: Path) -> None:
    (first,) = ask(engine(family, **ROOMY)[0], PROMPTS[0])
    follow = [*PROMPTS[0], *first, *tokens(3, 9)]
    (second,) = ask(engine(family, **ROOMY)[0], follow)
    folder = checkpoint_with_mtp(family, tmp_path / "model", texts((PROMPTS[0], follow), [first, second]))
    steps = Steps(folder)
    assert steps.ask(PROMPTS[0]) == [first]
    assert steps.ask(follow) == [second]
    assert steps.model.manager.stats().hit_tokens["joint"] == len(PROMPTS[0]) + NUM_TOKENS - 1
    assert steps.of(0) == steps_of(follow)


def _keep_nothing(self: MtpHead, hidden: Tensor, *args: Any) -> None:
    """No K/V of the prompt."""


def _keep_its_own(keep: Callable[..., None], self: MtpHead, hidden: Tensor, *args: Any) -> None:
    """Rows are joined with the hidden row of their own token, not the one before."""
    keep(self, hidden.roll(-1, 0), *args)


@pytest.mark.parametrize("family", tiered(MTP_FAMILIES, ()))
def test_drafts_of_the_head_when_what_it_keeps_is_damaged_then_others_are_accepted_and_answers_are_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ask(engine(family, **ROOMY)[0], *PROMPTS)
    folder = checkpoint_with_mtp(family, tmp_path / "model", texts(PROMPTS, answers))
    keep = MtpHead.keep
    for damaged in (_keep_nothing, lambda self, *args: _keep_its_own(keep, self, *args)):
        monkeypatch.setattr(MtpHead, "keep", damaged)
        steps = Steps(folder)
        assert steps.ask(*PROMPTS) == answers
        assert [steps.of(0), steps.of(1)] != [steps_of(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("family", [pytest.param(family, marks=pytest.mark.full) for family in MTP_FAMILIES])
def test_drawn_answers_when_the_head_drafts_then_are_those_without(family: str, tmp_path: Path) -> None:
    """With penalties, bias, min_p, stop tokens and two answers; the head is one with random weights, hardly ever right,
    and one that is right where nothing is drawn."""
    core, model = engine(family, **ROOMY)
    expected = answers_of(core, model, *requests(DRAWN))
    greedy = ask(core, *PROMPTS)
    for name, known in (("random", []), ("fitted", texts(PROMPTS, greedy))):
        core, model = mtp_engine(checkpoint_with_mtp(family, tmp_path / name, known))
        check_equal(answers_of(core, model, *requests(DRAWN)), expected)
        assert core.speculation is not None
        assert core.speculation.num_drafts > 10


def test_head_when_there_is_none_then_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculative-config .*granitemoehybrid have no such head.* qwen3_5,"):
        mtp_engine(checkpoint("granitemoehybrid"))
    with pytest.raises(ConfigError, match=r"no weights mtp\.\*: it was saved without the head"):
        mtp_engine(checkpoint("qwen3_5"))


def test_node_with_the_head_when_another_has_none_then_neither_reads_the_others_memory(tmp_path: Path) -> None:
    folder = checkpoint_with_mtp("qwen3_5", tmp_path / "model")
    _, with_head = mtp_engine(folder)
    config = NodeConfig(model=str(folder), dtype="float32", device="cpu", **ROOMY)
    without = load_node_model(config)
    assert layout_fingerprint(with_head) != layout_fingerprint(without)
    assert with_head.cache_config.root_key != without.cache_config.root_key
    assert with_head.storage.layout.group_block_bytes[0] == 2 * without.storage.layout.group_block_bytes[0]
