"""Checkpoints as they come from disk: in shards, with tied and untied heads, with a config that lies about the weights;
and the one place where stock itself is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import ConfigError
from common.geometry.families import FAMILIES
from common.geometry.geometry import model_geometry
from common.models.adapter.arguments import stock_cache
from common.models.loading.loader import load_model
from common.models.loading.quiet import quiet_transformers
from tests.engine.harness import Harness, Work, random_tokens, stock_greedy, stock_logits, stock_model, tolerance
from tests.support.models import checkpoint, tiered
from tests.unit.test_docs_models import NEEDED

PROMPT = random_tokens(40, 71)


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "family", tiered(("granitemoehybrid", "mamba2", "zamba2", "qwen3_5", "lfm2_moe"), ("granitemoehybrid",))
)
def test_checkpoint_when_in_shards_with_its_head_tied_or_not_then_is_what_was_saved(
    tmp_path: Path, family: str, tied: bool
) -> None:
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32)
        if tied:
            model.config.tie_word_embeddings = True
            model.tie_weights()
        model.save_pretrained(tmp_path, max_shard_size="200KB")
        saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert (tmp_path / "model.safetensors.index.json").is_file()
    names = [name for shard in shards for name in safe_open(shard, "pt").keys()]  # noqa: SIM118
    assert any("lm_head" in name for name in names) is not tied
    # Its probe compares the engine with stock on these weights; the torch ops leave them where they can be looked at.
    loaded = load_model(str(tmp_path), ops_backend="torch")
    rows = torch.randn(3, loaded.geometry.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(loaded.model.get_input_embeddings().weight, saved.get_input_embeddings().weight)
        assert torch.equal(loaded.model.get_output_embeddings().weight, saved.get_output_embeddings().weight)
    head = loaded.model.get_output_embeddings().weight
    assert torch.equal(head, loaded.model.get_input_embeddings().weight) is tied
    assert loaded.head.logits(rows).shape == (3, loaded.geometry.vocab_size)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_config_when_fields_are_missing_then_it_means_what_transformers_makes_of_it_and_saves(model_type: str) -> None:
    given = NEEDED.get(model_type, {})
    saved = AutoConfig.for_model(model_type, **given).to_dict()
    assert model_geometry({"model_type": model_type, **given}, "float32") == model_geometry(saved, "float32")


# The raw config is read without torch; what it leads to must be what the weights are. Each of these is a field that the
# geometry reads and transformers does not (or the other way round), as a changed default or a new alias would be.
MISREADINGS = [
    (
        "falcon_h1",
        {"num_key_value_heads": 1},
        "layer 0 .*plans K/V of 1 heads x 32.* has K/V of 2 heads x 32",
    ),
    ("zamba2", {"mamba_d_state": 8}, r"layer 0 .*recurrent state \[4, 32, 8\].* has .*recurrent state \[4, 32, 16\]"),
    ("mamba2", {"conv_kernel": 3}, r"layer 0 .*conv state \[192, 2\].* has conv state \[192, 3\]"),
    ("mamba", {"state_size": 8}, r"recurrent state \[128, 8\].* has .*recurrent state \[128, 16\]"),
    ("minimax", {"head_dim": 8}, r"recurrent state \[4, 8, 8\].* has recurrent state \[4, 16, 16\]"),
    ("lfm2_moe", {"layer_types": ["conv"] * 4}, "layer 1 .*plans conv state .* the model has K/V of 2 heads"),
    ("llama", {"num_hidden_layers": 5}, "layer 4 .*plans K/V of 2 heads x 32, the model has nothing"),
]


@pytest.mark.parametrize(("family", "misread", "message"), MISREADINGS, ids=[case[0] for case in MISREADINGS])
def test_load_model_when_the_geometry_differs_from_the_weights_then_refuses_naming_the_layer(
    monkeypatch: pytest.MonkeyPatch, family: str, misread: dict[str, Any], message: str
) -> None:
    raw = json.loads((checkpoint(family) / "config.json").read_text())
    monkeypatch.setattr("common.models.loading.loader.read_config", lambda folder: raw | misread)
    with pytest.raises(ConfigError, match=message):
        load_model(str(checkpoint(family)))


def test_load_model_when_the_model_attends_in_a_window_then_refuses_to_serve_it_as_full_attention(
    tmp_path: Path,
) -> None:
    # The probe's 40 tokens would fit into the window; what stock's cache is made of does not lie.
    folder = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))
    raw = json.loads((folder / "config.json").read_text())
    edit_config(folder, layer_types=["sliding_attention"] * 4, use_sliding_window=True, sliding_window=256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.models.loading.loader.read_config", lambda folder: raw)
        with pytest.raises(ConfigError, match=r"layer 0 .*plans K/V of .*, the model has K/V of .* in a window of 256"):
            load_model(str(folder))


@pytest.mark.parametrize("family", tiered(("jamba", "mamba", "falcon_mamba", "zamba"), ("jamba",)))
def test_mamba1_when_a_prompt_comes_in_two_chunks_then_stock_is_wrong_and_the_engine_is_right(family: str) -> None:
    whole = stock_logits(family, PROMPT)
    with torch.inference_mode():
        model = stock_model(family)
        first = model(input_ids=torch.tensor([PROMPT[:25]]), use_cache=True)
        name = "past_key_values" if getattr(first, "past_key_values", None) is not None else "cache_params"
        second = model(input_ids=torch.tensor([PROMPT[25:]]), use_cache=True, **{name: stock_cache(first)})
    stock = second.logits[0].float()
    assert float((stock - whole[25:]).abs().max()) > 100 * tolerance(family)  # it forgets the scan's state
    harness = Harness(family)
    harness.add("A", 1, 64)
    harness.logits(Work("A", PROMPT[:25]))
    (ours,) = harness.logits(Work("A", PROMPT[25:]))
    assert float((ours - whole[25:]).abs().max()) < tolerance(family)


def test_zamba2_when_a_block_is_shared_by_call_sites_then_each_has_its_own_keys() -> None:
    harness = Harness("zamba2")
    geometry = harness.model.geometry
    assert [layer.layer_idx for layer in geometry.attention_layers] == [1, 3, 4]
    harness.add("A", 1, 64)
    harness.prefill("A", PROMPT)
    block = harness.sequences["A"].block_ids[0]
    keys = [harness.storage.attention_layer(index)[0][block] for index in (1, 3, 4)]
    assert all(float((a - b).abs().max()) > 0.1 for a, b in ((keys[0], keys[1]), (keys[1], keys[2])))


@pytest.mark.parametrize("target", ["attention", "state"])
def test_falcon_h1_when_one_half_of_a_layer_is_lost_then_the_answer_changes(target: str) -> None:
    """A layer belongs to both groups: each half counts."""
    harness = Harness("falcon_h1")
    for name, slot in (("A", 1), ("Z", 2)):
        harness.add(name, slot, 64)
        first = harness.prefill(name, PROMPT)
    if target == "state":
        for tensor in harness.storage.state_layer(2).values():
            tensor[2].zero_()
    else:
        for tensor in harness.storage.attention_layer(2):
            tensor[harness.sequences["Z"].block_ids[0]].zero_()
    token = int(first.argmax())
    kept, lost = harness.logits(Work("A", [token]), Work("Z", [token]))
    assert float((kept - lost).abs().max()) > 10 * tolerance("falcon_h1")
    assert stock_greedy("falcon_h1", PROMPT, 2)[0][1] == int(kept.argmax())
