"""``--generation-config``: the checkpoint's own defaults for sampling, from its ``generation_config.json``.

As vLLM has them: what a request does not say is taken from there (temperature, top_p, top_k, min_p,
repetition_penalty), and ``max_new_tokens`` bounds every answer.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from common.errors import ConfigError, InvalidRequestError
from common.openai.bodies.base import read_body
from common.openai.bodies.models import AnswerFields
from common.openai.sampling import SamplingDefaults

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
AUTO, NONE = "auto", "vllm"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_TOKENS = "max_new_tokens"


def read_sampling_defaults(flag: str, model_folder: Path) -> SamplingDefaults:
    """``flag``: ``auto`` (the model's file, if it has one), ``vllm`` (none), or a folder that has the file.

    Raises:
        ConfigError: no such file, not an object, or a value that no request could have.
    """
    if flag == NONE:
        return SamplingDefaults()
    path = (model_folder if flag == AUTO else Path(flag)) / FILE
    if flag == AUTO and not path.exists():
        return SamplingDefaults()
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"--generation-config {flag}: {path} cannot be read: {exc}", param="--generation-config"
        ) from exc
    if not isinstance(value, dict):
        raise ConfigError(f"--generation-config {flag}: {path} must hold an object", param="--generation-config")
    given: dict[str, Any] = {name: value.get(name) for name in _NAMES}
    try:
        fields = read_body(AnswerFields, {**given, "max_tokens": value.get(_MAX_TOKENS)})
    except InvalidRequestError as exc:
        message = exc.message.replace("max_tokens", _MAX_TOKENS)
        raise ConfigError(f"--generation-config {flag}: {path}: {message}", param="--generation-config") from exc
    defaults = SamplingDefaults.of(fields)
    if defaults != SamplingDefaults():
        logger.info(
            "sampling defaults file=%s %s", path, {key: each for key, each in given.items() if each is not None}
        )
    return defaults
