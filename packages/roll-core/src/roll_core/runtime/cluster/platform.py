"""Selection of a run's platform, and the environment variables that it needs in workers.

The config may name the platform. Otherwise the found platform with the highest priority is selected.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from roll_core.errors import PlacementError, PluginError
from roll_core.plugins.targets import load_target
from roll_core.spec.providers import PlatformProvider

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from roll_core.plugins.registry import Registry
    from roll_core.spec.platform import EnvVar, Platform, Probe

log = logging.getLogger(__name__)


def select_platform(registry: Registry, name: str | None, *, elsewhere: bool = False) -> Platform:
    """Select the platform of this run.

    Raises `PlacementError` if the platform is not found, or if two found platforms have the same highest priority. With
    `elsewhere`, workers run on other hosts, so a platform that the config names need not be found on the driver's host.
    """
    if name is not None:
        platform = make_platform(registry.find(PlatformProvider, name))
        if elsewhere:
            return platform
        probe = _probe(platform, name)
        if not probe.found:
            raise PlacementError(
                f"platform: {name} is not available on this host: {probe.why}. Run roll-core doctor for details, use"
                " a host that has it, or set another platform"
            )
        return platform
    providers = sorted(registry.providers(PlatformProvider), key=lambda provider: -provider.priority)
    reasons: list[str] = []
    present: list[tuple[PlatformProvider, Platform]] = []
    for provider in providers:
        if present and provider.priority < present[0][0].priority:
            break
        try:
            platform = make_platform(provider)
            probe = _probe(platform, provider.name)
        except PluginError as error:  # a broken plugin does not stop a run that can use another platform
            log.warning("%s", error)
            reasons.append(str(error))
            continue
        reasons.append(f"{provider.name}: {probe.why}")
        log.info("platform %s %s: %s", provider.name, "found" if probe.found else "not found", probe.why)
        if probe.found:
            present.append((provider, platform))
    if not present:
        raise PlacementError("no platform was found. " + "; ".join(reasons))
    if len(present) > 1:
        names = " and ".join(provider.name for provider, _ in present)
        raise PlacementError(f"platforms {names} are available with the same priority: choose one with platform:")
    return present[0][1]


def make_platform(provider: PlatformProvider) -> Platform:
    """Create the platform of a provider. Raises `PluginLoadError`."""
    made: Platform = load_target(provider.target, owner=f"platform {provider.name}")()
    return made


def _probe(platform: Platform, name: str) -> Probe:
    try:
        return platform.probe()
    except Exception as error:  # plugin code, and the driver below it
        raise PluginError(f"platform {name}: its probe failed: {type(error).__name__}: {error}") from error


def values_of(variables: Iterable[EnvVar], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Values of environment variables for a worker, by name.

    A variable that the user set in the driver's environment keeps the user's value, unless the platform requires its
    own.
    """
    return {
        variable.name: variable.value if variable.required else environ.get(variable.name, variable.value)
        for variable in variables
    }


class EnvironmentChange:
    """Environment variables of this process, set until `undo`."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def make(self, variables: Mapping[str, str]) -> None:
        """Set the variables. `undo` restores their previous values."""
        self._before = {name: os.environ.get(name) for name in variables} | self._before
        os.environ.update(variables)

    def undo(self) -> None:
        """Restore the previous values. Idempotent."""
        before, self._before = self._before, {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
