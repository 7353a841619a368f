"""The weights ``mtp.*`` of a checkpoint, and the head that they make; transformers ignores them."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ConfigError
from common.geometry.families import FAMILIES, Family
from common.kv_cache.spec import ModelGeometry
from common.models.adapter.mtp import MtpHead, create_head, head_layers

FLAG = "--speculative-config"
_NAME = re.compile(r"(?:language_model\.|model\.)*mtp\.(.+)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
"""An expert's own matrix, which transformers' modules hold stacked with the others'."""


def load_mtp(folder: Path, model: Any, family: Family, geometry: ModelGeometry, dtype: torch.dtype) -> MtpHead:
    """The head for ``model``, the transformers model of ``folder`` before anything of it was replaced.

    Raises:
        ConfigError: the family has none, the checkpoint brings none, or another one than is known.
    """
    if not family.has_mtp:
        named = sorted(name for name, each in FAMILIES.items() if each.has_mtp)
        raise _error(f"models of type {geometry.model_type} have no such head; those that may: {', '.join(named)}")
    found = _read(folder)
    if not found:
        raise _error(f"{folder} has no weights mtp.*: it was saved without the head")
    config = copy.deepcopy(model.config.get_text_config())
    kinds = head_layers(config)
    if kinds[:1] != ["full_attention"] or not set(kinds[1:]) <= {"moe", "mlp"}:
        raise _error(f"a head of the layers {kinds} is not supported, only full_attention with moe or mlp behind it")
    if not any(layer.head_size for layer in geometry.attention_layers):
        raise _error("the model has no full-attention layer")
    base = getattr(model.base_model, "language_model", model.base_model)
    with torch.device("meta"):
        head = create_head(base, config)
    parameters = {name for name, _ in head.named_parameters()}
    weights = {
        name: (x.to(dtype) if name in parameters and x.is_floating_point() else x)
        for name, x in _stack_experts(found).items()
    }
    try:
        head.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as exc:
        raise _error(f"the head's weights do not fit the config: {str(exc).strip()}") from exc
    placed: MtpHead = head.to(model.device).eval().requires_grad_(False)
    return placed


def _read(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    if match := _NAME.fullmatch(name):
                        found[match[1]] = file.get_tensor(name)
        except (OSError, SafetensorError) as exc:
            raise _error(f"{path} cannot be read: {exc}") from exc
    return found


def _stack_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As transformers' modules hold them: ``gate_up_proj`` (or ``up_proj``) and ``down_proj``, [experts, out, in]."""
    stacked: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for name, weight in weights.items():
        if match := _EXPERT.fullmatch(name):
            experts[match[1]][match[3]][int(match[2])] = weight
        else:
            stacked[name] = weight
    for place, kinds in experts.items():
        matrices = {kind: torch.stack([each[index] for index in sorted(each)]) for kind, each in kinds.items()}
        if "gate_proj" in matrices and "up_proj" in matrices:
            matrices["gate_up_proj"] = torch.cat([matrices.pop("gate_proj"), matrices.pop("up_proj")], dim=1)
        stacked |= {f"{place}.{kind}": matrix for kind, matrix in matrices.items()}
    return stacked


def _error(problem: str) -> ConfigError:
    return ConfigError(f'{FLAG} {{"method": "mtp"}}: {problem}', param=FLAG)
