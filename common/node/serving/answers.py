"""What a chat asks of its answer's form: which calls it may make, whether it reasons, and the grammar that holds it to
that."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import InvalidRequestError
from common.openai.bodies.values import ToolName
from common.openai.protocol import ChatRequest
from common.text.answers.formats import ToolTypes
from common.text.answers.grammar import CallRules, Thinking, answer_grammar
from common.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """
    Attributes:
        call_key: what the ids of calls are made of. Agents send one request id for several turns, so the prompt is in
            it; the same on every node.
        types: of the tools that the answer may call; None: calls are text.
        is_named: the request names the one function to call.
        tells_reasoning: the client gets the reasoning.
        grammar: ``SamplingParams.grammar``.
    """

    call_key: str
    types: ToolTypes | None
    is_named: bool
    thinking: Thinking
    tells_reasoning: bool
    grammar: str | None


def plan_answer(
    request: ChatRequest, codec: TextCodec, prompt_token_ids: Sequence[int], request_id: str
) -> AnswerPlan | None:
    """Takes as long as the tools are many. None: the answer is text and nothing else.

    Raises:
        InvalidRequestError: calls are asked for of a model whose calls nobody knows how to read.
    """
    calls = CallRules.of(request)
    tools = calls.tools
    if tools and codec.answer_format.tools is None:
        if calls.is_required:
            raise InvalidRequestError(
                "tool_choice cannot be kept: the model's chat template shows no format of tool calls; nodes can be "
                "told one with --tool-call-parser",
                param="tool_choice",
            )
        tools = ()
    if not tools and codec.answer_format.reasoning is None:
        return None
    thinking = codec.thinking_at(prompt_token_ids)
    constraint = None if request.constraint is None else request.constraint.grammar()
    budget = None
    if request.reasoning.token_budget is not None:
        budget = codec.thinking_budget(request.reasoning.token_budget)
    is_held = calls.is_held and bool(tools)
    is_named = isinstance(request.tool_choice, ToolName)
    grammar = None
    if is_held or constraint is not None or budget is not None:
        grammar = answer_grammar(
            codec.answer_format,
            tools=tools if is_held else (),
            is_call_required=calls.is_required,
            parallel=request.parallel_tool_calls and not is_named,
            constraint=constraint,
            thinking=thinking,
            token_id=codec.marker_id,
            budget=budget,
        )
    types = ToolTypes.of(tools) if tools else None
    prompt_digest = hashlib.blake2b(array("Q", prompt_token_ids if tools else ()), digest_size=12).hexdigest()
    return AnswerPlan(f"{request_id}/{prompt_digest}", types, is_named, thinking, request.reasoning.include, grammar)
