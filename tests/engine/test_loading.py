"""Loading: what is refused and with which words, the probe, the fingerprint, the head."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from common.errors import ConfigError
from common.models.loading.checkpoint import eos_token_ids, read_config
from common.models.loading.fingerprint import model_fingerprint
from common.models.loading.loader import load_model
from common.models.loading.quiet import quiet_transformers
from tests.engine.harness import engine_model, random_tokens, stock_logits, stock_model
from tests.support.models import FAMILIES, VOCAB_SIZE, checkpoint, tiered
from tests.support.ops import OPS_BACKENDS, make_ops


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A private copy of the Granite checkpoint, to be spoilt."""
    return Path(shutil.copytree(checkpoint("granitemoehybrid"), tmp_path / "model"))


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_load_model_when_the_folder_is_missing_then_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_model(str(tmp_path / "nowhere"))


def test_load_model_when_there_is_no_config_then_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(str(tmp_path))


def test_load_model_when_the_config_is_no_json_then_names_the_file(copied: Path) -> None:
    (copied / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_model(str(copied))


def test_load_model_when_the_model_type_is_unknown_then_lists_the_supported_ones(copied: Path) -> None:
    edit_config(copied, model_type="bert")
    with pytest.raises(ConfigError, match=r"'bert' is not supported; supported: .*granitemoehybrid.*qwen3_next"):
        load_model(str(copied))


def test_load_model_when_the_dtype_is_unknown_then_names_the_flag(copied: Path) -> None:
    with pytest.raises(ConfigError, match="--dtype 'int8'"):
        load_model(str(copied), dtype="int8")


@pytest.mark.parametrize("kept_bytes", [4, 1000, -1000])
def test_load_model_when_the_weights_are_cut_short_then_names_the_file(copied: Path, kept_bytes: int) -> None:
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ConfigError, match=r"weights cannot be read \(model\.safetensors\)"):
        load_model(str(copied))


def test_load_model_when_there_are_no_weights_then_refuses(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(str(copied))


def test_load_model_when_the_weights_are_of_another_shape_then_refuses(copied: Path) -> None:
    edit_config(copied, shared_intermediate_size=96)
    with pytest.raises(ConfigError, match=r"do not fit the config|cannot be loaded"):
        load_model(str(copied))


def test_load_model_when_layers_are_missing_in_the_file_then_refuses(copied: Path) -> None:
    types = ["mamba", "attention", "mamba", "attention", "mamba"]
    edit_config(copied, num_hidden_layers=5, layer_types=types)
    with pytest.raises(ConfigError, match="missing_keys"):
        load_model(str(copied))


def quantise(folder: Path) -> None:
    """Matrices in FP8 of unchanged shape, each with its scale beside it, as modelopt writes them."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[f"{name}_scale"] = weights[name].abs().amax() / 448
        weights[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(1.0)
        weights[name] = (weights[name] / weights[f"{name}_scale"]).to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", tiered(("llama", "jamba", "qwen3_5_vl"), ("llama",)))
def test_load_model_when_weights_have_scales_that_nobody_would_apply_then_refuses(tmp_path: Path, family: str) -> None:
    folder = Path(shutil.copytree(checkpoint(family), tmp_path / "model"))
    quantise(folder)
    with pytest.raises(ConfigError, match=r"\d\d scales of quantised weights .*, e\.g\. model\..*_proj\.input_scale"):
        load_model(str(folder))
    edit_config(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(ConfigError, match=r"quantization_config\.quant_method is 'modelopt', must be one of .*, fp8,"):
        load_model(str(folder))


def test_load_model_when_the_text_model_is_quantised_in_an_unknown_way_then_refuses(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3_5_vl"), tmp_path / "model"))
    text = {**read_config(folder)["text_config"], "quantization_config": {"quant_method": "modelopt"}}
    edit_config(folder, text_config=text)
    with pytest.raises(ConfigError, match=r"quantization_config\.quant_method is 'modelopt'"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["mtp.0.weight", "model.layers.9.mlp.up_proj.weight", "vision.logit_scale"])
def test_load_model_when_other_tensors_are_left_over_then_is_loaded(copied: Path, name: str) -> None:
    weights = load_file(copied / "model.safetensors") | {name: torch.zeros(2)}
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(copied)).geometry.num_layers == 4


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("granitemoehybrid", "mamba2"),
        ("jamba", "mamba1"),
        ("qwen3_5", "gated_delta"),
        ("lfm2", "conv1d"),
        ("llama", "attention"),
    ],
)
@pytest.mark.parametrize("dtype", tiered(("float32", "bfloat16"), ("bfloat16",)))
@pytest.mark.parametrize("backend", tiered(OPS_BACKENDS, ("cpp",)))
def test_load_model_when_an_op_is_wrong_then_the_probe_refuses(
    monkeypatch: pytest.MonkeyPatch, family: str, name: str, backend: str, dtype: str
) -> None:
    ops_class = type(make_ops(backend))
    right = getattr(ops_class, name)

    def wrong(*args: object, **kwargs: object) -> Tensor:
        return right(*args, **kwargs).flip(0)

    monkeypatch.setattr(ops_class, name, wrong)
    with pytest.raises(ConfigError, match="failed the numeric probe"):
        load_model(str(checkpoint(family)), dtype=dtype, ops_backend=backend)


@pytest.mark.parametrize("family", tiered(FAMILIES, ("granitemoehybrid", "gemma3", "qwen3_5")))
def test_load_model_when_done_then_a_stock_model_in_the_process_is_undisturbed(family: str) -> None:
    prompt = random_tokens(30, 1)
    before = stock_logits(family, prompt)
    loaded = engine_model(family)
    assert torch.equal(stock_logits(family, prompt), before)
    assert loaded.model is not stock_model(family)
    assert loaded.eos_token_ids == (1,)
    assert loaded.tokenizer is not None
    assert not any(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, {"eos_token_id": 5}, (5,)),  # and not 2, the default of llama's config class
        ({"eos_token_id": None}, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": 3}, {"eos_token_id": [5, 3]}, (3, 5)),
        ({"eos_token_id": 3}, {"eos_token_id": 5}, (3, 5)),
        ({"eos_token_id": 3}, {}, (3,)),
        ({"eos_token_id": 3}, None, (3,)),
        ({}, {}, (2,)),
        ({}, None, (2,)),
    ],
)
def test_end_tokens_when_a_checkpoint_names_some_then_its_config_class_adds_none(
    tmp_path: Path, config: dict[str, object], generation: dict[str, object] | None, expected: tuple[int, ...]
) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    raw = read_config(folder)
    del raw["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(raw | config))
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation is not None:
        path.write_text(json.dumps(generation))
    assert load_model(str(folder), ops_backend="torch").eos_token_ids == expected


def test_end_tokens_when_a_wrapper_names_some_then_those_of_its_text_model_come_first() -> None:
    def found(raw_config: dict[str, object]) -> tuple[int, ...]:
        text_config = SimpleNamespace(eos_token_id=1)
        model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text_config), generation_config=None)
        return eos_token_ids(model, raw_config, vocab_size=8)

    assert found({"eos_token_id": 3, "text_config": {"eos_token_id": [4, 5]}}) == (4, 5)
    assert found({"eos_token_id": 3, "text_config": {}}) == (3,)
    assert found({"text_config": {}}) == (1,)


def test_end_tokens_when_the_logits_do_not_have_some_then_these_are_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[9, 5, -1, 8]))
    assert eos_token_ids(model, {"eos_token_id": 0}, vocab_size=8) == (0, 5)
    assert "ids=[-1, 8, 9] vocab_size=8" in caplog.text


def test_load_model_when_the_vocabulary_does_not_have_an_end_token_then_it_is_left_out(copied: Path) -> None:
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, VOCAB_SIZE]}))
    assert load_model(str(copied), ops_backend="torch").eos_token_ids == (1, 5)


@pytest.mark.parametrize("family", ["gemma3_vl", "lfm2_vl", pytest.param("lfm3_vl", marks=pytest.mark.full)])
def test_load_model_when_transformers_loads_a_vision_tower_then_it_is_taken_out_and_text_alone_is_paged(
    family: str,
) -> None:
    model, stock = engine_model(family, ops="torch").model, stock_model(family)
    assert model.config.text_config._attn_implementation != stock.config.text_config._attn_implementation
    assert model.config.vision_config._attn_implementation == stock.config.vision_config._attn_implementation
    assert {name for name, _ in stock.model.named_children()} > {"language_model"}
    assert [name for name, _ in model.model.named_children()] == ["language_model"]


@pytest.mark.parametrize("family", tiered(FAMILIES, ("granitemoehybrid", "gemma3", "qwen3_5")))
def test_head_when_given_last_hidden_rows_then_equals_the_full_forward(family: str) -> None:
    prompt = random_tokens(25, 2)
    with torch.inference_mode():
        hidden = stock_model(family).base_model(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state
    found = engine_model(family).head.logits(hidden[0, 5:9])
    assert float((found - stock_logits(family, prompt)[5:9]).abs().max()) < 1e-5
    assert engine_model(family).head.logits(hidden[0, :0]).shape[0] == 0


@pytest.mark.parametrize("family", tiered(("mamba2", "mamba", "falcon_mamba"), ("mamba2",)))
def test_rows_when_the_residual_is_float32_then_the_head_takes_them_in_its_own_dtype(family: str) -> None:
    loaded = engine_model(family, "bfloat16")
    rows = torch.randn(5, loaded.geometry.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.head.logits(rows), loaded.head.logits(rows.to(torch.bfloat16)))


def test_fingerprint_when_weights_dtype_config_or_revision_differ_then_differs(copied: Path, tmp_path: Path) -> None:
    def fingerprint(dtype: str = "float32", revision: str | None = None) -> str:
        return model_fingerprint(copied, read_config(copied), dtype=dtype, revision=revision, cache_dir=tmp_path / "c")

    first = fingerprint()
    assert fingerprint() == first
    seen = {first, fingerprint(dtype="bfloat16"), fingerprint(revision="main")}
    edit_config(copied, transformers_version="0.0")
    assert fingerprint() == first
    edit_config(copied, logits_scaling=3.0)
    seen.add(fingerprint())
    path = copied / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    seen.add(fingerprint())
    assert len(seen) == 5


@pytest.mark.parametrize("keeps_change_time", [True, False])
@pytest.mark.parametrize(("start", "num_changed"), [(20, 1), (9 << 20, 64 << 10)], ids=["header", "matrix"])
def test_fingerprint_when_weights_are_replaced_with_size_and_time_kept_then_differs(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, num_changed: int, keeps_change_time: bool
) -> None:
    """With the time of change as any file system keeps it, and on one that does not: then the sample tells."""
    real_stat = Path.stat

    def stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = real_stat(path, follow_symlinks=follow_symlinks)
        return os.stat_result(found, {"st_mtime_ns": found.st_mtime_ns, "st_ctime_ns": 0})

    if not keeps_change_time:
        monkeypatch.setattr(Path, "stat", stat)
    path = copied / "model.safetensors"
    header = {"w": {"dtype": "U8", "shape": [16 << 20], "data_offsets": [0, 16 << 20]}}
    text = json.dumps(header).encode()
    data = bytearray(len(text).to_bytes(8, "little") + text + random.Random(5).randbytes(16 << 20))
    path.write_bytes(data)
    times = (real_stat(path).st_atime_ns, real_stat(path).st_mtime_ns)

    def fingerprint() -> str:
        return model_fingerprint(copied, read_config(copied), dtype="float32", revision=None, cache_dir=tmp_path / "c")

    first = fingerprint()
    assert fingerprint() == first
    for index in range(start, start + num_changed):
        data[index] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=times)
    assert fingerprint() != first


def test_fingerprint_when_one_byte_that_no_sample_has_is_replaced_with_size_and_time_kept_then_differs(
    copied: Path, tmp_path: Path
) -> None:
    path = copied / "model.safetensors"
    data = bytearray(random.Random(6).randbytes(32 << 20))
    found = set()
    for _ in range(2):
        path.write_bytes(data)
        os.utime(path, ns=(1, 1))
        found.add(model_fingerprint(copied, read_config(copied), dtype="x", revision=None, cache_dir=tmp_path / "c"))
        data[-1] ^= 1
    assert len(found) == 2


def test_fingerprint_when_the_same_files_lie_elsewhere_then_is_the_same(copied: Path, tmp_path: Path) -> None:
    folders = (copied, checkpoint("granitemoehybrid"))
    found = {
        model_fingerprint(f, read_config(f), dtype="float32", revision=None, cache_dir=tmp_path / "c") for f in folders
    }
    assert len(found) == 1


def test_fingerprint_when_the_cache_folder_cannot_be_written_then_is_the_same(copied: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    arguments = {"dtype": "float32", "revision": None}
    expected = model_fingerprint(copied, read_config(copied), cache_dir=tmp_path / "c", **arguments)
    assert model_fingerprint(copied, read_config(copied), cache_dir=blocked, **arguments) == expected


def test_load_model_when_the_config_is_nested_then_runs_the_text_model(tmp_path: Path) -> None:
    text = read_config(checkpoint("qwen3_5"))
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    whole = Qwen3_5ForConditionalGeneration(config).eval()
    with quiet_transformers():
        whole.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.geometry.model_type == "qwen3_5"
    assert loaded.tokenizer is None
    rows = torch.randn(3, loaded.geometry.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = whole.lm_head(rows)
    assert float((loaded.head.logits(rows) - expected).abs().max()) < 1e-5
