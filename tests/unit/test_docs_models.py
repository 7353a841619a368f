"""``docs/models.md`` lists the families that run, each with its mixer, and those that are refused, each with its
reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.geometry.families import CONV, FAMILIES, GATED_DELTA, KIMI_DELTA, MAMBA1, MAMBA2, Family
from common.geometry.geometry import model_geometry
from common.geometry.refused import REFUSED_FAMILIES

ROOT = Path(__file__).resolve().parents[2]
MIXERS = {
    (CONV, MAMBA2): "Mamba-2",
    (CONV, MAMBA1): "Mamba-1",
    (CONV, GATED_DELTA): "gated delta rule",
    (CONV, KIMI_DELTA): "Kimi delta rule",
    (CONV,): "short convolution",
}
# Where the config class's own defaults have no attention, or no layers at all.
NEEDED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
}
WITHOUT_FUNCTIONS = {"MiniMaxLightningAttention": "lightning attention", None: "none"}


def rows(section: str) -> dict[str, list[str]]:
    """First cell, without its backquotes -> the other cells, of the table under ``## section``."""
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    lines = text.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    found = {first.strip("`"): rest for first, *rest in cells if first != "`model_type`"}
    assert list(found) == sorted(found)
    return found


def mixer(family: Family) -> str:
    return MIXERS[family.functions] if family.functions else WITHOUT_FUNCTIONS[family.mixer_class]


def test_served_table_when_compared_with_the_families_names_each_with_its_mixer() -> None:
    assert {name: cells[0] for name, cells in rows("Served").items()} == {n: mixer(f) for n, f in FAMILIES.items()}


def test_served_table_when_compared_with_the_geometries_says_which_have_no_attention() -> None:
    for name, (_, attention, notes) in rows("Served").items():
        geometry = model_geometry({"model_type": name, **NEEDED.get(name, {})}, "float32")
        assert attention.startswith("none") is not bool(geometry.attention_layers), name
        assert ("--max-model-len" in notes) is (geometry.max_position == 0), name
        if "every layer" in attention:
            assert len(geometry.attention_layers) == geometry.num_layers, name


def test_refused_table_when_compared_with_the_refusals_gives_the_same_reasons() -> None:
    assert {name: cells[0] for name, cells in rows("Refused").items()} == REFUSED_FAMILIES


def test_families_when_asked_for_one_that_is_unknown_are_those_that_have_a_geometry() -> None:
    with pytest.raises(ConfigError) as caught:
        model_geometry({"model_type": "bert"}, "float32")
    listed = re.split("supported: ", caught.value.message)[1].split(", ")
    assert listed == sorted(FAMILIES)
    assert not FAMILIES.keys() & REFUSED_FAMILIES.keys()


def test_readme_when_it_speaks_of_families_points_to_the_table() -> None:
    assert "docs/models.md" in (ROOT / "README.md").read_text(encoding="utf-8")
