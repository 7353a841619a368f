"""An agent framework, unmodified, on the three APIs of a real service: three tools in two turns of a conversation.

The model is random; what it may call at each step, and with what, is all that its grammar leaves it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from typing import Literal

import anthropic
import openai
import pydantic
import pytest
from pydantic_ai import Agent, RunContext
from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from tests.e2e.conftest import NODE_FLAGS
from tests.e2e.test_answers import NO_THOUGHT, model_with
from tests.support.service import Service

pytestmark = pytest.mark.full
SETTINGS = ModelSettings(max_tokens=400, temperature=0, parallel_tool_calls=False, extra_body=NO_THOUGHT)


class Report(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")  # or the random model adds properties without end

    metres: Literal[53]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = model_with("hermes", tmp_path_factory.mktemp("model") / "m")
    with Service(folder, prefill_flags=NODE_FLAGS, decode_flags=NODE_FLAGS) as running:
        yield running


@contextlib.asynccontextmanager
async def model_of(api: str, url: str) -> AsyncIterator[Model]:
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=120) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0, timeout=120) as claude,
    ):
        name = (await client.models.list()).data[0].id
        if api == "messages":
            yield AnthropicModel(name, provider=AnthropicProvider(anthropic_client=claude))
        else:
            kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
            yield kind(name, provider=OpenAIProvider(openai_client=client))


async def read(_: object, events: AsyncIterable[object]) -> None:
    """With it an agent streams."""
    async for _event in events:
        pass


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.asyncio
async def test_agent_when_it_has_three_tools_and_two_turns_then_calls_them_and_resumes(
    service: Service, api: str, is_stream: bool
) -> None:
    called: list[str] = []

    def valley(city: Literal["Bern"]) -> int:
        """Metres above the sea."""
        called.append(f"valley {city}")
        return 540

    def hill(city: Literal["Chur"]) -> int:
        """Metres above the sea."""
        called.append(f"hill {city}")
        return 593

    def subtract(a: Literal[593], b: Literal[540]) -> int:
        """``a`` less ``b``."""
        called.append(f"subtract {a} {b}")
        return a - b

    script = ["valley", "hill"]

    async def offered(_: RunContext[object], tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return [tool for tool in tools if tool.name in script[len(called) :][:1]]

    async def ends(_: RunContext[object], tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return [] if script[len(called) :] else tools

    agent = Agent(
        output_type=Report,
        instructions=f"Use tools. {api} {is_stream}",
        tools=[valley, hill, subtract],
        capabilities=[PrepareTools(offered), PrepareOutputTools(ends)],
        model_settings=SETTINGS,
    )
    handler = read if is_stream else None
    async with model_of(api, service.url) as model:
        first = await agent.run("How high are they?", model=model, event_stream_handler=handler)
        assert first.output == Report(metres=53)
        assert called == ["valley Bern", "hill Chur"]
        history = first.all_messages()
        script.append("subtract")
        second = await agent.run("The difference?", model=model, message_history=history, event_stream_handler=handler)
    assert second.output == Report(metres=53)
    assert called == ["valley Bern", "hill Chur", "subtract 593 540"]
    assert second.usage.cache_read_tokens > 0
