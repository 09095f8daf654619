"""The endpoint with the framework openai-agents, in an environment of its own: `./run test-engines openai-agents`."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("agents") is None:
    pytest.skip("needs openai-agents", allow_module_level=True)

import agents

sys.path.insert(0, str(Path(__file__).parent))
from test_recording_clients import CALL, _clients, chain, endpoint, tokenizer  # noqa: F401 - fixtures


@pytest.mark.parametrize("model", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_a_tool_is_one_row(tokenizer: Any, model: Any, stream: bool) -> None:  # noqa: F811
    """The framework runs the tool and calls again. Both replies are one chain of recorded tokens."""
    agents.set_tracing_disabled(True)
    asked: list[str] = []

    @agents.function_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return "sunny"

    async def main() -> None:
        async with endpoint(tokenizer, CALL, "Sunny in Ulm.") as on:
            agent = agents.Agent(
                name="reporter",
                instructions="Report the weather.",
                tools=[weather],
                model=model(model="any", openai_client=on.openai),
            )
            if stream:
                result = agents.Runner.run_streamed(agent, "Weather in Ulm?")
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, "Weather in Ulm?")
            assert result.final_output == "Sunny in Ulm."
            assert asked == ["Ulm"]
            rollout = await on.recorder.finish()
            assert not on.recorder.problem
            assert chain(rollout) == [None, 0]
            first, second = on.policy.calls
            known = np.concatenate([first.prompt_ids, first.outputs[0].token_ids])
            assert second.prompt_ids[: len(known)].tolist() == known.tolist()

    asyncio.run(asyncio.wait_for(main(), 60))
