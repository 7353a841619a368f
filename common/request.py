"""What travels with one request, and the words for its tokens and its end. Plain data.

A *request* is one prompt with one sampled continuation. ``n > 1`` is expressed by ``Request.num_forks``: the engine
forks the finished prompt, so the prompt is computed once.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.images.span import ImageSpan


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SamplingParams:
    """How to turn logits into tokens.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1.0 and ``min_p`` 0.0 mean "off". ``logprobs`` is the number
    of alternatives to report per token (0: the sampled token's own only; None: no logprobs); ``logprob_token_ids`` are
    reported instead of the most likely ones. ``prompt_logprobs`` asks for the log-probability of every prompt token,
    with that many alternatives. Only ``allowed_token_ids`` are sampled (None: all); no token is that would complete
    one of ``bad_token_ids``, which are sequences. ``grammar`` is llguidance's text of one: the output fits it and ends
    where it does. ``seed`` makes a request reproducible on its own, whatever it
    is batched with. ``max_tokens`` 0 is allowed only with ``prompt_logprobs`` or echo.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: frozenset[int] | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token and of the ``top`` alternatives at its position, most likely first."""

    token_id: int
    logprob: float
    rank: int
    top: Sequence[tuple[int, float]] = ()


@dataclass(slots=True)
class Request:
    """One prompt on its way through an engine.

    Attributes:
        sampling: None on a prefill-only request: the prompt is computed and handed out (leased), nothing is sampled.
        num_forks: how many continuations are sampled from the one prompt.
        remote: a prefix that a peer holds for this request: its first ``num_tokens`` tokens, with key ``prefix_key``.
            The rest of it is opaque to the engine, which passes it to its prefix source. None: nothing is pulled.
        is_remote_optional: losing ``remote`` is no failure: the prompt is computed here, whatever the policy.
        lost_remote: a peer held a prefix for this request and it was lost before the request came here: the prompt is
            computed here if the policy allows it.
        num_resumed_tokens: how many of the prompt's last tokens were generated before, on another node: for sampling,
            penalties and limits they are output.
        wants_progress: report the finished blocks of a prompt without sampling while the rest is computed.
        skip_prefix_lookup: compute the whole prompt although parts may be cached (echo with logprobs needs every row).
        arrival_s: monotonic seconds.
        ttft_target_s: seconds from arrival in which the first token is to come; None: as soon as it can.
        itl_target_s: how long a token may take to come after the one before it; None: as it comes.
        semantic_boundaries: positions inside the prompt at which later prompts are likely to part from it, the most
            reusable first; states are best kept there.
        images: where images are in the prompt, in order.
        image_inputs: what the vision tower needs for each of them; opaque to all but the model runner. None at all
            where there is no tower: then the cache or a peer must have the prompt as far as the last image.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams | None
    eos_token_ids: frozenset[int] = frozenset()
    num_forks: int = 1
    priority: int = 0
    cache_salt: str | None = None
    remote: Any = None
    is_remote_optional: bool = False
    lost_remote: bool = False
    num_resumed_tokens: int = 0
    wants_progress: bool = False
    arrival_s: float = 0.0
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    semantic_boundaries: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    image_inputs: Sequence[Any] = ()

    @property
    def is_prompt_only(self) -> bool:
        """Whether its prompt is computed and handed out, and nothing is sampled."""
        return self.sampling is None

    @property
    def skip_prefix_lookup(self) -> bool:
        return self.sampling is not None and self.sampling.prompt_logprobs is not None
