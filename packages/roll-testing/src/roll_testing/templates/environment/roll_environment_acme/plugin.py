"""Registers the environment `acme`. Imports nothing heavy."""

from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import EnvironmentProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_environments() -> Iterator[EnvironmentProvider]:
    """Environment `acme`."""
    yield EnvironmentProvider(
        name="acme",
        target="roll_environment_acme.environment:AcmeEnvironment",
        config="roll_environment_acme.config:AcmeEnvironmentConfig",
        summary="Guess a number; the replies are higher and lower",
        isolation="inline",
    )
