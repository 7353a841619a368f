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
from common.wire.fields import is_empty, shown
from common.wire.manifest_reader import TRANSFER_PARAMS_KEY
from common.wire.pull_sources import SOURCES_KEY
from common.wire.resume import RESUME_KEY, STREAM_STATE_KEY

IsNeutral = Callable[[object], bool]


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
    "store": is_empty,
    "suffix": is_empty,
    "functions": is_empty,
    "function_call": _is_one_of("none", "auto"),
    "modalities": _is_one_of(["text"]),
    "audio": is_empty,
    "prediction": is_empty,
    "web_search_options": is_empty,
    "moderation": is_empty,
    "verbosity": _is_one_of("medium"),
    "stream_options.include_obfuscation": is_empty,
    # vLLM's
    "use_beam_search": is_empty,
    "length_penalty": _is_one_of(1, 1.0),
    "early_stopping": is_empty,
    "logits_processors": is_empty,
    "prompt_embeds": is_empty,
    "media_io_kwargs": is_empty,
    "mm_processor_kwargs": is_empty,
    "repetition_detection": is_empty,
    "watermarking": is_empty,
    "ec_transfer_params": is_empty,
    "routed_experts_prompt_start": _is_one_of(0),
    "return_prompt_text": is_empty,
    "return_token_offsets": is_empty,
    "return_mm_kwargs": is_empty,
    "spaces_between_special_tokens": _is_one_of(True),
    "stream_interval": _is_one_of(1),
    "vllm_xargs": is_empty,
    # Of chats, for completions: what they mean there is done.
    "tool_choice": _is_one_of("none", "auto"),
    "parallel_tool_calls": _is_one_of(True),
    "include_reasoning": _is_one_of(True),
    "add_generation_prompt": _is_one_of(True),
    # SGLang's
    "regex": is_empty,
    "ebnf": is_empty,
    "json_schema": is_empty,
    "stop_regex": is_empty,
    "no_stop_trim": is_empty,
    "reasoning": is_empty,
    "separate_reasoning": _is_one_of(True),
    "stream_reasoning": _is_one_of(True),
    "input_ids": is_empty,
    "lora_path": is_empty,
    "session_params": is_empty,
    "custom_logit_processor": is_empty,
    "custom_params": is_empty,
    "return_hidden_states": is_empty,
    "return_routed_experts": is_empty,
    "return_cached_tokens_details": is_empty,
    "return_prompt_token_ids": is_empty,
    "return_meta_info": is_empty,
    "rid": is_empty,
    "extra_key": is_empty,
    "task": is_empty,
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
        is_neutral = UNSUPPORTED.get(name, _is_one_of() if name.startswith(_PREFIX) else is_empty)
        if name not in UNSUPPORTED and name not in of_other_route and not name.startswith(_PREFIX):
            unknown.append(name)
        elif not is_neutral(value):
            refuse_field(name, value)
    return tuple(unknown)


def refuse_field(name: str, value: Any) -> None:
    """Raises InvalidRequestError."""
    raise InvalidRequestError(f"{name} {shown(value)} is not supported", param=name, code="unsupported_parameter")
