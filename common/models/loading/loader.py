"""From a checkpoint folder or hub id to a model that runs with all of its state outside.

1 read the raw config and derive the geometry (no weights yet). 2 load the weights straight to the target dtype. 3 put
compiled linear layers and norms in (C++ backend). 4 check that the seam fits: functions present, mixers counted, shapes
as planned. 5 probe: stock forward, from before step 3, against chunked engine. Leaves by: a ``LoadedModel``, or
``ConfigError`` with the reason. A family never runs unprobed.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from common.errors import ConfigError
from common.geometry.geometry import model_geometry
from common.kv_cache.spec import DTYPE_BYTES, ModelGeometry
from common.models.adapter.families import FAMILIES, Family
from common.models.adapter.head import Head
from common.models.adapter.patching import EngineCache, install, missing_functions, use_paged_attention
from common.models.cpu.activations import fuse_activations
from common.models.cpu.gated_mlps import fuse_gated_mlps
from common.models.cpu.linears import pack_linears
from common.models.cpu.norms import fuse_norms
from common.models.loading.fingerprint import model_fingerprint, user_cache_dir
from common.models.loading.probe import check_numbers, check_replay, probe_tokens, stock_logits
from common.models.loading.quiet import quiet_transformers
from common.ops.cpu.backend import CppOps
from common.ops.interface import Ops
from common.ops.select import create_ops

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal-LM ready for :class:`common.engine.model_runner.ModelRunner`.

    Attributes:
        model: the transformers model, in eval mode, on ``device``, attention switched to the paged function.
        config: its text config.
        geometry: what the cache must hold for it, checked against the loaded modules.
        dtype, device: of the weights.
        ops: the backend that the seam calls.
        fingerprint: hex digest of config, weights, dtype and revision.
        head: rows of the last hidden state -> logits.
        tokenizer: the checkpoint's tokenizer, or None when it has none.
        eos_token_ids: from the generation config and the config, sorted.
        folder: where the files are.
        is_replayed: whether a recorded decode step (:mod:`common.models.cpu.replay`) gave the same bits as the forward.
    """

    model: Any
    config: Any
    geometry: ModelGeometry
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    fingerprint: str
    head: Head
    tokenizer: Any | None
    eos_token_ids: tuple[int, ...]
    folder: Path
    is_replayed: bool


def load_model(
    model: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    ops_backend: str = "auto",
    prebuilt_ops: str | None = None,
    enforce_eager: bool = False,
    compact_weights: bool = False,
) -> LoadedModel:
    """Load ``model`` (a local folder or a hub id).

    ``dtype`` is float32 | bfloat16 | float16 | auto (the checkpoint's own). ``seed`` picks the probe's tokens.
    ``ops_backend`` is auto | torch | cpp, ``prebuilt_ops`` a folder (:func:`common.ops.select.create_ops`).
    ``enforce_eager``: decode steps are not replayed (:mod:`common.models.cpu.replay`). ``compact_weights``: packed for
    decode steps rather than for prompts (:func:`common.models.cpu.linears.pack_linears`).

    Raises:
        ConfigError: no such folder or no config in it, unsupported ``model_type``, unreadable weights, failed probe.
    """
    begin_s = time.monotonic()
    folder = resolve_folder(model, revision)
    raw_config = read_config(folder)
    dtype = _resolve_dtype(dtype, raw_config)
    geometry = model_geometry(raw_config, dtype)  # refuses what is not in FAMILIES
    family = FAMILIES[geometry.model_type]
    target = torch.device(device)
    ops = create_ops(
        ops_backend,
        dtype=getattr(torch, dtype),
        device=target,
        cache_dir=user_cache_dir(),
        prebuilt_dir=Path(prebuilt_ops) if prebuilt_ops is not None else None,
    )
    with quiet_transformers():
        loaded = _load_weights(folder, getattr(torch, dtype), target, trust_remote_code)
        head = Head(loaded)
        tokens = probe_tokens(geometry.vocab_size, seed)
        expected = stock_logits(loaded, tokens, geometry, target)
        num_parameters = sum(p.numel() for p in loaded.parameters())
        if isinstance(ops, CppOps):
            pack_linears(loaded, ops.linears, is_compact=compact_weights)
            fuse_norms(loaded, ops.norms)
            fuse_activations(loaded, ops.elementwise)
            fuse_gated_mlps(loaded, ops.elementwise)
        _prepare(loaded, family, geometry)
        check_numbers(
            loaded,
            EngineCache(),
            ops,
            geometry,
            tokens,
            expected,
            dtype=getattr(torch, dtype),
            device=target,
            tolerance=family.probe_tolerance,
        )
        is_replayed = (
            not enforce_eager and isinstance(ops, CppOps) and check_replay(loaded, EngineCache(), ops, geometry, tokens)
        )
    logger.info(
        "model loaded folder=%s model_type=%s dtype=%s device=%s ops=%s parameters=%d seconds=%.1f",
        folder,
        geometry.model_type,
        dtype,
        target,
        ops.name,
        num_parameters,
        time.monotonic() - begin_s,
    )
    return LoadedModel(
        model=loaded,
        config=loaded.config.get_text_config(),
        geometry=geometry,
        dtype=getattr(torch, dtype),
        device=target,
        ops=ops,
        fingerprint=model_fingerprint(folder, raw_config, dtype=dtype, revision=revision),
        head=head,
        tokenizer=load_tokenizer(folder, trust_remote_code),
        eos_token_ids=_eos_token_ids(loaded),
        folder=folder,
        is_replayed=is_replayed,
    )


def resolve_folder(model: str, revision: str | None) -> Path:
    """The folder with the checkpoint's files: ``model`` itself, or the hub's snapshot of it (fetched if need be).

    Raises:
        ConfigError: neither.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not _HUB_ID.fullmatch(model):
        raise ConfigError(f"--model {model!r}: no such folder", param="--model")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise ConfigError(
            f"--model {model!r} is no folder here, and the hub did not give it "
            f"(revision {revision or 'main'}): {reason}",
            param="--model",
        ) from exc


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's ``config.json``.

    Raises:
        ConfigError: missing, or not a JSON object with a ``model_type``.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(f"--model {str(folder)!r}: the folder holds no config.json", param="--model") from exc
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--model: {path} cannot be read: {exc}", param="--model") from exc
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise ConfigError(f"--model: {path} has no model_type", param="--model")
    return raw


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Any | None:
    """The tokenizer in ``folder``, or None when there are no tokenizer files.

    Raises:
        ConfigError: the files are there and cannot be used.
    """
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as exc:
        raise ConfigError(f"--model {str(folder)!r}: the tokenizer cannot be loaded: {exc}", param="--model") from exc


def _resolve_dtype(dtype: str, raw_config: Mapping[str, Any]) -> str:
    if dtype == "auto":
        nested = raw_config.get("text_config") or {}
        found = [c.get(key) for c in (raw_config, nested) for key in ("dtype", "torch_dtype")]
        dtype = str(next((value for value in found if value), "float32")).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {dtype!r}: must be one of auto, {', '.join(DTYPE_BYTES)}", param="--dtype")
    return dtype


def _load_weights(folder: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        # A vision-language model of which transformers has no text-only class is loaded whole; it takes text as it is.
        is_text = type(config) in AutoModelForCausalLM._model_mapping
        model, report = (AutoModelForCausalLM if is_text else AutoModelForImageTextToText).from_pretrained(
            folder, config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except SafetensorError as exc:
        files = ", ".join(sorted(path.name for path in folder.glob("*.safetensors")))
        raise ConfigError(f"--model {str(folder)!r}: weights cannot be read ({files}): {exc}", param="--model") from exc
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as exc:
        raise ConfigError(
            f"--model {str(folder)!r} cannot be loaded: {type(exc).__name__}: {exc}", param="--model"
        ) from exc
    wrong = {name: sorted(map(str, report[name])) for name in ("missing_keys", "mismatched_keys") if report[name]}
    if wrong:
        examples = "; ".join(f"{len(keys)} {name}, e.g. {keys[0]}" for name, keys in wrong.items())
        raise ConfigError(f"--model {str(folder)!r}: the weights do not fit the config: {examples}", param="--model")
    return model.to(device).eval().requires_grad_(False)


def _prepare(model: Any, family: Family, geometry: ModelGeometry) -> None:
    """Check that the seam fits the loaded modules, and put it in.

    Raises:
        ConfigError: naming what differs from the planned geometry or the pinned transformers version.
    """
    mixers = [m for m in model.modules() if family.mixer_class and type(m).__name__ == family.mixer_class]
    planned = {layer.layer_idx: layer for layer in geometry.state_layers}
    if sorted(m.layer_idx for m in mixers) != sorted(planned):
        raise ConfigError(
            f"model_type {geometry.model_type!r}: the config plans recurrent layers {sorted(planned)}, the model has "
            f"{family.mixer_class} at {sorted(m.layer_idx for m in mixers)}",
            param="--model",
        )
    if mixers:
        if missing := missing_functions(type(mixers[0]), family.functions):
            raise ConfigError(
                f"transformers has no {', '.join(missing)} beside {family.mixer_class}: install transformers==5.23.*",
                param="--model",
            )
        install(type(mixers[0]), family.functions)
    use_paged_attention(model)


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    ids: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config.get_text_config()):
        value = getattr(holder, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or ())
    return tuple(sorted(ids))
