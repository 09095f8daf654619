"""Registers the agent `acme`. Imports nothing heavy."""

from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import AgentProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_agents() -> Iterator[AgentProvider]:
    """Agent `acme`. It is a coroutine that never blocks, so it runs in the driver's process."""
    yield AgentProvider(
        name="acme",
        target="roll_agent_acme.agent:AcmeAgent",
        config="roll_agent_acme.config:AcmeAgentConfig",
        summary="Answers a question, then checks its answer",
        isolation="inline",
    )
