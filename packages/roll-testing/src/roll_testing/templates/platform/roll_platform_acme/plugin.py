"""Registers the platform `acme`. Imports nothing heavy."""

from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import PlatformProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_platforms() -> Iterator[PlatformProvider]:
    """Platform `acme`, which a run selects before the CPU where its devices are found."""
    yield PlatformProvider(
        name="acme",
        target="roll_platform_acme.platform:AcmePlatform",
        summary="Accelerators of Acme",
        priority=10,
    )
