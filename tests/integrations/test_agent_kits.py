"""An agent kit with tools against a real server: openai-agents, as its quick start has it, and over chats."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from agent_model import ANSWER, save_agent
from served import MODEL_ID, Served, _afresh, serving  # noqa: F401

agents = pytest.importorskip("agents", reason="openai-agents is not installed: make test-eval has it")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(save_agent(tmp_path_factory.mktemp("agent"))) as server:
        yield server


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_a_loop_of_tools(served: Served, kind: str, is_streamed: bool) -> None:
    """The model calls a tool, the kit runs it, and the model answers behind its result."""
    from openai import AsyncOpenAI

    asked = list[str]()

    @agents.function_tool  # type: ignore[untyped-decorator, unused-ignore]
    def get_weather(city: str) -> str:
        """Tell the weather."""
        asked.append(city)
        return "21"

    async def run() -> Any:
        async with AsyncOpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0) as client:
            model = getattr(agents, kind)(MODEL_ID, client)
            settings = agents.ModelSettings(temperature=0.0)
            agent = agents.Agent(name="a", instructions="Be brief.", model=model, model_settings=settings,
                                 tools=[get_weather])  # fmt: skip
            if not is_streamed:
                return await agents.Runner.run(agent, "How is the weather in Paris?")
            result = agents.Runner.run_streamed(agent, "How is the weather in Paris?")
            async for _ in result.stream_events():
                pass
            return result

    agents.set_tracing_disabled(True)
    result = asyncio.run(run())
    assert (result.final_output, asked) == (ANSWER, ["Paris"])
    assert result.context_wrapper.usage.requests == 2
