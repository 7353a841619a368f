"""The files of a checkpoint: where they are, and its config, weights and tokenizer read from them.

transformers' and the hub's errors are translated here: what cannot be used leaves by ``ConfigError`` with the reason.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

from common.errors import ConfigError
from common.kv_cache.spec import DTYPE_BYTES

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
"""What is fetched of a hub repository: no pickled weights."""
_SCALE = re.compile(
    r"(.*\.|.*(weight|input|output|activation|proj)_)?(scales?|scale_inv|scale_2|zero_point|qweight|qzeros|absmax|SCB)"
)
"""What quantised weights mean nothing without. Other tensors may be left over: heads, towers, old buffers."""


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


def resolve_dtype(dtype: str, raw_config: Mapping[str, Any]) -> str:
    """The dtype of the run; ``auto``: the one that the config names, else float32.

    Raises:
        ConfigError: no dtype that the engine runs in.
    """
    if dtype == "auto":
        nested = raw_config.get("text_config") or {}
        found = [c.get(key) for c in (raw_config, nested) for key in ("dtype", "torch_dtype")]
        dtype = str(next((value for value in found if value), "float32")).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {dtype!r}: must be one of auto, {', '.join(DTYPE_BYTES)}", param="--dtype")
    return dtype


def load_weights(folder: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    """The transformers model with the weights of ``folder``, in eval mode.

    Raises:
        ConfigError: the weights cannot be read, or do not fit the config.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        quantization = _quantization(config)
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
    if not quantization and (scales := sorted(filter(_SCALE.fullmatch, report["unexpected_keys"]))):
        wrong["scales of quantised weights without a quantization_config"] = scales
    if wrong:
        examples = "; ".join(f"{len(keys)} {name}, e.g. {keys[0]}" for name, keys in wrong.items())
        raise ConfigError(f"--model {str(folder)!r}: the weights do not fit the config: {examples}", param="--model")
    return model.to(device).eval().requires_grad_(False)


def _quantization(config: Any) -> Mapping[str, Any] | None:
    """The config's own, where transformers would read it. Raises ConfigError where it would go on without it."""
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )
    if found and not AutoHfQuantizer.supports_quant_method(found):
        known = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
        raise ConfigError(
            f"config.json: quantization_config.quant_method is {found.get('quant_method')!r}, must be one of {known}",
            param="--model",
        )
    return found


def eos_token_ids(model: Any, raw_config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Tokens that end an answer, sorted: those of the generation config and those that ``config.json`` names.

    A config class has a default of its own, 2 in many families, which may be any token of this vocabulary: it counts
    only where the checkpoint names none. ``vocab_size``: of the logits. Tokens that they do not have never come, and
    the sampler could not hide them: they are left out.
    """
    configs = (raw_config.get("text_config") or {}, raw_config)
    named = _token_ids(next((each["eos_token_id"] for each in configs if "eos_token_id" in each), None))
    named |= _token_ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    found = named or _token_ids(getattr(model.config.get_text_config(), "eos_token_id", None))
    known = {token_id for token_id in found if 0 <= token_id < vocab_size}
    if known != found:
        logger.warning(
            "end tokens left out, the vocabulary does not have them ids=%s vocab_size=%d",
            sorted(found - known),
            vocab_size,
        )
    return tuple(sorted(known))


def _token_ids(value: int | Sequence[int] | None) -> set[int]:
    return {value} if isinstance(value, int) else set(value or ())
