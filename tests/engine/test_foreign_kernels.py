"""Kernels of others in the environment: transformers would take them, so a model is not loaded beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from common.errors import ConfigError
from common.models.loading.foreign_kernels import FOREIGN
from common.models.loading.loader import load_model
from tests.support.models import checkpoint


@pytest.mark.parametrize(("module", "distribution"), FOREIGN.items())
def test_load_when_foreign_kernels_are_installed_then_refused_by_name(
    module: str, distribution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / module).mkdir()
    # Its import is not what is refused: it may fail, or take long.
    (tmp_path / module / "__init__.py").write_text("raise RuntimeError('was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"{module} is installed .*pip uninstall {distribution}$"):
        load_model(str(checkpoint("qwen3_5")), dtype="float32")
    monkeypatch.undo()
    assert load_model(str(checkpoint("qwen3_5")), dtype="float32").geometry.model_type == "qwen3_5_text"


def test_functions_that_transformers_takes_from_foreign_packages_are_all_of_those_that_are_refused() -> None:
    found: set[str] = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        found |= set(re.findall(r'^@use_kernel_func_from_hub_with_fallback\("\w+", "(\w+)"', path.read_text(), re.M))
    assert found == set(FOREIGN)
