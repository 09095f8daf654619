"""Hooks that provide the environments and an agent. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import AgentProvider, EnvironmentProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.providers import Isolation

ROLL_HOOK_API = 1

ENVIRONMENTS: tuple[tuple[str, str, str, Isolation, str], ...] = (
    ("math_with_python", "math_with_python:MathWithPython", "MathWithPythonConfig", "inline", "Arithmetic with a tool"),
    (
        "local_search",
        "local_search:LocalSearch",
        "LocalSearchConfig",
        "thread",
        "Questions about a corpus, with a tool",
    ),
    ("text_game", "text_game:TextGame", "TextGameConfig", "inline", "Find a key and open a chest in a house of rooms"),
    ("tools", "python_tools:PythonTools", "ToolsConfig", "process", "The methods of your class are tools, as in TRL"),
    ("gymnasium", "gymnasium_adapter:GymnasiumAdapter", "GymnasiumConfig", "process", "Environments of gymnasium, GEM"),
    ("reasoning_gym", "reasoning_gym_adapter:ReasoningGym", "ReasoningGymConfig", "process", "Tasks of reasoning-gym"),
    ("textarena", "textarena_adapter:TextArena", "TextArenaConfig", "process", "Games of TextArena"),
    ("mcp", "mcp_adapter:McpServer", "McpConfig", "process", "The tools of an MCP server"),
    ("openenv", "openenv_adapter:OpenEnv", "OpenEnvConfig", "process", "Environments of an OpenEnv server"),
    ("harbor", "harbor:Harbor", "HarborConfig", "process", "Tasks in Harbor's layout, each in a container"),
)
WITH_TOOLS = ("math_with_python", "local_search", "tools", "mcp", "harbor")


@hookimpl
def roll_environments() -> Iterator[EnvironmentProvider]:
    """Our environments, which never block, and adapters, which run in processes."""
    for name, target, config, isolation, summary in ENVIRONMENTS:
        yield EnvironmentProvider(
            name=name,
            target=f"roll_environments.{target}",
            config=f"roll_environments.config:{config}",
            summary=summary,
            isolation=isolation,
            tools=name in WITH_TOOLS,
        )


@hookimpl
def roll_agents() -> Iterator[AgentProvider]:
    """Environments of verifiers, which call the policy themselves."""
    yield AgentProvider(
        name="verifiers",
        target="roll_environments.verifiers_adapter:Verifiers",
        config="roll_environments.config:VerifiersConfig",
        summary="Environments of verifiers 0.4",
        isolation="process",
    )
    yield AgentProvider(
        name="verifiers_v0",
        target="roll_environments.verifiers_v0_adapter:VerifiersV0",
        config="roll_environments.config:VerifiersV0Config",
        summary="Environments of verifiers 0.2 and 0.3, with load_environment",
        isolation="process",
    )
