"""Fields that are not built: refused by name unless their value means what is done without them, and those that change
nothing.

``refuse_unsupported`` looks at the names that a body's model does not declare: a usual request costs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common.errors import InvalidRequestError
from common.openai.bodies.base import Body
from common.openai.prompt_ids import IMAGES_KEY, PROMPT_IDS_KEY
from common.wire.fields import shown
from common.wire.manifest_reader import TRANSFER_PARAMS_KEY
from common.wire.pull_sources import SOURCES_KEY
from common.wire.resume import RESUME_KEY, STREAM_STATE_KEY

IsNeutral = Callable[[object], bool]


def _is_empty(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is_one_of(*values: object) -> IsNeutral:
    """Or absent. ``True`` is not 1 here."""
    return lambda value: value is None or any(type(value) is type(each) and value == each for each in values)


HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "custom_labels",
        "guided_decoding_backend",
    }
)
"""Say something to others' services, and nothing of the answer."""

UNSUPPORTED: Mapping[str, IsNeutral] = {
    # OpenAI's
    "store": _is_empty,
    "suffix": _is_empty,
    "functions": _is_empty,
    "function_call": _is_one_of("none", "auto"),
    "modalities": _is_one_of(["text"]),
    "audio": _is_empty,
    "prediction": _is_empty,
    "web_search_options": _is_empty,
    "moderation": _is_empty,
    "verbosity": _is_one_of("medium"),
    "stream_options.include_obfuscation": _is_empty,
    # vLLM's
    "use_beam_search": _is_empty,
    "length_penalty": _is_one_of(1, 1.0),
    "early_stopping": _is_empty,
    "logits_processors": _is_empty,
    "prompt_embeds": _is_empty,
    "media_io_kwargs": _is_empty,
    "mm_processor_kwargs": _is_empty,
    "repetition_detection": _is_empty,
    "watermarking": _is_empty,
    "ec_transfer_params": _is_empty,
    "routed_experts_prompt_start": _is_one_of(0),
    "return_prompt_text": _is_empty,
    "return_token_offsets": _is_empty,
    "return_mm_kwargs": _is_empty,
    "spaces_between_special_tokens": _is_one_of(True),
    "stream_interval": _is_one_of(1),
    "vllm_xargs": _is_empty,
    # Of chats, for completions: what they mean there is done.
    "tool_choice": _is_one_of("none", "auto"),
    "parallel_tool_calls": _is_one_of(True),
    "include_reasoning": _is_one_of(True),
    "add_generation_prompt": _is_one_of(True),
    # SGLang's
    "regex": _is_empty,
    "ebnf": _is_empty,
    "json_schema": _is_empty,
    "stop_regex": _is_empty,
    "no_stop_trim": _is_empty,
    "reasoning": _is_empty,
    "separate_reasoning": _is_one_of(True),
    "stream_reasoning": _is_one_of(True),
    "input_ids": _is_empty,
    "lora_path": _is_empty,
    "session_params": _is_empty,
    "custom_logit_processor": _is_empty,
    "custom_params": _is_empty,
    "return_hidden_states": _is_empty,
    "return_routed_experts": _is_empty,
    "return_cached_tokens_details": _is_empty,
    "return_prompt_token_ids": _is_empty,
    "return_meta_info": _is_empty,
    "rid": _is_empty,
    "extra_key": _is_empty,
    "task": _is_empty,
}
"""Name -> whether a value means what is done without the field."""
_PREFIX = "guided_"
"""Of vLLM's old names for ``structured_outputs``."""
INTERNAL_FIELDS = frozenset(
    {TRANSFER_PARAMS_KEY, SOURCES_KEY, RESUME_KEY, STREAM_STATE_KEY, PROMPT_IDS_KEY, IMAGES_KEY}
)
"""Said by proxies to nodes alone: of a client, none of them gets past the proxy."""


def refuse_unsupported(body: Body, of_other_route: frozenset[str], *, prefix: str = "") -> tuple[str, ...]:
    """The names in ``body`` that nobody knows. ``of_other_route``: fields that act on the other generation route only;
    ``prefix``: of the names of a body that is part of another one.

    Raises:
        InvalidRequestError: a field that is not built, or not for this route; ``code`` is ``unsupported_parameter``.
    """
    unknown: list[str] = []
    for key, value in (body.model_extra or {}).items():
        name = prefix + key
        if name in HARMLESS or name in INTERNAL_FIELDS:
            continue
        is_neutral = UNSUPPORTED.get(name, _is_one_of() if name.startswith(_PREFIX) else _is_empty)
        if name not in UNSUPPORTED and name not in of_other_route and not name.startswith(_PREFIX):
            unknown.append(name)
        elif not is_neutral(value):
            refuse_field(name, value)
    return tuple(unknown)


def refuse_field(name: str, value: Any) -> None:
    """Raises InvalidRequestError."""
    raise InvalidRequestError(f"{name} {shown(value)} is not supported", param=name, code="unsupported_parameter")
