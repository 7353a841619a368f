"""What a chat asks of its answer's form: which calls it may make, whether it reasons, and the grammar that holds it to
that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError
from common.openai.protocol import ChatRequest, ToolName
from common.text.answers.grammar import Thinking, answer_grammar
from common.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """
    Attributes:
        tools: those that the answer may call; none: calls are text.
        is_named: the request names the one function to call.
        tells_reasoning: the client gets the reasoning.
        grammar: ``SamplingParams.grammar``.
    """

    request_id: str
    tools: tuple[Mapping[str, Any], ...]
    is_named: bool
    thinking: Thinking
    tells_reasoning: bool
    grammar: str | None


def plan_answer(
    request: ChatRequest, codec: TextCodec, prompt_token_ids: Sequence[int], request_id: str
) -> AnswerPlan | None:
    """None: the answer is text and nothing else.

    Raises:
        InvalidRequestError: calls are asked for of a model whose calls nobody knows how to read.
    """
    choice = request.tool_choice
    tools = tuple(request.tools or ()) if choice != "none" else ()
    if isinstance(choice, ToolName):
        tools = tuple(tool for tool in tools if tool.get("function", {}).get("name") == choice.name)
    is_required = bool(tools) and (isinstance(choice, ToolName) or choice == "required")
    if tools and codec.answer_format.tools is None:
        if is_required:
            raise InvalidRequestError(
                "tool_choice cannot be kept: the model's chat template shows no format of tool calls; nodes can be "
                "told one with --tool-call-parser",
                param="tool_choice",
            )
        tools = ()
    if not tools and codec.answer_format.reasoning is None:
        return None
    thinking = codec.thinking_at(prompt_token_ids)
    constraint: str | None = None
    is_strict = any(tool.get("function", {}).get("strict") for tool in tools)
    grammar = None
    if is_required or constraint is not None or (tools and (is_strict or not request.parallel_tool_calls)):
        grammar = answer_grammar(
            codec.answer_format,
            tools=tools,
            is_call_required=is_required,
            parallel=request.parallel_tool_calls and not isinstance(choice, ToolName),
            constraint=constraint,
            thinking=thinking,
            token_id=codec.marker_id,
        )
    return AnswerPlan(request_id, tools, isinstance(choice, ToolName), thinking, request.reasoning.include, grammar)
