"""Which hardware a run is on: what the config names, else what is found, the platform of highest priority first; and
what it wants of the environment of workers."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from roll_core.errors import PlacementError, PluginError
from roll_core.plugins.targets import load_target
from roll_core.spec.providers import PlatformProvider

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from roll_core.plugins.registry import Registry
    from roll_core.spec.platform import EnvVar, Platform, Probe, RoleKind

log = logging.getLogger(__name__)


def select_platform(registry: Registry, wanted: str | None, *, elsewhere: bool = False) -> Platform:
    """The platform of this run. Raises `PlacementError` where it is not there, or where two found ones tie.

    With `elsewhere` the workers sit on other hosts: what is asked for need not be here, where only the driver is.
    """
    if wanted is not None:
        platform = make_platform(registry.find(PlatformProvider, wanted))
        probe = _probe(platform, wanted)
        if not probe.found and not elsewhere:
            raise PlacementError(
                f"platform {wanted} is asked for but not here: {probe.why}. Mend that (roll-core doctor says more), run"
                " where it is, or choose another platform"
            )
        return platform
    providers = sorted(registry.providers(PlatformProvider), key=lambda each: -each.priority)
    looked: list[str] = []
    found: list[tuple[PlatformProvider, Platform]] = []
    for provider in providers:
        if found and provider.priority < found[0][0].priority:
            break
        try:
            platform = make_platform(provider)
            probe = _probe(platform, provider.name)
        except PluginError as error:  # one that is broken stops no run that can do without it
            log.warning("%s", error)
            looked.append(str(error))
            continue
        looked.append(f"{provider.name}: {probe.why}")
        log.info("platform %s %s: %s", provider.name, "found" if probe.found else "not found", probe.why)
        if probe.found:
            found.append((provider, platform))
    if not found:
        raise PlacementError("no platform was found. " + "; ".join(looked))
    if len(found) > 1:
        names = " and ".join(provider.name for provider, _ in found)
        raise PlacementError(f"platforms {names} are both here with the same priority: choose one with platform:")
    return found[0][1]


def make_platform(provider: PlatformProvider) -> Platform:
    """An instance of what the record points at. Raises `PluginLoadError`."""
    made: Platform = load_target(provider.target, owner=f"platform {provider.name}")()
    return made


def _probe(platform: Platform, name: str) -> Probe:
    try:
        return platform.probe()
    except Exception as error:  # foreign code, and the driver below it
        raise PluginError(f"platform {name}: its probe failed: {type(error).__name__}: {error}") from error


def environment_of(
    platform: Platform, kind: RoleKind, local_indices: Sequence[int], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What the platform wants for a worker, see `values_of`."""
    return values_of(platform.environment(kind, local_indices), environ)


def values_of(variables: Iterable[EnvVar], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the user has set in the driver's environment is handed on instead, unless workers would not work with it."""
    return {each.name: each.value if each.required else environ.get(each.name, each.value) for each in variables}
